import json
from pathlib import Path

import pytest

from flows.memory import ProcessMemory, check_fits, memory_plan, size
from flows.model import ModelFacts
from flows.overrides import with_overrides
from flows.recipes import RECIPES

FACTS = ModelFacts(
    architecture="LlamaForCausalLM",
    num_parameters=134_515_008,
    vocabulary=49_152,
    hidden_size=576,
    num_layers=30,
    max_positions=8192,
    stop_token_ids=[2],
)


def test_ranks_share_the_optimizer_state():
    one = memory_plan(RECIPES["smollm2"](), FACTS)
    two = memory_plan(with_overrides(RECIPES["smollm2"](), ["train.ranks=2"]), FACTS)
    assert [process.name for process in two][-2:] == ["train rank 0", "train rank 1"]
    assert two[-1].num_bytes < one[-1].num_bytes


def test_a_model_that_grades_is_part_of_the_plan(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    part = {"kind": "reward_model", "name": "helpful", "options": {"path": str(tmp_path)}}
    config = with_overrides(RECIPES["smollm2"](), [f"reward.parts={json.dumps([part])}"])
    plan = {process.name: process for process in memory_plan(config, FACTS)}
    assert "2 x 3.0 MiB weights" in plan["model of reward helpful"].why
    rest = memory_plan(RECIPES["smollm2"](), FACTS)
    assert plan.keys() - {process.name for process in rest} == {"model of reward helpful"}


def test_what_cannot_fit_is_refused_with_the_figures():
    plan = [ProcessMemory("train rank 0", 1 << 60, "masters")]
    with pytest.raises(ValueError, match="cannot fit") as caught:
        check_fits(plan)
    assert "masters" in str(caught.value)
    assert "memory plan" in check_fits([ProcessMemory("controller", 1, "small")])


def test_sizes_read_well():
    assert [size(n) for n in (12, 2 << 10, 3 << 20, 5 << 30)] == [
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
