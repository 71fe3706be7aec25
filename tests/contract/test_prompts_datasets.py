"""What every data set of `tasks.prompts.DATASETS` must do; a newcomer needs a line in EXAMPLES."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.experience import read_shard
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import PromptInputs, canonical_json
from storage.schemas import PROMPTS
from storage.store_config import StoreConfig
from tasks.prompts import DATASETS
from tasks.prompts.contract import DatasetConfig
from tasks.prompts.opening import read_rows
from tests.unit.prompts.tiny_tokenizer import save_tokenizer

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(90)]


def jsonl_example(directory: Path) -> dict[str, Any]:
    path = directory / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return {"options": {"path": str(path)}, "held_out": 20}


def parquet_example(directory: Path) -> dict[str, Any]:
    path = directory / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return {"options": {"path": str(path)}, "held_out": 20}


def huggingface_example(directory: Path) -> dict[str, Any]:
    path = directory / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return {"options": {"path": str(path)}, "held_out": 20}


def reasoning_gym_example(directory: Path) -> dict[str, Any]:
    # One of those whose tasks follow the hash seed of the process that makes them.
    options = {"dataset": "isomorphic_strings", "size": 90, "seed": 3}
    return {"options": options, "held_out": 20}


def verl_example(directory: Path) -> dict[str, Any]:
    path = directory / "verl.parquet"
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"split": "train", "index": index},
        }
        for index, row in enumerate(ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return {"options": {"path": str(path)}, "held_out": 20}


EXAMPLES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "addition": lambda directory: {},
    "first_letter": lambda directory: {},
    "huggingface": huggingface_example,
    "jsonl": jsonl_example,
    "parquet": parquet_example,
    "reasoning_gym": reasoning_gym_example,
    "verl": verl_example,
}

DRAW_TWO_STEPS = """
import json, sys
from pathlib import Path
from storage.layout import StepScope
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import Cursor, InputRef
from storage.store_config import StoreConfig
from tasks.prompts.contract import PrepareRequest, PromptsRequest
from tasks.prompts.prepare import prepare
from tasks.prompts.stage import run

tokenizer, home = Path(sys.argv[2]), Path(sys.argv[3])
store = open_store(StoreConfig(uri=str(home / "store")), writing=True)

def draw(config):
    request = PrepareRequest(
        config=config, seed=7, tokenizer=InputRef(digest="x", files={}), max_prompt_tokens=2000
    )
    inputs = prepare(request, store, tokenizer_dir=tokenizer, cache=home / "cache")
    cursor, digests = Cursor(), []
    for step in (1, 2):
        scope = StepScope(run=config["datasets"][0]["kind"], step=step)
        drawn = run(
            PromptsRequest(scope=scope, seed=7, inputs=inputs, cursor=cursor, num_groups=50), store
        )
        cursor = drawn.cursor
        digests.append(drawn.record.outputs["prompts"].sha256)
    return {"inputs": inputs.model_dump(mode="json"), "steps": digests}

print(json.dumps({kind: draw(config) for kind, config in json.loads(sys.argv[1]).items()}))
"""


@dataclass(frozen=True)
class Drawn:
    """What one process made of all examples, by kind, and the store that it wrote."""

    by_kind: dict[str, dict[str, Any]]
    store: ObjectStore


@pytest.fixture(scope="module")
def drawn_twice(tmp_path_factory: pytest.TempPathFactory) -> list[Drawn]:
    """Prepares every example and draws two steps of it, in two processes of other hash seeds."""
    directory = tmp_path_factory.mktemp("datasets")
    configs = {
        kind: {"datasets": [{"kind": kind} | example(directory)], "groups_per_step": 50}
        for kind, example in EXAMPLES.items()
    }
    tokenizer = save_tokenizer(directory / "tokenizer", bos=False)
    return [
        draw_in_a_child(configs, tokenizer=tokenizer, home=directory / seed, hash_seed=seed)
        for seed in ("1", "2")
    ]


def draw_in_a_child(
    configs: dict[str, Any], *, tokenizer: Path, home: Path, hash_seed: str
) -> Drawn:
    (home / "store").mkdir(parents=True)
    child = subprocess.run(
        [sys.executable, "-c", DRAW_TWO_STEPS, json.dumps(configs), str(tokenizer), str(home)],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    store = open_store(StoreConfig(uri=str(home / "store")), writing=False)
    return Drawn(by_kind=json.loads(child.stdout), store=store)


def test_every_data_set_has_an_example():
    assert sorted(EXAMPLES) == sorted(DATASETS)


@pytest.mark.parametrize("kind", sorted(DATASETS))
def test_same_seed_and_cursor_give_the_same_bytes_in_every_process(
    kind: str, drawn_twice: list[Drawn]
):
    first, second = (drawn.by_kind[kind] for drawn in drawn_twice)
    assert first == second
    assert first["steps"][0] != first["steps"][1]


@pytest.mark.parametrize("kind", sorted(DATASETS))
def test_no_prompt_is_on_both_sides(kind: str, drawn_twice: list[Drawn]):
    inputs = PromptInputs.model_validate(drawn_twice[0].by_kind[kind]["inputs"])
    store = drawn_twice[0].store
    train, held_out = (
        read_shard(store, ref, schema=PROMPTS).to_pylist()
        for ref in (inputs.train, inputs.held_out)
    )
    assert len(train) >= 50
    assert len(held_out) >= 20
    tokens = [{tuple(row["prompt_token_ids"]) for row in rows} for rows in (train, held_out)]
    assert not tokens[0] & tokens[1]
    ids = [row["prompt_id"] for row in train + held_out]
    assert len(set(ids)) == len(ids)
    assert all(isinstance(json.loads(row["extra"]), dict) for row in train + held_out)


@pytest.mark.parametrize("kind", sorted(DATASETS))
def test_rows_say_where_they_came_from_and_fit_into_json(kind: str, tmp_path: Path):
    example = EXAMPLES[kind](tmp_path)
    rows = read_rows(DatasetConfig(kind=kind, options=example.get("options", {})))
    for row in rows.train + (rows.held_out or []):
        assert row.where
        assert row.prompt
        canonical_json([row.prompt, row.answer, dict(row.extra)])


@pytest.mark.parametrize("kind", sorted(DATASETS))
def test_unknown_options_are_refused(kind: str):
    with pytest.raises(ValueError, match="no_such_option"):
        read_rows(DatasetConfig(kind=kind, options={"no_such_option": 1}))
