"""What the overview of a run says while it goes on, as markdown. No Prefect and no store here."""

import shlex
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from flows.progress import number
from flows.report_pages import LAPS, facts_table
from storage.leases import LeaseState
from storage.records import EvalRecord, StepCommit

LAST_STEPS = 20
"""Medians and the time that is left are taken from so many steps."""
LISTED_STEPS = 5

Link = Callable[[str | None], str | None]


@dataclass(frozen=True)
class Done:
    """A step that this controller made: its commit, and seconds since the one before it."""

    commit: StepCommit
    digest: str
    flow_run_id: str | None
    seconds: float | None
    """None for the first one, which waited for engines to start."""


@dataclass
class Overview:
    """The state of a run, as far as one controller has taken it."""

    run: str
    first: int
    last: int
    store_uri: str
    store_options: Sequence[str] = ()
    """What leads a command to the store."""
    ended: str | None = None
    """Why nothing more comes, once nothing does."""
    done: deque[Done] = field(default_factory=lambda: deque[Done](maxlen=LAST_STEPS))
    evaluations: list[EvalRecord] = field(default_factory=list[EvalRecord])
    services: Sequence[LeaseState] = ()
    """The living services of the run, as their leases describe them."""
    _before: float | None = None

    def add_step(
        self, commit: StepCommit, *, digest: str, flow_run_id: str | None, at: float
    ) -> None:
        """Takes in a step that was committed at `at` on a monotonic clock."""
        seconds = at - self._before if self._before is not None else None
        self._before = at
        self.done.append(Done(commit, digest, flow_run_id, seconds))

    def seconds_left(self) -> float | None:
        """Returns how long the rest will take if it goes on as it went, evaluations included."""
        known = [each.seconds for each in self.done if each.seconds is not None]
        if not known:
            return None
        return statistics.fmean(known) * max(self.last - self.done[-1].commit.step, 0)

    def stage_seconds(self) -> dict[str, float]:
        """Returns the median seconds of each stage, and `between` for what no stage took."""
        table: dict[str, float] = {}
        for lap in LAPS:
            found = [
                value for each in self.done if (value := each.commit.metrics.get(lap)) is not None
            ]
            if found:
                table[lap.removesuffix("_s")] = statistics.median(found)
        rests = [
            each.seconds - sum(each.commit.metrics.get(lap) or 0.0 for lap in LAPS)
            for each in self.done
            if each.seconds is not None
        ]
        return table | ({"between": max(statistics.median(rests), 0.0)} if rests else {})


def overview_markdown(overview: Overview, *, image: str | None, now: datetime, link: Link) -> str:
    """Returns the overview.

    Args:
        overview: the run.
        image: its curve as a `data:` address.
        now: in UTC; the end is told as a time of day.
        link: where the UI shows a flow run, or None.
    """
    newest = overview.done[-1] if overview.done else None
    at = f"step {newest.commit.step} of {overview.last}" if newest else "no step yet"
    curve = f"![reward and held-out accuracy by step]({image})\n\n" if image else ""
    parts = (
        f"# {overview.run}: {at}\n\n{_facts(overview, now)}",
        curve + _cost(overview),
        _steps(overview, link),
        _services(overview, link),
        _where(overview),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(overview: Overview, now: datetime) -> str:
    rows = [("state", overview.ended or _state(overview, now))]
    if overview.done:
        newest = overview.done[-1]
        commit = newest.commit
        reward = number(commit.metrics.get("reward_mean"))
        rows += [
            (
                "policy",
                f"version **{commit.policy_version}**, digest `{commit.policy_digest[:16]}`",
            ),
            ("head", f"step {commit.step}, commit `{newest.digest[:16]}`"),
            ("reward", f"{reward} in step {commit.step}"),
        ]
    rows += [(f"accuracy ({suite})", text) for suite, text in _held_out(overview).items()]
    return facts_table(rows)


def _state(overview: Overview, now: datetime) -> str:
    left = overview.seconds_left()
    if not overview.done:
        return f"before step {overview.first}: engines start"
    if left is None:
        return "training; one more step tells how long it takes"
    ends = now + timedelta(seconds=left)
    return f"training; {duration(left)} left, until about {ends:%H:%M} UTC"


def duration(seconds: float) -> str:
    """Returns seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _held_out(overview: Overview) -> dict[str, str]:
    """Returns first and last accuracy by suite."""
    by_suite: dict[str, list[EvalRecord]] = {}
    for record in overview.evaluations:
        by_suite.setdefault(record.suite, []).append(record)
    lines: dict[str, str] = {}
    for suite, found in by_suite.items():
        ordered = sorted(found, key=lambda record: record.policy_version)
        ends = ordered[:1] if len(ordered) == 1 else [ordered[0], ordered[-1]]
        lines[suite] = " → ".join(
            f"{number(record.accuracy)} (version {record.policy_version})" for record in ends
        )
    return lines


def _cost(overview: Overview) -> str:
    table = overview.stage_seconds()
    total = sum(table.values())
    if not total:
        return ""
    rows = "\n".join(
        f"| {stage} | {seconds:.2f} | {seconds / total:.0%} |" for stage, seconds in table.items()
    )
    return (
        f"## What a step costs\n\n| stage | seconds | share |\n|---|---|---|\n{rows}\n"
        f"| **all** | **{total:.2f}** | |\n\n"
        f"Medians of the last {len(overview.done)} steps. *Between*: checkpoint, flow runs, and "
        "whatever lies from one step to the next."
    )


def _steps(overview: Overview, link: Link) -> str:
    rows = "\n".join(
        f"| {_linked(f'step {each.commit.step}', link(each.flow_run_id))} "
        f"| {number(each.commit.metrics.get('reward_mean'))} "
        f"| {number(each.commit.metrics.get('accuracy'))} "
        f"| {number(each.seconds, 2)} | `{each.commit.policy_digest[:16]}` |"
        for each in list(overview.done)[: -LISTED_STEPS - 1 : -1]
    )
    head = "| flow run | reward | accuracy | seconds | policy |\n|---|---|---|---|---|\n"
    return f"## Latest steps\n\n{head}{rows}" if rows else ""


def _services(overview: Overview, link: Link) -> str:
    rows = "\n".join(_service(state, link) for state in overview.services)
    head = "| service | address | policy version | calls |\n|---|---|---|---|\n"
    return f"## Services\n\n{head}{rows}" if rows else ""


def _service(state: LeaseState, link: Link) -> str:
    holder = state.holder
    flow_run_id = holder.get("flow_run_id")
    name = _linked(state.role, link(str(flow_run_id) if flow_run_id else None))
    version, calls = (_known(holder.get(key)) for key in ("policy_version", "num_calls"))
    return f"| {name} | `{holder.get('address')}` | {version} | {calls} |"


def _known(value: object) -> str:
    return "-" if value is None else str(value)


def _linked(text: str, url: str | None) -> str:
    return f"[{text}]({url})" if url else text


def _where(overview: Overview) -> str:
    run = overview.run
    at = f"{run}@{overview.done[-1].commit.step}" if overview.done else run
    words = (["show", run], ["samples", at, "--worst", "5"], ["verify", run])
    commands = "\n".join(
        shlex.join(["rollbook", *command, *overview.store_options]) for command in words
    )
    return (
        f"## Look further\n\nEverything lies in `{overview.store_uri}/runs/{run}/`.\n\n"
        f"```sh\n{commands}\n```"
    )


def utc_now() -> datetime:
    """Returns the time of day that the overview counts from."""
    return datetime.now(UTC)
