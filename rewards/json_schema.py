"""JSON: the answer is one strict JSON document, and a schema describes it."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import model_validator
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

from rewards.answer import AnswerConfig, answer_text, visible_text
from rewards.contract import GoldExample, RewardInput, Score

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?:json)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.M | re.S | re.I)
_MAX_DEPTH = 50
"""Deeper documents are not valid: the validator recurses, and would fail in places of its own."""


class Config(AnswerConfig):
    """Where the document stands, what it may hold, and which schema it must satisfy."""

    text: Literal["answer", "block", "visible"] = "answer"
    """`answer`: the final answer; `block`: the last fenced block (three backticks, `json` or
    nothing); `visible`: all outside `<think>`. A fence around the whole text is no part of it."""
    json_schema: dict[str, Any] | bool | None = None
    """One schema for all rows (draft 2020-12 unless its `$schema` says otherwise)."""
    schema_field: str | None = None
    """Or the key of the row's extra that holds its schema, an object or its JSON text. Without
    either, any JSON document will do."""
    allow_duplicate_keys: bool = False
    allow_nan: bool = False
    """Python's own `NaN`, `Infinity` and `-Infinity`, which are no JSON."""

    @model_validator(mode="after")
    def _schema_is_one(self) -> "Config":
        if self.json_schema is not None and self.schema_field is not None:
            raise ValueError(
                "json_schema and schema_field are both given. Expected one schema for all rows or "
                "the name of the field that holds each row's. Remove one."
            )
        problem = (
            None if self.json_schema is None else _schema_problem(json.dumps(self.json_schema))
        )
        if problem:
            raise ValueError(f"json_schema {problem}.")
        return self


GOLD: Sequence[GoldExample] = (
    GoldExample(
        RewardInput('<answer>{"n": 7}</answer>'),
        {"json_schema": {"type": "object", "required": ["n"]}},
    ),
    GoldExample(
        RewardInput("Here:\n```json\n[1, 2]\n```\n", extra={"schema": {"maxItems": 2}}),
        {"text": "block", "schema_field": "schema"},
    ),
    GoldExample(RewardInput('{"n": 7}'), {"text": "visible"}),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1 if the document is strict JSON and satisfies the schema, else 0.

    `format` is an annotation, as the standard has it. Reasons: `no_final_answer`, `hedged`,
    `no_block`, `not_json`, `too_deep`, `invalid`.
    """
    problem = check_gold(item.answer, item.extra, config)
    if problem is not None:
        return Score(None, "grader_error", problem)
    text = _text(item, config)
    if isinstance(text, Score):
        return text
    try:
        document = _parsed(text, config)
    except RecursionError:
        return Score(0.0, reason="too_deep")
    except ValueError:
        return Score(0.0, reason="not_json")
    if _is_deep(document):
        return Score(0.0, reason="too_deep")
    schema = _schema_text(item.extra, config)
    valid = schema is None or _validator(schema).is_valid(document)
    return Score(1.0) if valid else Score(0.0, reason="invalid")


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why the row's schema is unusable, or None; the gold answer takes no part."""
    if config.schema_field is None:
        return None
    if extra.get(config.schema_field) is None:
        return f"the row's extra has no schema {config.schema_field!r}"
    schema = _schema_text(extra, config)
    problem = "is no JSON" if schema is None else _schema_problem(schema)
    return problem and f"the row's schema {config.schema_field!r} {problem}"


def _text(item: RewardInput, config: Config) -> str | Score:
    if config.text == "answer":
        text = answer_text(item, config)
        return text if isinstance(text, Score) else _unfenced(text)
    visible = visible_text(item.completion, prompt=item.prompt)
    if config.text == "visible":
        return _unfenced(visible)
    blocks = _BLOCK.findall(visible)
    return blocks[-1] if blocks else Score(0.0, reason="no_block")


def _unfenced(text: str) -> str:
    whole = _BLOCK.fullmatch(text.strip())
    return whole[1] if whole else text


def _parsed(text: str, config: Config) -> Any:
    return json.loads(
        text,
        object_pairs_hook=None if config.allow_duplicate_keys else _object_of_unique_keys,
        parse_constant=None if config.allow_nan else _refuse_constant,
    )


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names a key twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _is_deep(document: Any) -> bool:
    level: list[Any] = [document]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)


def _schema_text(extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns the schema as JSON, by which validators are kept; None: no schema, or no JSON."""
    schema = config.json_schema
    if config.schema_field is not None:
        schema = extra.get(config.schema_field)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                return None
    return None if schema is None else json.dumps(schema)


@lru_cache(maxsize=512)
def _schema_problem(schema_text: str) -> str | None:
    """Returns what is wrong with a schema; references beyond it are never fetched."""
    schema = json.loads(schema_text)
    if not isinstance(schema, dict | bool):
        return f"is {schema_text[:60]}, expected a JSON Schema: an object or a boolean"
    validator = validator_for(schema, default=Draft202012Validator)
    dialect = None if isinstance(schema, bool) else schema.get("$schema")
    if dialect is not None and str(dialect).rstrip("#") != _uri(validator):
        return f"is of the dialect {dialect!r}, which is not known here"
    try:
        validator.check_schema(cast(dict[str, Any], schema))
    except SchemaError as error:
        return f"is no JSON Schema: {error.message} at {error.json_path}"
    return _unresolved_reference(schema) or _endless_reference(schema_text)


def _uri(validator: type[Validator]) -> str:
    return str(cast(Mapping[str, Any], validator.META_SCHEMA)["$schema"]).rstrip("#")


def _unresolved_reference(schema: dict[str, Any] | bool) -> str | None:
    root = Resource.from_contents(schema, default_specification=DRAFT202012)
    uri = root.id() or ""
    registry = EMPTY_REGISTRY.with_resource(uri, root).crawl()
    open_resources = [(root, registry.resolver(uri))]
    while open_resources:
        resource, resolver = open_resources.pop()
        contents = resource.contents
        for key in ("$ref", "$dynamicRef"):
            reference = contents.get(key) if isinstance(contents, Mapping) else None
            try:
                _ = resolver.lookup(reference) if isinstance(reference, str) else None
            except Unresolvable:
                return (
                    f"refers to {reference!r}, which it does not hold: nothing is fetched. Copy "
                    "what it refers to into its $defs"
                )
        open_resources += [
            (part, resolver.in_subresource(part)) for part in resource.subresources()
        ]
    return None


def _endless_reference(schema_text: str) -> str | None:
    try:
        _validator(schema_text).is_valid(None)
    except RecursionError:
        return "refers to itself without end"
    return None


@lru_cache(maxsize=512)
def _validator(schema_text: str) -> Validator:
    schema = json.loads(schema_text)
    return validator_for(schema, default=Draft202012Validator)(schema, registry=EMPTY_REGISTRY)
