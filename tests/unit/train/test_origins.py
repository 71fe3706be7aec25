"""Base models: the addition model's tokens and split, and what the check refuses."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from infra.home import engines_python
from tasks.prompts import addition as data_set
from tests.unit.train.lab import ROOT


def origins(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [engines_python(), "-m", "tasks.train.origins", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def model(lab, tiny_model, tmp_path) -> Path:
    """A checkable copy of the tiny model: with the tokenizer of the addition model."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    lab("save_addition_tokenizer", directory)
    return directory


def test_supervised_start_never_sees_a_held_out_pair(lab):
    rows = data_set.read(data_set.Config())
    seen = {f"{left}+{right}=" for left, right in lab("addition_pairs")}
    assert seen == {row.prompt for row in rows.train}
    assert not seen & {row.prompt for row in rows.held_out}
    assert len(rows.held_out) == 800


def test_addition_tokenizer_takes_and_gives_characters(lab):
    told = lab("addition_tokens", "37+48=")
    assert told["ids"] == [5, 9, 12, 6, 10, 13]
    assert told["text"] == "37+48="
    assert told["size"] == 14


def test_supervised_start_gives_the_same_bits_twice(lab, tmp_path):
    digests = [lab("short_supervised_start", tmp_path / name) for name in ("a", "b")]
    assert digests[0] == digests[1]


def test_check_says_what_launch_needs(model):
    done = origins("--check", str(model))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    assert facts["architecture"] == "Qwen2ForCausalLM"
    assert (facts["vocabulary"], facts["hidden_size"], facts["num_layers"]) == (32, 32, 2)
    assert facts["stop_token_ids"] == [1]
    assert facts["num_parameters"] > 0


def test_failed_check_ends_with_its_cause(model):
    (model / "tokenizer.json").unlink()
    done = origins("--check", str(model))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "has no tokenizer.json. Expected" in last


def test_model_without_weights_is_refused(lab, model):
    (model / "model.safetensors").unlink()
    assert "has no *.safetensors" in lab("check_error", model)


def test_tokenizer_that_the_embedding_cannot_hold_is_refused(lab, model):
    path = model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "vocab_size": 8}))
    assert "14 tokens, the embedding 8 rows" in lab("check_error", model)


def test_weights_with_nan_are_refused_by_tensor(lab, model):
    lab("spoil", model, "model.norm.weight", float("nan"))
    assert "'model.norm.weight'" in lab("check_error", model)


def test_mixture_of_experts_is_refused(lab, model):
    path = model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_local_experts": 8}))
    assert "mixture of experts" in lab("check_error", model)


def test_unknown_builtin_names_those_that_there_are(tmp_path):
    done = origins("builtin:adition", str(tmp_path / "made"))
    assert done.returncode == 1
    assert "builtin:addition, builtin:smollm2" in done.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "made").exists()


def test_local_directory_is_taken_whole(model, tmp_path):
    made = tmp_path / "made"
    assert origins(str(model), str(made)).returncode == 0
    assert sorted(p.name for p in made.iterdir()) == sorted(p.name for p in model.iterdir())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".making")] == []


def test_a_maker_ends_when_its_parent_does(tmp_path):
    command = [engines_python(), "-m", "tasks.train.origins", "--lifeline", "builtin:addition"]
    maker = subprocess.Popen(
        [*command, str(tmp_path / "made")], cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True
    )
    assert maker.stdin is not None
    maker.stdin.close()
    assert maker.wait(60) == -signal.SIGKILL


def test_landings_of_dead_makers_are_swept_and_of_living_ones_kept(model, tmp_path):
    dead, living = tmp_path / ".making-dead", tmp_path / ".making-living"
    (dead / "model").mkdir(parents=True)
    living.mkdir()
    lock = os.open(living, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert origins(str(model), str(tmp_path / "made")).returncode == 0
    os.close(lock)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".making")] == [living.name]
