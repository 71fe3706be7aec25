"""How a `RunDiff` reads in a terminal."""

import json
from typing import Any

from flows.diff import Change, Parting, RunDiff

MAX_VALUE = 60
MAX_CHANGES = 20


def diff_lines(found: RunDiff) -> list[str]:
    """Returns what differs between two runs, most general first, a line each."""
    said = [*_family(found), *_launch(found)]
    if found.compared is None:
        return [*said, "one of them has no commit yet: there are no steps to compare"]
    if found.parting is None:
        return [*said, _equal(found)]
    return [*said, *_parting(found, found.parting)]


def _family(found: RunDiff) -> list[str]:
    if found.shared is None or found.a == found.b:
        return []
    return [f"steps up to {found.shared} are the same commits, of run {found.owner}"]


def _launch(found: RunDiff) -> list[str]:
    if not found.launch:
        return ["launched with equal settings, model and prompts"]
    return ["launched differently:", *_changes(found.launch)]


def _equal(found: RunDiff) -> str:
    longest = max(step for step in found.heads if step is not None)
    text = f"{found.a} and {found.b} are equal: the same policies from step 0 to {found.compared}"
    if longest == found.compared:
        return text
    longer = found.a if found.heads[0] == longest else found.b
    return f"{text}; {longer} goes on to step {longest}"


def _parting(found: RunDiff, parting: Parting) -> list[str]:
    where = f"in {parting.stage}" if parting.stage else "in its plan alone"
    said = [f"step {parting.step} is the first that differs, {where}"]
    for what, listed in (
        ("planned differently", parting.plan),
        ("asked differently", parting.request),
        ("run by another environment", parting.environment),
    ):
        said += [f"{what}:", *_changes(listed)] if listed else []
    if parting.stage and not (parting.plan or parting.request or parting.environment):
        said.append("asked the same in the same environment: this stage gave other bits")
    return [*said, "results:", *_changes(parting.results)] if parting.results else said


def _changes(listed: list[Change]) -> list[str]:
    shown = [
        f"  {change.name}: {_value(change.a)} | {_value(change.b)}"
        for change in listed[:MAX_CHANGES]
    ]
    rest = len(listed) - MAX_CHANGES
    return [*shown, f"  and {rest} more; --json has them all"] if rest > 0 else shown


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."
