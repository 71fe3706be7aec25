import json
from pathlib import Path

import pytest

from flows.export import export_policy, parse_target
from flows.gc import run_gc
from storage.errors import NotFound
from storage.inputs import put_input
from storage.layout import StepScope
from storage.ledger import create_run, put_commit
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.policies import write_policy
from storage.records import Probe, StepCommit, sha256_hex
from storage.retention import Rule
from storage.safetensors_files import RawTensor, write_tensors
from storage.store_config import StoreConfig
from tests.contract.records import commit, run_record
from tests.contract.synthetic_runs import SyntheticRun

PROBE = Probe(token_ids=[[1, 2]], logprobs=[[None, -0.5]], next_token_ids=[3], next_logprobs=[-1.5])


def committed(directory: Path, *, max_file_bytes: int) -> ObjectStore:
    """A store with run `r`, whose genesis holds two tensors of 64 bytes."""
    store = open_store(StoreConfig(uri=str(directory / "store")), writing=True)
    (directory / "config.json").write_text("{}")
    model = put_input(store, {"config.json": directory / "config.json"})
    record = run_record().model_copy(update={"model": model})
    create_run(store, record)
    tensors = {name: RawTensor("F32", (16,), bytes(64)) for name in ("a", "b")}
    write_tensors(directory / "weights", tensors, max_file_bytes=max_file_bytes)
    policy = write_policy(
        store,
        directory / "weights",
        scope=StepScope(run="r", step=0),
        attempt="a",
        version=0,
        dtype="float32",
        tied={},
        probe=PROBE,
        cache=None,
    )
    genesis = commit(0, sha256_hex(record.to_bytes()))
    put_commit(store, genesis.model_copy(update={"policy": policy}))
    return store


def never(commit: StepCommit) -> None:
    raise AssertionError(f"the policy of step {commit.step} is there")


def test_a_policy_of_several_files_is_exported_with_its_index(tmp_path: Path):
    store = committed(tmp_path, max_file_bytes=64)
    export_policy(store, "r", tmp_path / "out", cache=tmp_path / "cache", bring_back=never)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    assert (tmp_path / "out" / "config.json").exists()


def test_a_policy_of_one_file_needs_no_index(tmp_path: Path):
    store = committed(tmp_path, max_file_bytes=1 << 20)
    export_policy(store, "r@0", tmp_path / "out", cache=tmp_path / "cache", bring_back=never)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert not list((tmp_path / "out").glob("*.index.json"))


def test_a_policy_that_retention_gave_up_is_asked_for_once_and_nothing_half_is_left(
    tmp_path: Path,
):
    store = open_store(StoreConfig(uri=str(tmp_path / "store")), writing=True)
    SyntheticRun(store, snapshots_every=0).steps(8)
    rule = Rule(policies_last=2, policies_every=4, snapshots_last=2, snapshots_every=9, pinned=[])
    run_gc(store, "r", rule=rule)
    asked: list[int] = []
    with pytest.raises(NotFound):
        export_policy(
            store,
            "r@6",
            tmp_path / "out",
            cache=tmp_path / "cache",
            bring_back=lambda commit: asked.append(commit.step),
        )
    assert asked == [6]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["r@last", "r@", "r@²", "r@٣", "r@-1"])
def test_a_step_is_plain_digits(target: str):
    with pytest.raises(ValueError, match="RUN@STEP"):
        parse_target(target)
