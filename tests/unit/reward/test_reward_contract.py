"""What a request for rewards depends on, and what a config may not hold."""

from typing import Any

import pytest
from pydantic import ValidationError

from tasks.reward.contract import RewardConfig, SandboxConfig

JUDGE: dict[str, Any] = {"url": "http://there", "rubric": "r"}
Fields = dict[str, Any]


def fields(**changes: Any) -> Fields:
    config = {"parts": [{"kind": "exact"}], **changes}
    return RewardConfig.model_validate(config).request_fields()


def test_a_config_of_the_first_kind_says_what_it_always_said() -> None:
    part = {"kind": "exact", "name": None, "weight": 1.0, "accuracy": False, "options": {}}
    assert fields(cpu_limit_s=5.0) == {
        "parts": [part],
        "cpu_limit_s": 5.0,
        "wall_limit_s": 60.0,
        "memory_limit_bytes": 2 << 30,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 7, "recycle_after": 5, "max_failed_share": 1.0, "python": "/python"},
        {"sandbox": {"concurrency": 9, "patience_s": 1.0, "api_key_env": "KEY"}},
    ],
)
def test_how_hard_a_machine_works_is_no_part_of_a_request(changes: Fields) -> None:
    assert fields(**changes) == fields()


def test_how_a_service_is_asked_is_no_part_of_a_request() -> None:
    asked = {**JUDGE, "api_key_env": "KEY", "concurrency": 3, "patience_s": 1}
    judge, other = ({"kind": "judge", "options": options} for options in (JUDGE, asked))
    assert fields(parts=[other]) == fields(parts=[judge])


@pytest.mark.parametrize(
    "changes",
    [
        {"combine": "normalised_sum"},
        {"domain_column": "level"},
        {"sandbox": {"allow_unsandboxed": True}},
        {"parts": [{"kind": "exact", "gate": True}]},
        {"parts": [{"kind": "exact", "domains": ["d"]}]},
        {"parts": [{"kind": "exact", "weight": 2}]},
        {"parts": [{"kind": "exact", "options": {"whole": True}}]},
    ],
)
def test_another_way_to_grade_is_another_request(changes: Fields) -> None:
    assert fields(**changes) != fields()


def test_what_a_request_says_makes_the_same_request_again() -> None:
    judge = {"kind": "judge", "options": {**JUDGE, "concurrency": 3}, "domains": ["d"]}
    said = fields(parts=[judge, {"kind": "code"}], sandbox={"concurrency": 9}, workers=5)
    assert fields(**said) == said


def test_no_password_of_a_sandbox_service_is_taken_or_quoted() -> None:
    with pytest.raises(ValidationError, match="Name a variable with api_key_env") as refused:
        SandboxConfig(backend="http", url="http://user:secret@there")
    assert "secret" not in str(refused.value)
