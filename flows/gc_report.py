"""How a `GcReport` reads in a terminal."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from flows.gc import GcReport
from flows.memory import size
from flows.terminal import command_line
from storage.garbage import Tally

KINDS = {
    "policy": "policy files",
    "snapshot": "snapshot files",
    "unreferenced": "named by no commit",
    "experience": "experience, probes",
    "ledger": "commits, plans, records",
    "open": "newest step and later",
}
SHOWN_STEPS = 4


def print_gc(report: GcReport, *, store_options: list[str]) -> None:
    """Prints what goes and what stays, why, and the command that deletes."""
    console = Console()
    console.print(_table(report))
    for line in lines(report, store_options):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def lines(report: GcReport, store_options: list[str]) -> list[str]:
    """Returns what stays and why, and what to do next, a line each."""
    total = Tally()
    for tally in report.goes.values():
        total.add(tally.num_bytes, tally.objects)
    amount = f"{total.objects} objects, {size(total.num_bytes)}"
    said = [
        *_reasons("policies", report.policies),
        *_reasons("snapshots", report.snapshots),
        "all experience, commits, plans, records and evaluations stay",
    ]
    if report.deleted:
        return [*said, f"deleted: {amount}"]
    if not total.objects:
        return [*said, f"nothing of run {report.run} is to be deleted"]
    command = command_line("gc", report.run, "--delete", *store_options)
    return [*said, f"nothing was deleted yet; `{command}` deletes {amount}"]


def _reasons(what: str, kept: Mapping[int, list[str]]) -> list[str]:
    """Returns a line for each reason, with the steps that it keeps."""
    by_reason: dict[str, list[int]] = {}
    for step, reasons in sorted(kept.items()):
        for why in reasons:
            by_reason.setdefault(why, []).append(step)
    return [f"{what} that stay, {why}: {_steps(steps)}" for why, steps in by_reason.items()]


def _steps(steps: list[int]) -> str:
    if len(steps) <= 2 * SHOWN_STEPS:
        return ", ".join(map(str, steps))
    ends = [", ".join(map(str, part)) for part in (steps[:SHOWN_STEPS], steps[-SHOWN_STEPS:])]
    return f"{ends[0]} ... {ends[1]} ({len(steps)} steps)"


def _table(report: GcReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(f"run {report.run}, steps {report.first} to {report.head}")
    for column in ("goes", "", "stays", ""):
        table.add_column(column, justify="right")
    for kind, name in KINDS.items():
        goes, stays = report.goes.get(kind), report.stays.get(kind)
        if goes or stays:
            table.add_row(name, *_cells(goes), *_cells(stays))
    return table


def markdown_table(report: GcReport) -> str:
    """Returns the same figures as a table for an artifact."""
    rows = [f"| {report.run}, steps {report.first} to {report.head} | goes | | stays | |"]
    rows.append("|---|---:|---:|---:|---:|")
    for kind, name in KINDS.items():
        goes, stays = report.goes.get(kind), report.stays.get(kind)
        if goes or stays:
            rows.append(f"| {' | '.join([name, *_cells(goes), *_cells(stays)])} |")
    return "\n".join(rows)


def _cells(tally: Tally | None) -> tuple[str, str]:
    return (str(tally.objects), size(tally.num_bytes)) if tally else ("-", "")
