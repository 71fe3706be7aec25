"""What a report says: a step as markdown, its samples as rows, the run's curve as an image."""

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tokenizers import Tokenizer

from flows.progress import number
from storage.experience import read_shard
from storage.inputs import open_input
from storage.layout import commit_key
from storage.ledger import read_record
from storage.object_store import ObjectStore
from storage.records import EvalRecord, RunRecord, StepCommit
from storage.schemas import PROMPTS, REWARDS, SAMPLES

SHOWN_SAMPLES = 3
Row = dict[str, Any]

METRIC_NAMES = {
    "reward_mean": "reward",
    "accuracy": "accuracy",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "completion_tokens_mean": "tokens per completion",
    "truncated_share": "cut off (share)",
    "zero_std_share": "groups with equal rewards (share)",
    "logprob_gap_mean": "sampler to learner, mean logprob difference",
    "rollout_kl": "sampler to learner, KL (k3)",
    "num_samples": "samples",
    "num_graded": "graded",
}
LAPS = ("plan_s", "rollout_s", "reward_s", "train_s", "checkpoint_s")


@dataclass
class Curve:
    """Points of the run's curve; only the report thread touches it."""

    steps: list[int] = field(default_factory=list[int])
    rewards: list[float | None] = field(default_factory=list[float | None])
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])

    def add_step(self, commit: StepCommit) -> None:
        """Adds the mean reward of a step."""
        self.steps.append(commit.step)
        self.rewards.append(commit.metrics.get("reward_mean"))

    def add_evaluation(self, record: EvalRecord) -> None:
        """Adds a held-out accuracy."""
        if record.accuracy is not None:
            points = self.evaluations.setdefault(record.suite, {})
            points[record.policy_version] = record.accuracy


def step_markdown(commit: StepCommit, rows: list[Row], *, run_url: str | None = None) -> str:
    """Returns a step's report: what came out, where the time went, what was sampled, where it lies.

    `run_url` is where the UI shows the flow run that the step is a part of.
    """
    metrics = commit.metrics
    figures = "\n".join(
        f"| {label} | {value:.4g} |"
        for name, label in METRIC_NAMES.items()
        if (value := metrics.get(name)) is not None
    )
    laps = "\n".join(
        f"| {lap.removesuffix('_s')} | {number(metrics.get(lap), 2)} |"
        for lap in LAPS
        if metrics.get(lap) is not None
    )
    samples = "\n\n".join(_sample_markdown(row) for row in rows)
    return (
        f"# Step {commit.step} of {f'[{commit.run}]({run_url})' if run_url else commit.run}\n\n"
        f"Policy version **{commit.policy_version}**, digest `{commit.policy_digest[:16]}`. "
        f"Follows commit `{commit.previous[:16]}`.\n\n"
        f"| metric | value |\n|---|---|\n{figures}\n\n"
        f"| stage | seconds |\n|---|---|\n{laps}\n\n## Samples\n\n{samples}\n\n{_keys(commit)}"
    )


def _keys(commit: StepCommit) -> str:
    """Returns where the store keeps what this step did."""
    objects = [
        ("commit", commit_key(commit.run, commit.step)),
        ("plan", commit.plan.key),
        *((ref.stage, ref.key) for ref in commit.records),
    ]
    rows = "\n".join(f"| {name} | `{key}` |" for name, key in objects)
    return f"## In the store\n\n| what | key |\n|---|---|\n{rows}\n"


def _sample_markdown(row: Row) -> str:
    return (
        f"**{row['sample']}**: reward {number(row['reward'])} ({row['reason']}), "
        f"expected `{row['answer']}`, {row['tokens']} tokens, {row['finish']}\n\n"
        f"{_fenced(row['prompt'])}\n\n{_fenced(row['completion'])}"
    )


def _fenced(text: str) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}text\n{text}\n{fence}"


def facts_table(rows: Sequence[tuple[str, str]]) -> str:
    """Returns names with their values as a table; the first is its head, for an empty one shows."""
    (name, value), *rest = rows
    lines = "".join(f"| {name} | {value} |\n" for name, value in rest)
    return f"| {name} | {value} |\n|---|---|\n{lines}"


def cell(text: str) -> str:
    """Returns `text` as it can stand in a table: one line, no column of its own, no HTML."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def table_rows(rows: list[Row]) -> list[Row]:
    """Returns rows for a table artifact, whose cells the UI renders as HTML: tags are escaped."""
    return [
        {name: html.escape(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
        for row in rows
    ]


def sample_rows(
    store: ObjectStore, run: RunRecord, commit: StepCommit, *, cache: Path
) -> list[Row]:
    """Returns the best, the worst and the middle sample of a step's first shard, decoded."""
    records = {ref.stage: ref for ref in commit.records}
    if "rollout-0000" not in records:
        return []
    sampled = read_record(store, records["rollout-0000"]).outputs["samples"]
    graded = read_record(store, records["reward-0000"]).outputs["rewards"]
    asked = read_record(store, records["prompts"]).outputs["prompts"]
    samples = read_shard(store, sampled, schema=SAMPLES).to_pylist()
    rewards = read_shard(store, graded, schema=REWARDS).to_pylist()
    answers = {
        row["group_id"]: row["answer"]
        for row in read_shard(store, asked, schema=PROMPTS).to_pylist()
    }
    order = sorted(range(len(samples)), key=lambda index: rewards[index]["reward"] or 0.0)
    chosen = dict.fromkeys([order[-1], order[len(order) // 2], order[0]]) if order else {}
    decode = _decoder(str(open_input(store, run.model, cache=cache)))
    return [
        _row(samples[index], rewards[index], answers.get(samples[index]["group_id"]), decode)
        for index in list(chosen)[:SHOWN_SAMPLES]
    ]


def _row(sample: Row, reward: Row, answer: str | None, decode: Any) -> Row:
    reasons = "; ".join(
        f"{part['name']} {number(part['value'])}" + (f" {part['reason']}" if part["reason"] else "")
        for part in reward["parts"]
    )
    return {
        "sample": sample["sample_id"],
        "prompt": decode(sample["prompt_token_ids"]),
        "completion": decode(sample["completion_token_ids"]),
        "answer": answer,
        "reward": reward["reward"],
        "reason": reasons or reward["status"],
        "tokens": len(sample["completion_token_ids"]),
        "finish": sample["finish_reason"],
    }


@lru_cache(maxsize=4)
def _decoder(directory: str) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False)


def curve_image(curve: Curve, title: str) -> str:
    """Returns the reward curve with held-out accuracies as a PNG `data:` address."""
    figure = Figure(figsize=(7, 3.2), dpi=90, layout="constrained")
    axes = figure.subplots()
    rewards = [float("nan") if value is None else value for value in curve.rewards]
    axes.plot(curve.steps, rewards, linewidth=1.2, label="reward (mean)")
    for suite, points in curve.evaluations.items():
        versions, accuracies = zip(*sorted(points.items()), strict=True)
        axes.plot(versions, accuracies, marker="o", markersize=4, label=f"accuracy ({suite})")
    axes.set(xlabel="step", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
