"""A real run graded by a mixture: exact match, programs in a sandbox, a function of the user's."""

import json
from pathlib import Path

import pytest

from storage.experience import read_shard
from storage.ledger import read_commit, read_record
from storage.opening import open_store
from storage.records import StageRecord
from storage.schemas import REWARDS
from storage.store_config import StoreConfig
from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RUN = "graded"
FUNCTION = """
def short(completions, answer, **columns):
    return [1.0 if len(text) <= len(gold) else None for text, gold in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums in two domains; what the model writes is a program too, as whole numbers are."""
    made = tmp_path_factory.mktemp("rewards")
    (made / "my_rewards.py").write_text(FUNCTION)
    rows = [
        {
            "prompt": f"{first}+{second}=",
            "answer": str(first + second)[::-1],
            "tests": [{"stdin": "", "stdout": ""}],
            "level": "easy" if second < 40 else "hard",
        }
        for first in range(20, 26)
        for second in range(34, 46)
    ]
    (made / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return made


@pytest.fixture(scope="module")
def place(cli: Cli, directory: Path) -> tuple[str, str]:
    """Where a run of two steps lies."""
    settings = {
        "prompts.datasets": [
            {
                "kind": "jsonl",
                "name": "sums",
                "held_out": 16,
                "options": {
                    "path": str(directory / "sums.jsonl"),
                    "extra_fields": ["tests", "level"],
                },
            }
        ],
        "prompts.groups_per_step": 8,
        "rollout.groups_per_shard": 4,
        "reward.domain_column": "level",
        "reward.parts": [
            {"kind": "exact", "accuracy": True, "options": {"whole": True}},
            {"kind": "code", "weight": 0.1, "domains": ["hard"], "options": {"whole": True}},
            {
                "kind": "python",
                "weight": 0.5,
                "options": {"function": f"{directory / 'my_rewards.py'}:short"},
            },
        ],
        "evaluate.suites.held_out.max_prompts": 8,
    }
    words = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
    store = ("--store", str(directory / "store"))
    cli.ok("launch", "addition", "--run", RUN, "--steps", "2", *words, *store)
    return store


def graded(place: tuple[str, str]) -> StageRecord:
    store = open_store(StoreConfig(uri=place[1]), writing=False)
    commit, _ = read_commit(store, RUN, 1)
    return read_record(store, next(ref for ref in commit.records if ref.stage == "reward-0001"))


def test_every_part_is_stored_with_its_value_or_why_it_has_none(place: tuple[str, str]):
    store = open_store(StoreConfig(uri=place[1]), writing=False)
    rows = read_shard(store, graded(place).outputs["rewards"], schema=REWARDS).to_pylist()
    assert len(rows) == 4 * 8
    seen: set[tuple[str, str]] = set()
    for row in rows:
        exact, code, short = row["parts"]
        seen |= {(part["name"], part["status"]) for part in row["parts"]}
        terms = [(exact["value"], 1.0), (code["value"], 0.1), (short["value"], 0.5)]
        total = sum(value * weight for value, weight in terms if value is not None)
        assert row["reward"] == pytest.approx(total)
        if code["status"] == "not_applicable":
            assert code["reason"] == "not for level easy"
        if short["status"] == "not_applicable":
            assert short["reason"].endswith(":short returned None")
    assert {("exact", "graded"), ("code", "graded"), ("code", "not_applicable")} <= seen
    assert ("python", "graded") in seen


def test_the_record_names_the_users_code_by_digest(place: tuple[str, str], directory: Path):
    name = f"reward:{directory / 'my_rewards.py'}:short"
    assert graded(place).environment[name].startswith("sha256:")


def test_a_stranger_verifies_without_running_the_users_code(
    cli: Cli, place: tuple[str, str], directory: Path
):
    check = ("verify", RUN, "--level", "facts", "--json", *place)
    report = json.loads(cli.ok(*check))
    assert "it would run" in report["left_out"][0]
    assert report["left_out"][0].endswith("--trust does it")
    trusted = json.loads(cli.ok(*check, "--trust"))
    assert (trusted["holds"], trusted["left_out"]) == (True, [])
    assert trusted["grading_differences"] == []


def test_another_function_is_checked_before_a_run_goes_on(cli: Cli, place: tuple[str, str]):
    changed = "reward.parts.2.options.function=no_such_module:f"
    failed = cli("resume", RUN, "--steps", "1", "--set", changed, *place)
    assert failed.returncode != 0
    assert "There is no module 'no_such_module'" in failed.stderr.strip().splitlines()[-1]
