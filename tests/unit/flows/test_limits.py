import json
import os
from pathlib import Path

import pytest

from flows.config import RunConfig
from flows.limits import check_limits, check_pythons
from flows.model import ModelFacts
from flows.overrides import with_overrides
from flows.recipes import RECIPES

# 2 layers of 4 heads x 8 numbers, of which 2 heads are cached: 16 numbers for keys per token.
FACTS = ModelFacts(
    architecture="Qwen2ForCausalLM",
    num_parameters=1000,
    vocabulary=16,
    hidden_size=32,
    num_layers=2,
    max_positions=256,
    stop_token_ids=[1],
)
MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2}


def warnings(directory: Path, *overrides: str, **model: object) -> list[str]:
    (directory / "config.json").write_text(json.dumps(MODEL | model))
    return check_limits(changed(*overrides), FACTS, model_dir=directory)


def changed(*overrides: str) -> RunConfig:
    return with_overrides(RECIPES["addition"](), overrides)


def test_what_fits_gives_no_warning(tmp_path: Path):
    assert warnings(tmp_path, "rollout.max_model_len=256") == []


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"rollout\.max_model_len is 257, .* 256 positions"):
        warnings(tmp_path, "rollout.max_model_len=257")


def test_rotary_scaling_extends_the_positions(tmp_path: Path):
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert warnings(tmp_path, "rollout.max_model_len=1024", rope_parameters=yarn) == []
    kept = {"rope_type": "llama3", "factor": 4.0}
    with pytest.raises(ValueError, match="256 positions"):
        warnings(tmp_path, "rollout.max_model_len=1024", rope_parameters=kept)


def test_the_cache_holds_one_sequence_at_least(tmp_path: Path):
    # keys and values (2) x 2 layers x 16 numbers x 4 bytes x 128 tokens = 32768 bytes
    assert warnings(tmp_path, "rollout.kv_cache_bytes=32768") == []
    with pytest.raises(ValueError, match="take 32768 bytes"):
        warnings(tmp_path, "rollout.kv_cache_bytes=32767")


@pytest.mark.parametrize("stage", ["rollout", "train"])
def test_more_threads_than_cores_are_refused(tmp_path: Path, stage: str):
    cores = os.cpu_count() or 1
    assert warnings(tmp_path, f"{stage}.threads={cores}") == []
    with pytest.raises(ValueError, match=rf"{stage}\.threads is {cores + 1}"):
        warnings(tmp_path, f"{stage}.threads={cores + 1}")


def test_more_ranks_than_cores_are_a_warning(tmp_path: Path):
    wide = ("prompts.groups_per_step=1024", "train.ranks=1024")
    assert "train.ranks x train.threads is 1024" in warnings(tmp_path, *wide)[0]


@pytest.mark.parametrize("stage", ["rollout", "train"])
def test_an_interpreter_that_cannot_be_started_is_refused(tmp_path: Path, stage: str):
    check_pythons(changed(f"{stage}.python=python3"))
    plain = tmp_path / "python"
    plain.write_text("no program")
    for missing in (str(plain), str(tmp_path / "absent")):
        with pytest.raises(ValueError, match=rf"{stage}\.python"):
            check_pythons(changed(f"{stage}.python={missing}"))
