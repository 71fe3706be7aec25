"""What `rollbook verify` says: a verdict on every promise of DESIGN.md section 5."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from storage.audit import ChainAudit
from storage.audit_findings import Finding, Tally
from storage.audit_steps import UNCOMMITTED, UNREFERENCED
from storage.layout import commit_key
from storage.records import Record

Level = Literal["chain", "facts", "replay"]
Held = Literal["held to the bit", "held within tolerance", "not checked", "broken"]


class PromiseReport(Record):
    """The verdict on one promise: what was looked at, or why nothing was, and where it is broken.

    `figure` is the largest deviation where a tolerance was needed, and `tolerance` what it may be.
    """

    number: int
    name: str
    verdict: Held
    detail: str
    figure: float | None = None
    tolerance: float | None = None
    num_broken: int = 0
    broken: list[Finding] = Field(default_factory=list[Finding])


class SampleDifference(Record):
    """One sample that is graded otherwise today than it was."""

    sample_id: str
    was: float | None
    was_status: str
    now: float | None
    now_status: str


class GradingDifference(Record):
    """One shard with samples that are graded otherwise today: a grader fix changes its step."""

    step: int
    shard: str
    num_samples: int
    num_differing: int
    examples: list[SampleDifference]


class ReplayedStage(Record):
    """One stage that an engine ran again."""

    step: int
    stage: str
    outcome: str
    detail: str


class Report(Record):
    """Everything that `verify` found; `holds` if nothing that was checked is broken.

    `tail` says whether the end of the chain is known to be its end, `signatures` who vouches for
    it. `looked_at`, `unreferenced` and `given_up` are counts. `cause` is the first thing to know
    if it does not hold.
    """

    run: str
    store: str
    level: Level
    holds: bool
    cause: str | None
    first_step: int
    last_step: int | None
    head_step: int | None
    head_digest: str | None
    tail: str
    signatures: str
    promises: list[PromiseReport]
    num_broken: int
    notes: list[str]
    facts_of_steps: list[int]
    grading_differences: list[GradingDifference]
    overrides: list[str]
    """How samples were graded another way; the differences are then what would change."""
    left_out: list[str]
    unchecked: list[str]
    replayed: list[ReplayedStage]
    looked_at: dict[str, int]
    unreferenced: dict[str, int]
    given_up: dict[str, int]
    seconds: float


def tail_text(chain: ChainAudit, known: str | None) -> str:
    """Returns whether the end of the chain is known to be its end."""
    if known is None:
        return "tail unproven"
    if chain.tail_step is None:
        return "tail cut or rewritten"
    if chain.tail_step == chain.head_step:
        return "tail proven by the digest given"
    return f"tail proven up to step {chain.tail_step}, unproven after it"


def signature_text(tally: Tally, key: str | None) -> str:
    """Returns who vouches for the commits."""
    counts = tally.counts
    good, own = counts["signature good"], counts["signature self-asserted"]
    if key is not None:
        return f"{count(good, 'commit')} signed by the key given ({key[:16]})"
    if not own:
        return "self-asserted: no commit is signed"
    return f"self-asserted: {count(own, 'commit')} signed by keys that they name themselves"


def looked_at(chain: ChainAudit) -> dict[str, int]:
    """Returns how much was read."""
    names = ("steps", "evaluations", "records", "objects", "bytes", "superseded plans")
    return {name: chain.tally.counts[name] for name in names}


def unreferenced(chain: ChainAudit) -> dict[str, int]:
    """Returns what lies there and is named by nothing: garbage, and work of the open step."""
    names = (UNREFERENCED, f"{UNREFERENCED} bytes", UNCOMMITTED, f"{UNCOMMITTED} bytes")
    return {name: chain.tally.counts[name] for name in names if chain.tally.counts[name]}


def cause_of(promises: Sequence[PromiseReport], run: str) -> str | None:
    """Returns in one line why a run does not hold, or None if it does."""
    broken = [promise for promise in promises if promise.num_broken]
    if not broken:
        return None
    total = sum(promise.num_broken for promise in broken)
    more = f"; {total - 1} more" if total > 1 else ""
    first = broken[0].broken[0].text if broken[0].broken else commit_key(run, 0)
    return f"promise {broken[0].number} ({broken[0].name}) is broken: {first}{more}"


def count(number: int, noun: str) -> str:
    """Returns `number` of `noun`, as a person writes it."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def megabytes(num_bytes: int) -> str:
    """Returns bytes as a person writes them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
