"""How a tried reward reads in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.progress import number
from rewards.contract import Score
from tasks.reward.check import CheckReport, Example, Problem

_MAX_CHARACTERS = 60
_COLOURS = {"graded": "green", "not_applicable": "yellow"}


def print_check(report: CheckReport, console: Console) -> None:
    """Prints what a reward makes of a data set: a row per part, then what is wrong."""
    _say(console, _baseline(report))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("part", "golds", "at maximum", "gold mean", "junk mean", "samples/s"):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    for part in report.parts:
        table.add_row(
            part.name,
            f"{part.num_golds:,}",
            f"{part.num_at_maximum:,}" if part.num_golds else "-",
            number(part.gold_mean),
            number(part.junk_mean),
            number(part.samples_per_s, 0),
        )
    console.print(table)
    for part in report.parts:
        for note in part.notes:
            _say(console, f"{part.name}: {note}", style="dim")
        for problem in part.problems:
            _say_problem(console, problem, f"{part.name}: ")
    for problem in report.problems:
        _say_problem(console, problem)
    if report.usable:
        _say(console, "the reward fits the data", style="bold green")


def _say_problem(console: Console, problem: Problem, name: str = "") -> None:
    _say(console, f"{name}{problem.num_rows:,} {problem.what}", style="bold red")
    for example in problem.examples:
        _say(console, f"  {_example(example)}")


def print_verdict(score: Score, console: Console) -> None:
    """Prints what was said of one completion, part by part."""
    colour = _COLOURS.get(score.status, "red")
    said = number(score.value) if score.value is not None else score.status
    line = Text.assemble("reward ", (said, f"bold {colour}"))
    line.append(f"  {score.reason}" if score.reason else "")
    console.print(line, soft_wrap=True)
    if len(score.parts) < 2:
        return
    for part in score.parts:
        value = number(part.value) if part.value is not None else part.status
        reason = f"  {part.reason}" if part.reason else ""
        _say(console, f"  {part.name}: {value} x {part.weight:g}{reason}")


def _baseline(report: CheckReport) -> str:
    if report.majority_share is None:
        return f"{report.num_rows:,} rows, none with an answer"
    return (
        f"{report.num_rows:,} rows, {report.num_answers:,} different answers; always answering "
        f"{_short(report.majority_answer)} is right for {report.majority_share:.1%}"
    )


def _example(example: Example) -> str:
    graded = "" if example.completion is None else f", completion {_short(example.completion)}"
    value = "" if example.value is None else f" has {number(example.value)}"
    reason = f" ({example.reason})" if example.reason else ""
    return f"{example.row_id}: gold {_short(example.answer)}{graded}{value}{reason}"


def _short(text: str | None) -> str:
    shown = repr(text)
    return shown if len(shown) <= _MAX_CHARACTERS else shown[: _MAX_CHARACTERS - 3] + "..."


def _say(console: Console, text: str, *, style: str | None = None) -> None:
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)
