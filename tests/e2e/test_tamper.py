"""A real run, every kind of object of it spoilt in every way: each is found and named."""

import json
import shutil
from pathlib import Path

import pytest

from storage.layout import commit_key
from tasks.workspace import Workspace
from tests.e2e.conftest import Cli
from tests.e2e.tamper import KINDS, WAYS, Lab, table

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RUN = "finished"


@pytest.fixture(scope="module")
def launched(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run, to be spoilt and mended."""
    return shutil.copytree(finished, tmp_path_factory.mktemp("tamper") / "store")


@pytest.fixture
def lab(launched: Path, tmp_path: Path) -> Lab:
    return Lab(launched, RUN, Workspace(cache=tmp_path, scratch=tmp_path))


def test_every_kind_of_object_that_is_spoilt_is_found_and_named(lab: Lab):
    assert lab.verify().cause is None
    cases = list(lab.cases())
    print(table(cases))
    assert [case for case in cases if not case.seen] == []
    assert {case.kind for case in cases} == set(KINDS)
    swapped_or_single = {case.kind for case in cases if case.way == "swap"}
    assert set(KINDS) - swapped_or_single == {"run.json", "training prompts", "held-out prompts"}
    for way in WAYS:
        assert any(case.way == way for case in cases)
    # A lease seals nothing, and the snapshot of the stop is sealed by the next commit.
    lease, snapshot_record = lab.keys()["other"]
    assert lease == f"runs/{RUN}/leases/controller.json"
    assert "/steps/00000003/stages/snapshot/" in snapshot_record
    assert lab.verify().cause is None


def test_a_cut_tail_is_found_only_by_whoever_knows_the_head(launched: Path, tmp_path: Path):
    copy = tmp_path / "store"
    shutil.copytree(launched, copy)
    lab = Lab(copy, RUN, Workspace(cache=tmp_path, scratch=tmp_path))
    for kind in ("steps", "evals"):
        shutil.rmtree(copy / "runs" / RUN / kind / "00000003")
    blind = lab.verify(known_head=False)
    assert (blind.cause, blind.tail, blind.head_step) == (None, "tail unproven", 2)
    report = lab.verify()
    assert report.cause is not None
    assert commit_key(RUN, 2) in report.cause
    assert lab.head in report.cause


def test_the_command_ends_in_the_cause_and_says_it_by_its_exit(
    cli: Cli, launched: Path, tmp_path: Path
):
    copy = tmp_path / "store"
    shutil.copytree(launched, copy)
    facts = cli("verify", RUN, "--level", "facts", "--store", str(copy))
    assert facts.returncode == 0, facts.stdout + facts.stderr
    shard = next((copy / "runs" / RUN / "steps" / "00000002").rglob("reward-0000.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1])
    key = str(shard.relative_to(copy))
    for options in ([], ["--json"]):
        failed = cli("verify", RUN, *options, "--store", str(copy))
        assert failed.returncode == 1
        assert key in failed.stderr.strip().splitlines()[-1]
        assert key in failed.stdout


def test_another_way_of_grading_lists_what_would_change_and_writes_nothing(
    cli: Cli, launched: Path
):
    before = sorted(path for path in launched.rglob("*") if path.is_file())
    options = ["--level", "facts", "--steps", "1..2", "--store", str(launched)]
    asked = cli("verify", RUN, *options, "--set", "reward.parts.0.weight=2", "--json")
    report = json.loads(asked.stdout)
    assert asked.returncode == 0, asked.stderr
    changed = [sample for shard in report["grading_differences"] for sample in shard["examples"]]
    # What was right earns 2 instead of 1; what was wrong stays at 0.
    assert changed
    assert {(sample["was"], sample["now"]) for sample in changed} == {(1.0, 2.0)}
    told = cli("verify", RUN, *options, "--set", "reward.parts.0.weight=2").stdout
    assert f"{len(changed)} samples would change; nothing was written" in told
    same = cli("verify", RUN, *options, "--set", "reward.parts.0.kind=numeric").stdout
    assert "(reward.parts.0.kind=numeric): 0 samples would change" in same
    assert sorted(path for path in launched.rglob("*") if path.is_file()) == before


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--level", "facts", "--set", "reward.parts.0.kind=maths"], "Did you mean math"),
        (["--level", "facts", "--set", "rollout.max_tokens=3"], "changes no reward"),
        (["--set", "reward.parts.0.weight=2"], "Expected --level facts"),
    ],
)
def test_another_way_of_grading_that_makes_no_sense_is_refused(
    cli: Cli, launched: Path, options: list[str], cause: str
):
    refused = cli("verify", RUN, *options, "--store", str(launched))
    assert refused.returncode != 0
    assert cause in refused.stderr.strip().splitlines()[-1]
