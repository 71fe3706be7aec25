"""Whole runs of `addition` through the command line: bits, kills, exactly once, exports."""

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import psutil
import pytest

from infra.home import engines_python
from storage.experience import read_shard
from storage.ledger import commits, read_record
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.schemas import PROMPTS, REWARDS, SAMPLES, TRAIN
from storage.store_config import StoreConfig
from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 5
SMALL = ("--set", "evaluate.suites.held_out.max_prompts=64", "--set", "train.snapshot_every=2")
Wait = Callable[[Callable[[], bool], float], None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in a directory, which tests can watch while a run writes it."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def straight(cli: Cli, directory: Path) -> dict:
    """Five steps without interruption: what every other run must end in."""
    cli.ok("launch", "addition", "--run", "straight", "--steps", str(STEPS), *SMALL, *at(directory))
    return json.loads(cli.ok("show", "straight", "--json", *at(directory)))


def at(directory: Path) -> tuple[str, str]:
    return ("--store", str(directory))


def opened(directory: Path) -> ObjectStore:
    return open_store(StoreConfig(uri=str(directory)), writing=False)


def digests(summary: dict) -> list[str]:
    return [step["policy_digest"] for step in summary["steps"]]


def check_exactly_once(store: ObjectStore, run: str) -> None:
    """Every planned group was sampled, graded and consumed once, over all committed steps."""
    sampled, graded, consumed, planned = [], [], [], []
    for commit, _ in commits(store, run, start=1):
        records = {ref.stage: read_record(store, ref) for ref in commit.records}
        planned.append(records["prompts"].outputs["prompts"].rows)
        for stage, record in records.items():
            if stage.startswith("rollout-"):
                sampled.append(read_shard(store, record.outputs["samples"], schema=SAMPLES))
            if stage.startswith("reward-"):
                graded.append(read_shard(store, record.outputs["rewards"], schema=REWARDS))
        consumed.append(read_shard(store, records["train"].outputs["train"], schema=TRAIN))
    connection = duckdb.connect()
    for name, tables in (("samples", sampled), ("rewards", graded), ("train", consumed)):
        for index, table in enumerate(tables):
            connection.register(f"{name}_{index}", table)
        parts = " union all ".join(
            f"select sample_id from {name}_{index}" for index in range(len(tables))
        )
        connection.execute(f"create view {name} as {parts}")
    count, groups, most = connection.execute(
        """select count(*), count(distinct regexp_replace(s.sample_id, '-[0-9]+$', '')), max(n)
           from (select sample_id, count(*) as n from samples group by 1) s
           join (select sample_id from rewards) using (sample_id)
           join (select sample_id from train) using (sample_id)"""
    ).fetchone() or (0, 0, 0)
    assert most == 1
    assert groups == sum(planned)
    assert count == sum(table.num_rows for table in consumed)


def check_prompts_once(store: ObjectStore, run: str) -> None:
    """No prompt is drawn twice within the first epoch."""
    drawn = Counter(
        prompt
        for commit, _ in commits(store, run, start=1)
        for ref in commit.records
        if ref.stage == "prompts"
        for prompt in prompt_ids(store, ref)
    )
    assert max(drawn.values()) == 1


def prompt_ids(store: ObjectStore, ref) -> Iterator[str]:
    shard = read_record(store, ref).outputs["prompts"]
    yield from read_shard(store, shard, schema=PROMPTS)["prompt_id"].to_pylist()


def test_a_fresh_run_of_three_steps_and_two_more_equal_five(
    cli: Cli, directory: Path, straight: dict
):
    cli.ok("launch", "addition", "--run", "cut", "--steps", "3", *SMALL, *at(directory))
    cli.ok("resume", "cut", "--steps", "2", *at(directory))
    cut = json.loads(cli.ok("show", "cut", "--json", *at(directory)))
    assert digests(cut) == digests(straight)
    assert len(set(digests(straight))) == STEPS + 1
    store = opened(directory)
    check_exactly_once(store, "cut")
    check_prompts_once(store, "cut")


def child(cli: Cli, part: str) -> psutil.Process:
    return next(p for p in cli.engines() if part in " ".join(p.cmdline()))


@pytest.mark.parametrize("victim", ["controller", "tasks.service.*rollout", "tasks.train.worker"])
def test_a_kill_in_mid_step_loses_and_repeats_nothing(
    cli: Cli, directory: Path, straight: dict, wait_for: Wait, victim: str
):
    run = f"killed-{victim.rpartition('.')[2].strip('*')}"
    arguments = ("launch", "addition", "--run", run, "--steps", str(STEPS), *SMALL, *at(directory))
    process = cli.start(*arguments)
    plan = directory / "runs" / run / "steps" / "00000003" / "plan-0000.json"
    wait_for(plan.exists, 240)
    if victim == "controller":
        process.kill()
    else:
        os.kill(engine_pid(cli, victim), signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    wait_for(lambda: not cli.engines(), 20)
    if process.returncode:
        cli.ok("resume", run, *at(directory))
    summary = json.loads(cli.ok("show", run, "--json", *at(directory)))
    assert digests(summary) == digests(straight), output
    check_exactly_once(opened(directory), run)
    check_prompts_once(opened(directory), run)
    assert not cli.engines()


def engine_pid(cli: Cli, victim: str) -> int:
    """The process to kill: a rank, or the service whose spec lies in a `rollout-*` directory."""
    module, _, name = victim.partition(".*")
    for process in cli.engines():
        command = " ".join(process.cmdline())
        if module in command and name in command:
            return process.pid
    raise AssertionError(f"no process of {victim} among {[p.cmdline() for p in cli.engines()]}")


def test_interrupt_ends_all_children_and_the_run_resumes(
    cli: Cli, directory: Path, straight: dict, wait_for: Wait
):
    arguments = ("launch", "addition", "--run", "stopped", "--steps", str(STEPS), *SMALL)
    process = cli.start(*arguments, *at(directory))
    wait_for((directory / "runs/stopped/steps/00000002/plan-0000.json").exists, 240)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "resume" in output.strip().splitlines()[-1]
    wait_for(lambda: not cli.engines(), 20)
    cli.ok("resume", "stopped", *at(directory))
    summary = json.loads(cli.ok("show", "stopped", "--json", *at(directory)))
    assert digests(summary) == digests(straight)


def test_a_second_controller_ends_while_the_first_one_lives(
    cli: Cli, directory: Path, straight: dict, wait_for: Wait
):
    first = cli.start("resume", "straight", "--steps", "3", *at(directory))
    lease = directory / "runs/straight/leases/controller.json"
    wait_for(lambda: '"released":false' in lease.read_text(), 60)
    second = cli("resume", "straight", "--steps", "3", *at(directory))
    assert second.returncode == 1
    assert "living controller" in second.stderr.strip().splitlines()[-1]
    output, _ = first.communicate(timeout=240)
    assert first.returncode == 0, output


def test_an_export_loads_in_transformers_and_answers(
    cli: Cli, directory: Path, straight: dict, tmp_path: Path
):
    target = tmp_path / "model"
    cli.ok("export", f"straight@{STEPS}", str(target), *at(directory))
    script = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "load = AutoModelForCausalLM.from_pretrained\n"
        "model, info = load(sys.argv[1], output_loading_info=True)\n"
        "assert not info['missing_keys'] and not info['unexpected_keys'], info\n"
        "ids = AutoTokenizer.from_pretrained(sys.argv[1])('37+48=', return_tensors='pt')\n"
        "out = model.generate(**ids, max_new_tokens=5, do_sample=False)\n"
        "print(out.shape[1] > ids['input_ids'].shape[1])\n"
    )
    done = subprocess.run(
        [engines_python(), "-c", script, str(target)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "True", done.stderr
    again = cli("export", "straight", str(target), *at(directory))
    assert again.returncode == 1
    assert "not empty" in again.stderr


def test_records_of_a_step_say_what_proved_the_weights(directory: Path, straight: dict):
    store = opened(directory)
    for commit, _ in commits(store, "straight", start=1):
        ref = next(ref for ref in commit.records if ref.stage == "rollout-0000")
        proof = read_record(store, ref).proof
        assert proof is not None
        assert proof.kind == "exact"
        assert proof.policy_version == commit.step - 1
        assert proof.max_abs_diff <= proof.tolerance
        assert ref.key.startswith(f"runs/straight/steps/{commit.step:08d}/stages/rollout-0000/")
