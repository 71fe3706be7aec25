import pytest
from pydantic import ValidationError

from rewards import json_schema
from rewards.contract import RewardInput

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def verdict(text: str, **options: object) -> tuple[float | None, str | None]:
    score = json_schema.score(
        RewardInput(f"<answer>{text}</answer>"), json_schema.Config(**options)
    )
    return score.value, score.reason


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ('{"name": "Ada", "age": 36}', 1.0, None),
        ('{"name": "Ada"}', 1.0, None),
        ('```json\n{"name": "Ada"}\n```', 1.0, None),
        ('{"age": 36}', 0.0, "invalid"),
        ('{"name": "Ada", "age": -1}', 0.0, "invalid"),
        ('{"name": "Ada", "age": true}', 0.0, "invalid"),
        ('{"name": "Ada", "x": 1}', 0.0, "invalid"),
        ('"Ada"', 0.0, "invalid"),
        ('{"name": "Ada"', 0.0, "not_json"),
        ("{'name': 'Ada'}", 0.0, "not_json"),
        ('{"name": "Ada"} and more', 0.0, "not_json"),
        ('{"name": "Eve", "name": "Ada"}', 0.0, "not_json"),
        ('{"name": "Ada", "age": NaN}', 0.0, "not_json"),
        ("", 0.0, "not_json"),
        ("[" * 100_000, 0.0, "too_deep"),
        ("9" * 10_000, 0.0, "not_json"),
        ('{"name": "\\ud800"}', 1.0, None),
        ('{"name": "\ud800"}', 1.0, None),
    ],
)
def test_document_is_strict_json_and_satisfies_the_schema(
    text: str, value: float, reason: str | None
) -> None:
    assert verdict(text, json_schema=PERSON) == (value, reason)


def test_laxness_is_asked_for_by_name() -> None:
    assert verdict('{"a": 1, "a": 2}', allow_duplicate_keys=True) == (1.0, None)
    assert verdict("[NaN, -Infinity]", allow_nan=True) == (1.0, None)


def test_depth_is_bounded_before_the_validator_recurses() -> None:
    tree = {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    assert verdict('{"a":' * 49 + "{}" + "}" * 49, json_schema=tree) == (1.0, None)
    assert verdict('{"a":' * 60 + "{}" + "}" * 60, json_schema=tree) == (0.0, "too_deep")


@pytest.mark.parametrize(
    ("completion", "value", "reason"),
    [
        ("```json\n{}\n```\nthen\n```\n[1]\n```\n", 1.0, None),
        ("```\n[1]\n```\nthen\n```json\n{}\n```", 0.0, "invalid"),
        ("<think>```json\n[1]\n```</think> none", 0.0, "no_block"),
        ("```json\n[1]\n", 0.0, "no_block"),
        ("```python\n[1]\n```", 0.0, "no_block"),
    ],
)
def test_the_last_closed_block_counts(completion: str, value: float, reason: str | None) -> None:
    config = json_schema.Config(text="block", json_schema={"type": "array"})
    score = json_schema.score(RewardInput(completion), config)
    assert (score.value, score.reason) == (value, reason)


def test_all_visible_text_can_be_the_document() -> None:
    config = json_schema.Config(text="visible")
    assert json_schema.score(RewardInput("<think>so</think>\n[1]\n"), config).value == 1.0
    assert json_schema.score(RewardInput("It is [1]"), config).value == 0.0


@pytest.mark.parametrize("schema", [PERSON, '{"required": ["name"]}', True])
def test_each_row_may_bring_its_schema(schema: object) -> None:
    config = json_schema.Config(schema_field="schema")
    item = RewardInput('<answer>{"name": "Ada"}</answer>', extra={"schema": schema})
    assert json_schema.score(item, config).value == 1.0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "has no schema 'schema'"),
        ({"schema": "{"}, "is no JSON"),
        ({"schema": [1]}, "expected a JSON Schema"),
        ({"schema": {"type": "strin"}}, "'strin' is not valid"),
        ({"schema": {"$ref": "https://example.com/a"}}, "nothing is fetched"),
    ],
)
def test_a_row_without_a_usable_schema_is_an_error(extra: dict, message: str) -> None:
    config = json_schema.Config(schema_field="schema")
    problem = json_schema.check_gold(None, extra, config)
    assert problem is not None
    assert message in problem
    score = json_schema.score(RewardInput("<answer>1</answer>", extra=extra), config)
    assert (score.value, score.status, score.reason) == (None, "grader_error", problem)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "'strin' is not valid"),
        ({"pattern": "("}, "no JSON Schema"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "nothing is fetched"),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, "'#/\\$defs/no'"),
        ({"$ref": "#"}, "refers to itself without end"),
        ({"$schema": "https://example.com/mine"}, "dialect"),
    ],
)
def test_a_schema_that_cannot_work_is_refused(schema: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        json_schema.Config(json_schema=schema)


def test_two_schemas_are_refused() -> None:
    with pytest.raises(ValidationError, match="both given"):
        json_schema.Config(json_schema={}, schema_field="schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
        {"$id": "http://x/y", "$ref": "z", "$defs": {"z": {"$id": "z", "type": "integer"}}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/a",
            "definitions": {"a": {"type": "integer"}},
        },
        {"properties": {"$ref": {"type": "string"}}, "type": ["integer"]},
    ],
)
def test_references_within_the_schema_are_followed(schema: dict) -> None:
    assert verdict("1", json_schema=schema) == (1.0, None)
    assert verdict('"1"', json_schema=schema) == (0.0, "invalid")
