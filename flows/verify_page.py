"""How a verification reads: in a terminal, and as a markdown artifact."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.verify_report import PromiseReport, Report, SampleDifference, count, megabytes

MAX_FINDINGS = 20
"""Findings that a person is shown; JSON has more."""

WIDE = 110
"""Columns from which a verdict and what it stands on have room on one line."""

COLOURS = {
    "held to the bit": "green",
    "held within tolerance": "green",
    "not checked": "yellow",
    "broken": "bold red",
}


def print_report(report: Report, console: Console) -> None:
    """Prints a report for a person: verdicts, what is broken, and what is left open."""
    _say(console, _title(report), style="bold")
    console.print(_wide(report) if console.width >= WIDE else _narrow(report))
    for text, style in _findings(report):
        _say(console, text, style=style)
    for line in _lines(report):
        _say(console, line)
    if report.holds:
        _say(console, "everything that was checked holds", style="bold green")


def _say(console: Console, text: str, *, style: str | None = None) -> None:
    """Prints a line that a person may copy: digests and keys are never broken in two."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def _wide(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for promise in report.promises:
        verdict = Text(promise.verdict, style=COLOURS[promise.verdict])
        detail = "see below" if promise.verdict == "broken" else promise.detail
        table.add_row(str(promise.number), Text(promise.name), verdict, Text(detail))
    return table


def _narrow(report: Report) -> Table:
    """One line for the verdict and some below it for what it stands on."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for promise in report.promises:
        verdict = Text(promise.verdict, style=COLOURS[promise.verdict])
        table.add_row(str(promise.number), Text.assemble(promise.name, ": ", verdict))
        if promise.verdict != "broken":
            table.add_row("", Text(promise.detail, style="dim"))
    return table


def _title(report: Report) -> str:
    steps = f"steps {report.first_step} to {report.last_step}"
    if report.last_step is None:
        steps = "no committed step"
    looked = report.looked_at
    return (
        f"{report.run} in {report.store}: {steps}, level {report.level}, "
        f"{count(looked['objects'], 'object')} ({megabytes(looked['bytes'])}) in "
        f"{report.seconds:.1f} s"
    )


def _findings(report: Report) -> list[tuple[str, str | None]]:
    """Returns lines and their colours."""
    found = [finding for promise in report.promises for finding in promise.broken]
    lines: list[tuple[str, str | None]] = []
    for finding in found[:MAX_FINDINGS]:
        lines += [
            (f"broken (promise {finding.promise}): {finding.key}", "red"),
            (f"  expected {finding.expected}", None),
            (f"  found    {finding.found}", None),
        ]
    more = report.num_broken - len(found[:MAX_FINDINGS])
    if more > 0:
        lines.append((f"and {more} more; --json lists up to 200", "red"))
    return lines


def _lines(report: Report) -> list[str]:
    """Returns what is worth knowing beside the verdicts, a line each."""
    lines: list[str] = []
    if report.head_step is not None:
        lines.append(f"head: step {report.head_step}, commit digest {report.head_digest}")
    advice = {
        "tail unproven": "tail unproven: steps cut off at the end leave no trace. Keep the digest "
        "above elsewhere; --head DIGEST proves what it seals.",
    }
    lines.append(advice.get(report.tail, report.tail))
    trust = "" if not report.signatures.startswith("self") else "; --key FILE says whom you trust"
    lines.append(report.signatures + trust)
    if report.level != "chain":
        steps = count(len(report.facts_of_steps), "step")
        lines.append(f"facts: computed again for {steps}; genesis and forks draw nothing")
    for kind, number in report.given_up.items():
        lines.append(f"given up by retention: {count(number, kind)}; a policy comes back by replay")
    lines += _left(report)
    lines += [f"note: {note}" for note in report.notes]
    return lines


def _left(report: Report) -> list[str]:
    lines: list[str] = []
    garbage = report.unreferenced
    if garbage.get("unreferenced"):
        size = megabytes(garbage["unreferenced bytes"])
        lines.append(
            f"unreferenced: {count(garbage['unreferenced'], 'object')} of dead attempts ({size}); "
            "`rollbook gc` deletes them"
        )
    if garbage.get("uncommitted"):
        number = count(garbage["uncommitted"], "object")
        lines.append(f"uncommitted: {number} of work that is open, looked at when it is committed")
    lines += _changes(report) if report.overrides else _differences(report)
    lines += [f"left out: {line}" for line in report.left_out[:MAX_FINDINGS]]
    lines += [f"not checked: {line}" for line in report.unchecked[:MAX_FINDINGS]]
    return lines


def _differences(report: Report) -> list[str]:
    """Returns a line per step that is graded otherwise today."""
    return [
        f"step {other.step}: {other.num_differing} of {other.num_samples} samples are graded "
        f"otherwise today, like {_change(other.examples[0])}"
        for other in report.grading_differences
    ]


def _changes(report: Report) -> list[str]:
    """Returns what would change if samples were graded another way, sample by sample."""
    found = [
        (other.step, sample) for other in report.grading_differences for sample in other.examples
    ]
    lines = [
        f"graded another way ({', '.join(report.overrides)}): {count(len(found), 'sample')} would "
        "change; nothing was written"
    ]
    lines += [f"step {step}: {_change(sample)}" for step, sample in found[:MAX_FINDINGS]]
    if len(found) > MAX_FINDINGS:
        lines.append(f"and {len(found) - MAX_FINDINGS} more; --json lists all")
    return lines


def _change(sample: SampleDifference) -> str:
    return (
        f"{sample.sample_id}: {sample.was} ({sample.was_status}) then, "
        f"{sample.now} ({sample.now_status}) now"
    )


def report_markdown(report: Report) -> str:
    """Returns a report as markdown."""
    rows = "\n".join(
        f"| {promise.number} | {promise.name} | {promise.verdict} | {_cell(promise)} |"
        for promise in report.promises
    )
    broken = [finding for promise in report.promises for finding in promise.broken]
    findings = "\n".join(
        f"- `{finding.key}`: expected {_plain(finding.expected)}; found {_plain(finding.found)}"
        for finding in broken[:MAX_FINDINGS]
    )
    lines = "\n".join(f"- {_plain(line)}" for line in _lines(report))
    verdict = "holds" if report.holds else "does not hold"
    return (
        f"# {_plain(report.run)} {verdict}\n\n{_plain(_title(report))}\n\n"
        f"|  | promise | verdict | what was looked at |\n|---|---|---|---|\n{rows}\n\n"
        + (f"## Broken\n\n{findings}\n\n" if findings else "")
        + f"{lines}\n"
    )


def _cell(promise: PromiseReport) -> str:
    return _plain(promise.detail).replace("|", "\\|")


def _plain(text: str) -> str:
    """Returns text that markdown leaves as it is: nothing in the store may draw on the page."""
    return "".join(f"\\{letter}" if letter in "<>`*_[]#" else letter for letter in text)
