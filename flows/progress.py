"""What a person sees while a run goes on: bars on a terminal or notebook, lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from storage.records import EvalRecord, StepCommit

STAGES = ("plan", "rollout", "reward", "train", "checkpoint")


class Watcher(Protocol):
    """Is told what happens; never decides anything."""

    def say(self, text: str) -> None:
        """One line that stays: an engine is ready, a lease was taken over."""
        ...

    def begin(self, what: str) -> None:
        """Something long outside a step began: making a model, evaluating."""
        ...

    def stage(self, step: int, stage: str) -> None:
        """A stage of a step began."""
        ...

    def graded(self, done: int, total: int) -> None:
        """So many samples of the open step have their reward, of so many. On any thread."""
        ...

    def committed(self, commit: StepCommit, *, seconds: float) -> None:
        """A step exists."""
        ...

    def evaluated(self, record: EvalRecord) -> None:
        """A policy version has an accuracy."""
        ...


def number(value: float | None, digits: int = 3) -> str:
    """Returns `value` for a person; a missing number is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


class Bars:
    """Two rich bars: the run's steps, and the stages of the open step."""

    def __init__(self, progress: Progress, *, run: str, first: int, last: int) -> None:
        self._progress = progress
        self._last = last
        self._first = first
        self._accuracy: float | None = None
        self._stage = ""
        self._run_bar: TaskID = progress.add_task(run, total=max(last - first + 1, 0), figures="")
        self._step_bar: TaskID = progress.add_task("starting", total=len(STAGES), figures="")

    def say(self, text: str) -> None:
        """Prints a line above the bars."""
        self._progress.console.print(text, highlight=False, markup=False)

    def begin(self, what: str) -> None:
        """Shows `what` in the second bar."""
        self._progress.reset(self._step_bar, total=None)
        self._progress.update(self._step_bar, description=what, figures="")

    def stage(self, step: int, stage: str) -> None:
        """Moves the second bar to `stage`."""
        self._stage = f"step {step} · {stage}"
        self._progress.update(
            self._step_bar,
            description=self._stage,
            total=len(STAGES),
            completed=STAGES.index(stage),
        )

    def graded(self, done: int, total: int) -> None:
        """Shows how far grading is."""
        if self._stage.endswith("reward"):
            self._progress.update(
                self._step_bar, description=f"{self._stage} {done} of {total} samples"
            )

    def committed(self, commit: StepCommit, *, seconds: float) -> None:
        """Advances the first bar and shows the step's figures."""
        if commit.step < self._first:
            return
        reward = number(commit.metrics.get("reward_mean"))
        figures = (
            f"reward {reward}  accuracy {number(commit.metrics.get('accuracy'))}  "
            f"held out {number(self._accuracy)}  {seconds:.2f} s/step"
        )
        done = commit.step - self._first + 1
        self._progress.update(self._run_bar, completed=done, figures=figures)

    def evaluated(self, record: EvalRecord) -> None:
        """Remembers the held-out accuracy and prints it."""
        if self._accuracy is None or record.accuracy is not None:
            self._accuracy = record.accuracy
        self.say(evaluation_line(record))


class Lines:
    """One line per event, for logs and pipes."""

    def __init__(self, write: Callable[[str], object], *, last: int) -> None:
        self._write = write
        self._last = last

    def say(self, text: str) -> None:
        """Writes the line."""
        self._write(text)

    def begin(self, what: str) -> None:
        """Writes what began."""
        self.say(f"{what} ...")

    def stage(self, step: int, stage: str) -> None:
        """Stays silent: a line per stage would bury the steps."""

    def graded(self, done: int, total: int) -> None:
        """Stays silent."""

    def committed(self, commit: StepCommit, *, seconds: float) -> None:
        """Prints the step with its figures."""
        metrics = commit.metrics
        parts = "  ".join(
            f"{stage} {number(metrics.get(f'{stage}_s'), 2)}"
            for stage in STAGES
            if metrics.get(f"{stage}_s") is not None
        )
        self.say(
            f"step {commit.step}/{self._last}  reward {number(metrics.get('reward_mean'))}  "
            f"accuracy {number(metrics.get('accuracy'))}  {seconds:.2f} s  ({parts})"
        )

    def evaluated(self, record: EvalRecord) -> None:
        """Prints the accuracy with its interval."""
        self.say(evaluation_line(record))


class Each:
    """Tells several watchers: a terminal, and the log that the UI shows."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def say(self, text: str) -> None:
        """See `Watcher`."""
        for watcher in self._watchers:
            watcher.say(text)

    def begin(self, what: str) -> None:
        """See `Watcher`."""
        for watcher in self._watchers:
            watcher.begin(what)

    def stage(self, step: int, stage: str) -> None:
        """See `Watcher`."""
        for watcher in self._watchers:
            watcher.stage(step, stage)

    def graded(self, done: int, total: int) -> None:
        """See `Watcher`."""
        for watcher in self._watchers:
            watcher.graded(done, total)

    def committed(self, commit: StepCommit, *, seconds: float) -> None:
        """See `Watcher`."""
        for watcher in self._watchers:
            watcher.committed(commit, seconds=seconds)

    def evaluated(self, record: EvalRecord) -> None:
        """See `Watcher`."""
        for watcher in self._watchers:
            watcher.evaluated(record)


def evaluation_line(record: EvalRecord) -> str:
    """Returns one line that says how good a policy version is."""
    interval = f"95% interval {number(record.low)} to {number(record.high)}"
    return (
        f"held out, version {record.policy_version}, {record.suite}: accuracy "
        f"{number(record.accuracy)} ({interval}, {record.num_prompts} prompts)"
    )


@contextmanager
def watching(run: str, *, first: int, last: int) -> Iterator[Watcher]:
    """Yields bars where they can be drawn (terminal, Jupyter) and lines elsewhere."""
    console = Console(stderr=not _in_jupyter())
    if not (console.is_terminal or console.is_jupyter):
        write = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        yield Lines(write, last=last)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        yield Bars(progress, run=run, first=first, last=last)


def _in_jupyter() -> bool:
    """Whether this code runs in a notebook's kernel; ipykernel may be imported anywhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


@contextmanager
def showing_progress(*, quiet: bool, noun: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yields what takes progress: a bar per part of the work on a terminal, nothing elsewhere.

    Args:
        quiet: show nothing on a terminal either.
        noun: what is counted.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda what, done, total: None
        return
    columns = (
        TextColumn("{task.description:>6}", markup=False),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TextColumn(noun),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        begun: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if not total:
                return
            if what not in begun:
                begun[what] = bars.add_task(what, total=total)
            bars.update(begun[what], completed=done, total=total)

        yield show
