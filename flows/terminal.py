"""How a run reads in a terminal: its figures, its curve, and what to try next."""

import shlex
import shutil
import sys
from pathlib import Path

import plotext
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.progress import number
from flows.show import EvalSummary, RunSummary, StepSummary

SHOWN_STEPS = 8
NARROW = 60


def print_summary(summary: RunSummary) -> None:
    """Prints a run: curve, first and last steps, held-out accuracy before and after."""
    console = Console()
    trained = _trained(summary)
    rewards = [
        (found.step, found.reward_mean) for found in trained if found.reward_mean is not None
    ]
    if len(rewards) > 1:
        console.print(Text.from_ansi(curve(rewards, summary.evals, width=console.width)))
    if trained:
        console.print(_steps_table(summary))
    for line in held_out_lines(summary.evals):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"run {summary.run} in {summary.store}: step {summary.head_step}, policy version "
        f"{summary.policy_version}, digest {(summary.policy_digest or '-')[:16]}, {summary.state}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def print_next(summary: RunSummary, *, store_options: list[str]) -> None:
    """Prints where a run is and three commands to try on it.

    `store_options` are those that lead a command to the run's store.
    """
    console = Console()
    where = f" (--endpoint {summary.endpoint})" if summary.endpoint else ""
    lines = [
        f"in the Prefect UI: {summary.ui_url or 'no lasting server (`make up` starts one)'}",
        f"in the store:      {summary.store}/runs/{summary.run}/{where}",
        "try next:",
        *(f"  {command}" for command in next_commands(summary, store_options)),
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def next_commands(summary: RunSummary, store_options: list[str]) -> list[str]:
    """Returns three commands that work when pasted into a shell on this machine."""
    run, step = summary.run, summary.head_step
    words = [
        ["show", run, "--json"],
        ["resume", run, "--steps", "20"],
        ["export", run, f"exported-{run}-{step}"],
    ]
    return [command_line(*command, *store_options) for command in words]


def command_line(*words: str) -> str:
    """Returns a call of our command as a person would paste it into a shell."""
    return shlex.join([_program(), *words])


def _program() -> str:
    """Returns `rollbook`, or where it lies beside this interpreter if no PATH leads there."""
    beside = Path(sys.executable).with_name("rollbook")
    if shutil.which("rollbook") or not beside.exists():
        return "rollbook"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def curve(rewards: list[tuple[int, float]], evaluations: list[EvalSummary], *, width: int) -> str:
    """Returns the reward curve, with held-out accuracies as points, drawn in characters."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(max(min(width, 100), NARROW), 16)
    steps, values = zip(*rewards, strict=True)
    plotext.plot(steps, values, label="reward", marker="braille")
    first = evaluations[0].suite if evaluations else None
    points = [
        (found.step, found.accuracy)
        for found in evaluations
        if found.suite == first and found.accuracy is not None
    ]
    if points:
        versions, accuracies = zip(*points, strict=True)
        plotext.scatter(versions, accuracies, label=f"accuracy ({first})", marker="o")
    plotext.xlabel("step")
    return str(plotext.build())


def held_out_lines(evaluations: list[EvalSummary]) -> list[str]:
    """Returns one line per suite: accuracy of the first and the last version it measured."""
    lines: list[str] = []
    for suite in dict.fromkeys(found.suite for found in evaluations):
        found = sorted((e for e in evaluations if e.suite == suite), key=lambda e: e.step)
        before, after = found[0], found[-1]
        interval = f"95% interval {number(after.low)} to {number(after.high)}"
        lines.append(
            f"held-out accuracy ({suite}): {number(before.accuracy)} at version {before.step} -> "
            f"{number(after.accuracy)} at version {after.step} ({interval}, "
            f"{after.num_prompts} prompts)"
        )
    return lines


def _trained(summary: RunSummary) -> list[StepSummary]:
    return [found for found in summary.steps if found.kind in ("train", "skipped")]


def _steps_table(summary: RunSummary) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("step", "reward", "accuracy", "loss", "|grad|", "tokens", "cut off", "s"):
        table.add_column(column, justify="right")
    trained = _trained(summary)
    shown = trained[-SHOWN_STEPS:]
    for found in shown:
        table.add_row(
            f"skipped {found.step}" if found.kind == "skipped" else str(found.step),
            number(found.reward_mean),
            number(found.accuracy),
            number(found.loss, 4),
            number(found.grad_norm),
            number(found.completion_tokens_mean, 1),
            number(found.truncated_share, 2),
            number(found.seconds, 2),
        )
    if len(trained) > len(shown):
        table.caption = f"the last {len(shown)} of {len(trained)} steps; --json has them all"
        table.caption_justify = "left"
    return table
