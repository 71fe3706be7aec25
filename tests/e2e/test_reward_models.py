"""Real vLLM: a reward model's logits are transformers', and a judge's verdict always parses."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from infra.home import home as product_home
from rewards import judge, reward_model
from rewards.contract import EndpointConfig, RewardInput, Score
from storage.policies import policy_digest
from tasks.reward.endpoint import HttpEndpoint, open_endpoint
from tasks.workspace import Workspace
from tests.e2e.rollout_lab import HERE, PYTHON

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXTS = ["hello", "a much longer text " * 9, "é 日本 🙂", "x", "<|im_end|>", *map(str, range(32))]
TOO_LONG = "y" * 3000


@dataclass(frozen=True)
class Lab:
    """Both models, their servers, and what transformers says of `TEXTS` and of the turns."""

    directory: Path
    workspace: Workspace
    classifier: HttpEndpoint
    chat: HttpEndpoint
    logits: list[list[float]]

    def reward(self, *items: RewardInput, **options: Any) -> list[Score]:
        config = reward_model.Config(path=str(self.directory / "classifier"), **options)
        return list(reward_model.score_batch(items, config, self.classifier))

    def judged(self, *items: RewardInput, **options: Any) -> list[Score]:
        path = str(self.directory / "chat")
        config = judge.Config(path=path, rubric="Is it kind?", tries=1, **options)
        return list(judge.score_batch(items, config, self.chat))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Both servers start at once: most of a start is imports."""
    directory = tmp_path_factory.mktemp("reward-models")
    texts = directory / "texts.json"
    texts.write_text(json.dumps(TEXTS))
    made = subprocess.run(
        [PYTHON, str(HERE / "reward_models.py"), str(directory), str(texts)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    # What vLLM finds out about a kind of model is kept there, as on a user's machine.
    cache = product_home() / "cache"
    # Sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as scratch:
        (Path(scratch) / "cache").mkdir()
        (Path(scratch) / "cache" / "vllm").symlink_to(cache / "vllm")
        (cache / "vllm").mkdir(parents=True, exist_ok=True)
        workspace = Workspace(cache=Path(scratch) / "cache", scratch=Path(scratch))
        with ThreadPoolExecutor(2) as pool:
            starts = [
                pool.submit(start, directory / name, module, workspace)
                for name, module in (("classifier", reward_model), ("chat", judge))
            ]
        with closing(starts[0].result()) as classifier, closing(starts[1].result()) as chat:
            logits = json.loads((directory / "logits.json").read_text())
            yield Lab(directory, workspace, classifier, chat, logits)
        left = [each for each in processes() if str(directory) in each]
        assert left == []


def start(model: Path, grader: ModuleType, workspace: Workspace) -> HttpEndpoint:
    config = EndpointConfig(path=str(model), arguments=("--dtype", "float32"))
    return open_endpoint(config, serves=grader.SERVES, python=PYTHON, workspace=workspace)


def processes() -> list[str]:
    found = psutil.process_iter(["cmdline"])
    return [" ".join(process.info["cmdline"] or []) for process in found]


@pytest.mark.parametrize("label", [0, 1])
def test_rewards_are_the_logits_that_transformers_computes_in_order(lab: Lab, label: int) -> None:
    scores = lab.reward(*map(RewardInput, TEXTS), label=label, batch=8)
    values = [score.value for score in scores]
    assert values == pytest.approx([row[label] for row in lab.logits[:-1]], abs=1e-3)
    # Otherwise another order could pass.
    assert len({round(row[label], 2) for row in lab.logits}) > len(TEXTS) // 2


def test_turns_go_through_the_models_own_chat_template(lab: Lab) -> None:
    item = RewardInput("Because.", prompt="templated", extra={"question": "Why?"})
    [score] = lab.reward(item, messages=True, prompt_field="question")
    assert score.value == pytest.approx(lab.logits[-1][0], abs=1e-3)


def test_prompt_and_completion_are_one_text(lab: Lab) -> None:
    [score] = lab.reward(RewardInput("lo", prompt="hel"))
    assert score.value == pytest.approx(lab.logits[0][0], abs=1e-3)


def test_a_text_beyond_the_models_length_costs_only_itself(lab: Lab) -> None:
    first, long, last = lab.reward(*map(RewardInput, ["hello", TOO_LONG, "x"]))
    assert first.value == pytest.approx(lab.logits[0][0], abs=1e-3)
    assert last.value == pytest.approx(lab.logits[3][0], abs=1e-3)
    assert (long.value, long.status) == (None, "grader_error")
    assert "maximum context length is 2048" in (long.reason or "")
    # From the left, so that the end decides: what is cut off does not matter.
    cut = [lab.reward(RewardInput(begin + TOO_LONG), truncate="left")[0] for begin in ("", "other")]
    assert cut[0].reason == "input_truncated"
    assert cut[0].value == pytest.approx(cut[1].value, abs=1e-6)


def test_hostile_texts_are_scored_or_an_error_with_a_reason(lab: Lab) -> None:
    scores = lab.reward(*map(RewardInput, ["\x00", "\ud800", "\u202e", "a\ufffeb", ""]))
    assert [score.status for score in scores] == ["graded"] * 4 + ["grader_error"]
    assert lab.reward(RewardInput("\ud800")) == lab.reward(RewardInput("\ufffd"))


def test_the_weights_and_the_server_are_described(lab: Lab) -> None:
    described = lab.classifier.describe()
    assert described["reward_model:classifier"] == policy_digest(lab.directory / "classifier")
    assert described["reward_model_server:classifier"].startswith("vllm 0.")


@pytest.mark.parametrize("options", [{}, {"scale": (1, 5)}, {"pass_at": 5}])
def test_a_judge_that_knows_nothing_still_gives_a_verdict(lab: Lab, options: dict) -> None:
    items = [RewardInput(text, answer="kind", prompt="Say something.") for text in TEXTS[:6]]
    for score in lab.judged(*items, **options):
        assert score.status == "graded"
        assert score.value is not None
        assert 0.0 <= score.value <= 1.0
        assert (score.reason or "").startswith("judge ")


def test_a_judges_verdict_is_the_same_when_it_is_asked_again(lab: Lab) -> None:
    with_another_seed = lab.judged(RewardInput("hello"), seed=7)
    assert with_another_seed == lab.judged(RewardInput("hello"))


def test_a_completion_too_long_for_the_judge_is_an_error(lab: Lab) -> None:
    [score] = lab.judged(RewardInput(TOO_LONG))
    assert (score.value, score.status) == (None, "grader_error")
    assert "maximum context length" in (score.reason or "")
