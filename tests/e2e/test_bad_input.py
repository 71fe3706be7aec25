"""Every bad input ends in one line that says what is wrong, before any engine starts."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from infra.home import engines_python
from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def last_line(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode not in (0, None), done.stdout
    assert "Traceback" not in done.stderr
    return (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["launch", "adition"], "Did you mean addition"),
        (["launch", "addition", "--set", "train.learing_rate=1"], "train.learning_rate"),
        (["launch", "addition", "--set", "rollout.group_size=1"], "group of one"),
        (["launch", "addition", "--set", "train.ranks=7"], "cannot divide"),
        (["launch", "addition", "--set", "rollout.max_tokens=4000"], "max_model_len"),
        (["launch", "addition", "--set", "steps=ten"], "steps"),
        (["launch", "addition", "--run", "not/a name"], "not usable"),
        (["launch", "addition", "--set", "reward.parts.0.kind=exakt"], "exact"),
        (["launch", "addition", "--set", "prompts.datasets.0.kind=aditon"], "addition"),
        (["launch", "addition", "--set", "model.path=/no/such/model"], "/no/such/model"),
        (["launch", "addition", "--set", "train.micro_batch_tokens=900000000"], "cannot fit"),
        (["launch", "addition", "--set", "train.learning_rate=Infinity"], "no Infinity"),
        (["launch", "addition", "--set", "rollout.max_model_len=257"], "256 positions"),
        (["launch", "addition", "--set", "rollout.python=/no/such/python"], "rollout.python"),
        (["launch", "addition", "--steps", "0"], "--steps"),
        (["resume", "nothing-of-that-name"], "nothing-of-that-name"),
        (["show", "nothing-of-that-name"], "nothing-of-that-name"),
        (["export", "nothing-of-that-name", "somewhere"], "nothing-of-that-name"),
        (["export", "run@last", "somewhere"], "RUN@STEP"),
        (["show", "x", "--store", "gs://bucket"], "gs"),
        (["show", "x", "--store", "s3://b", "--endpoint", "http://127.0.0.1:9"], "127.0.0.1:9"),
    ],
)
def test_a_bad_argument_is_named_on_the_last_line(cli: Cli, arguments: list[str], cause: str):
    assert cause in last_line(cli(*arguments))
    assert not cli.engines()


def test_wrong_credentials_and_a_missing_bucket_are_told_apart(cli: Cli):
    state = json.loads((cli.home / "services.json").read_text())
    endpoint = state["s3_endpoint"]
    missing = cli("show", "x", "--store", "s3://no-such-bucket", "--endpoint", endpoint)
    assert "no-such-bucket" in last_line(missing)
    wrong = Cli(
        home=cli.home / "elsewhere",
        store="",
        environment=cli.environment
        | {
            "ROLLBOOK_HOME": str(cli.home / "elsewhere"),
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
        },
    )
    refused = last_line(wrong("show", "x", "--store", "s3://rollbook", "--endpoint", endpoint))
    assert re.search("credential|key", refused, re.IGNORECASE), refused


def test_an_unreachable_prefect_server_costs_no_run_its_name(cli: Cli, tmp_path: Path):
    away = Cli(
        home=cli.home,
        store="",
        environment=cli.environment | {"PREFECT_API_URL": "http://127.0.0.1:9/api"},
    )
    done = away("launch", "addition", "--run", "one", "--store", str(tmp_path))
    assert "http://127.0.0.1:9/api" in last_line(done)
    assert not list(tmp_path.rglob("run.json"))


def test_launch_makes_a_missing_bucket_when_told_to(cli: Cli):
    endpoint = json.loads((cli.home / "services.json").read_text())["s3_endpoint"]
    store = ("--store", "s3://made-when-told", "--endpoint", endpoint)
    stopped = ("--set", "model.path=/no/such/model")
    assert "--create-bucket" in last_line(cli("launch", "addition", *stopped, *store))
    assert "/no/such" in last_line(cli("launch", "addition", "--create-bucket", *stopped, *store))
    assert "There is no run" in last_line(cli("show", "nothing", *store))


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([], "no rows"),
        ([{"prompt": "1+1="}], "answer"),
        ([{"prompt": "", "answer": "2"}, {"prompt": "b", "answer": "2"}], "1"),
        ([{"prompt": "a", "answer": "2", "id": 1}, {"prompt": "b", "answer": "2", "id": 1}], "id"),
    ],
)
def test_bad_data_is_named_at_launch(cli: Cli, tmp_path: Path, rows: list[dict], cause: str):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"path": str(path), **({"id_field": "id"} if rows and "id" in rows[0] else {})}
    dataset = [{"kind": "jsonl", "options": options, "held_out": 1}]
    done = cli("launch", "addition", "--set", f"prompts.datasets={json.dumps(dataset)}")
    assert cause in last_line(done)
    assert not cli.engines()


def test_a_model_with_nan_or_without_tokenizer_is_refused(cli: Cli, tmp_path: Path):
    make = (
        "import sys, torch\n"
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "config = Qwen2Config(vocab_size=16, hidden_size=32, intermediate_size=32,"
        " num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, eos_token_id=1)\n"
        "model = Qwen2ForCausalLM(config)\n"
        "model.save_pretrained(sys.argv[1])\n"
    )
    bare = tmp_path / "bare"
    subprocess.run([engines_python(), "-c", make, str(bare)], check=True, capture_output=True)
    done = cli("launch", "addition", "--set", f"model.path={bare}")
    assert "tokenizer" in last_line(done)


def test_a_run_that_exists_is_refused_and_resume_named(cli: Cli, tmp_path: Path):
    store = ("--store", str(tmp_path))
    small = ("--set", "evaluate.suites.held_out.max_prompts=8")
    cli.ok("launch", "addition", "--run", "one", "--steps", "1", *small, *store)
    done = cli("launch", "addition", "--run", "one", *store)
    assert "rollbook resume one" in last_line(done)
    again = cli("resume", "one", *store)
    assert "--steps" in last_line(again)
