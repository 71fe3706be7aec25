"""Checks everything that a run's commits stand for: the chain, all records, all objects.

Reads only, and needs the store alone. Steps are looked at in parallel, a few at a time, so that
memory does not grow with the run. What the rows of shards mean is no business of this file.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from storage.audit_closure import Before
from storage.audit_evals import audit_eval, find_evals
from storage.audit_findings import Tally
from storage.audit_retention import audit_retention, retention_of
from storage.audit_segments import Segment, audit_inputs, find_segments, step_numbers
from storage.audit_steps import (
    Audited,
    StepOutcome,
    audit_link,
    audit_step,
    note_strangers,
    read_link,
)
from storage.layout import EvalScope, commit_key, run_prefix
from storage.object_store import ObjectStore
from storage.objects import exists
from storage.records import RunRecord
from storage.signing import PublicKey

STEPS_AT_A_TIME = 8
"""One piece of work: each begins with one look at the commit before it."""

NUM_THREADS = 16
"""Readers; they wait for the store, and hashing lets the others run."""

KNOWN_FOLDERS = ("steps", "evals", "leases", "gc")
"""What lies under a run."""

Item = TypeVar("Item")
Done = TypeVar("Done")
Progress = Callable[[int, int], None]
"""Told how many steps are done, of how many."""


@dataclass(frozen=True)
class ChainRequest:
    """What to look at, and what the auditor knows from elsewhere.

    `first` and `last` bound the steps (None: all); `head` is the digest of a commit that the
    auditor once saw; `key` whom the auditor trusts.
    """

    first: int | None = None
    last: int | None = None
    head: str | None = None
    key: PublicKey | None = None


@dataclass
class ChainAudit:
    """What an audit of the chain found.

    `segments` are the run and its parents, as far as their run.json could be read. `head_step` is
    the newest committed step that was looked at. `tail_step` is the step whose commit has the
    digest that the auditor knew: what came after it could have been cut off without a trace.
    """

    segments: list[Segment]
    tally: Tally
    head_step: int | None = None
    head_digest: str | None = None
    tail_step: int | None = None
    uncommitted: list[StepOutcome] = field(default_factory=list[StepOutcome])

    @property
    def run(self) -> RunRecord | None:
        """The record of the run that was asked for."""
        return self.segments[0].audited.run if self.segments else None


@dataclass(frozen=True)
class _Piece:
    """Some steps in a row of one segment; `links_only` reads their commits and nothing else."""

    segment: Segment
    steps: tuple[int, ...]
    links_only: bool


def audit_chain(
    store: ObjectStore,
    run: str,
    request: ChainRequest,
    *,
    progress: Progress,
) -> ChainAudit:
    """Returns everything that is broken between run.json and the newest commit of a run.

    A fork's parents are looked at up to the step that it left from. Writes nothing.

    Args:
        store: holds the run, or a copy of it.
        run: its name.
        request: which steps, and what the auditor knows.
        progress: told while it goes on.

    Raises:
        NotFound: there is no such run.
        ValueError: the run has no such steps.
        Unavailable: the store cannot be read.
    """
    tally = Tally()
    segments = find_segments(store, run, key=request.key, given_up=retention_of(store), tally=tally)
    audit = ChainAudit(segments, tally)
    if not segments:
        return audit
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        try:
            _audit_steps(audit, request, pool, progress)
            for done in in_order(pool, _audit_beside_steps, segments):
                tally.add(done)
            _audit_evals(audit, request, pool)
        finally:
            pool.shutdown(cancel_futures=True)
    _check_open(audit, request)
    _check_tail(audit, request.head)
    folders = store.folders(run_prefix(run))
    strangers = [f"{run_prefix(run)}{name}/" for name in folders if name not in KNOWN_FOLDERS]
    note_strangers(tally, strangers)
    return audit


def _audit_steps(
    audit: ChainAudit, request: ChainRequest, pool: ThreadPoolExecutor, progress: Progress
) -> None:
    pieces = _pieces(audit, request)
    total = sum(len(piece.steps) for piece in pieces)
    done = 0
    progress(done, total)
    for outcomes in in_order(pool, _audit_piece, pieces):
        for segment, outcome in outcomes:
            _take(audit, segment, outcome, request.head)
        done += len(outcomes)
        progress(done, total)


def _pieces(audit: ChainAudit, request: ChainRequest) -> list[_Piece]:
    """Returns the work, parents first, so that steps come in the order of the chain."""
    own = audit.segments[0]
    pieces: list[_Piece] = []
    for segment in reversed(audit.segments):
        there = step_numbers(segment.audited, audit.tally)
        final = max(there, default=segment.first - 1) if segment.last is None else segment.last
        if segment is own:
            _check_asked(audit, request, final)
        begin = max(segment.first, request.first or 0)
        end = final if request.last is None else min(final, request.last)
        inside = _cut(replace(segment, looked_at_from=begin), _steps(there, begin, end))
        if segment is own and request.head is not None:
            earlier = _cut(segment, _steps(there, segment.first, begin - 1), links_only=True)
            later = _cut(segment, _steps(there, end + 1, final), links_only=True)
            pieces += [*earlier, *inside, *later]
        else:
            pieces += inside
    return pieces


def _check_asked(audit: ChainAudit, request: ChainRequest, last: int) -> None:
    first = audit.segments[-1].first
    begin = first if request.first is None else request.first
    end = last if request.last is None else request.last
    nothing_asked = request.first is None and request.last is None
    if not nothing_asked and not first <= begin <= end <= last:
        run = audit.segments[0].audited.run.run
        raise ValueError(
            f"Steps {begin} to {end} were asked for, but run {run!r} has steps {first} to {last}. "
            "Name steps that it has: --steps A..B."
        )


def _steps(there: Sequence[int], first: int, last: int) -> list[int]:
    """Returns the steps of [first, last] that are there, and of every hole the first one.

    So that a hole costs one look, however wide somebody made it.
    """
    found: list[int] = []
    following = first
    for step in there:
        if first <= step <= last:
            found += [following, step] if step > following else [step]
            following = step + 1
    return [*found, following] if following <= last else found


def _cut(segment: Segment, steps: Sequence[int], *, links_only: bool = False) -> list[_Piece]:
    return [
        _Piece(segment, tuple(steps[start : start + STEPS_AT_A_TIME]), links_only)
        for start in range(0, len(steps), STEPS_AT_A_TIME)
    ]


def _audit_piece(piece: _Piece) -> list[tuple[Segment, StepOutcome]]:
    look = audit_link if piece.links_only else audit_step
    outcomes: list[tuple[Segment, StepOutcome]] = []
    before: Before | None = None
    known = None
    for step in piece.steps:
        if step - 1 != known:
            before = _commit_before(piece.segment, step)
        follows, (outcome, before) = before, look(piece.segment.audited, step, before)
        if follows is None and piece.segment.first < step == piece.segment.looked_at_from:
            outcome.tally.broken(
                commit_key(piece.segment.audited.run.run, step - 1),
                expected=f"the commit that step {step} follows",
                found="none that can be read",
            )
        outcomes.append((piece.segment, outcome))
        known = step
    return outcomes


def _commit_before(segment: Segment, step: int) -> Before | None:
    """Returns the commit that a step follows; for a fork's first one, that of its parent."""
    parent = segment.audited.run.parent
    if step > segment.first:
        before = read_link(segment.audited, step - 1)
        is_audited = step > segment.looked_at_from
    elif parent is not None and segment.parent is not None:
        before, is_audited = read_link(segment.parent, parent.step), True
    else:
        return None
    return replace(before, is_audited=is_audited) if before else None


def _take(audit: ChainAudit, segment: Segment, outcome: StepOutcome, head: str | None) -> None:
    """Adds a step to what is known, in the order of the chain."""
    audit.tally.add(outcome.tally)
    run = segment.audited.run.run
    if not outcome.is_committed:
        audit.uncommitted.append(replace(outcome, tally=Tally()))
        if segment.last is not None:
            audit.tally.broken(
                commit_key(run, outcome.step),
                expected=f"a commit, because a fork left from step {segment.last}",
                found="no object",
            )
            audit.uncommitted.clear()
        return
    for missing in audit.uncommitted:
        audit.tally.broken(
            commit_key(run, missing.step),
            expected=f"a commit, because step {outcome.step} is committed",
            found="no object",
        )
    audit.uncommitted.clear()
    if outcome.digest is not None and outcome.digest == head:
        audit.tail_step = outcome.step
    if audit.head_step is None or outcome.step >= audit.head_step:
        audit.head_step, audit.head_digest = outcome.step, outcome.digest


def _check_open(audit: ChainAudit, request: ChainRequest) -> None:
    """Looks at the steps after the newest commit: one may be open, and it names that commit."""
    begun = [outcome for outcome in audit.uncommitted if outcome.num_objects]
    if not audit.uncommitted or not (begun or request.last is not None):
        return
    own = audit.segments[0]
    run = own.audited.run.run
    first = audit.uncommitted[0]
    why = _why_committed(audit, request)
    if why:
        audit.tally.broken(
            commit_key(run, first.step), expected=f"a commit, because {why}", found="no object"
        )
    elif first.planned_on and audit.head_digest not in (None, first.planned_on):
        audit.tally.broken(
            commit_key(run, first.step - 1),
            expected=f"digest {first.planned_on}, as the plan of step {first.step} names it",
            found=f"digest {audit.head_digest}",
        )


def _why_committed(audit: ChainAudit, request: ChainRequest) -> str | None:
    """Returns why the first step without a commit must have had one, if it must."""
    begun = [outcome.step for outcome in audit.uncommitted if outcome.num_objects]
    first = audit.uncommitted[0].step
    if begun and begun[-1] > first:
        return f"step {begun[-1]} was begun: the end of the chain was cut off"
    if request.last is None:
        return None
    audited = audit.segments[0].audited
    later = [step for step in step_numbers(audited, Tally()) if step > first]
    committed = next((step for step in reversed(later) if _is_committed(audited, step)), None)
    return f"step {committed} is committed" if committed is not None else None


def _check_tail(audit: ChainAudit, head: str | None) -> None:
    """Names the last commit, or the one after it that its step was begun for, as not the known."""
    if head is None or audit.tail_step is not None:
        return
    run = audit.segments[0].audited.run.run
    begun = [found for found in audit.uncommitted if found.num_objects]
    is_gone = bool(begun) and begun[0].planned_on != head
    ends = f"step {audit.head_step} with digest {audit.head_digest}"
    audit.tally.broken(
        commit_key(run, begun[0].step if is_gone else audit.head_step or 0),
        expected=f"a chain that holds the commit with digest {head}",
        found=f"one that ends at {ends}: its end was cut off or made anew",
    )


def _audit_beside_steps(segment: Segment) -> Tally:
    tally = audit_inputs(segment)
    tally.add(audit_retention(segment.audited.store, segment.audited.run.run))
    return tally


def _audit_evals(audit: ChainAudit, request: ChainRequest, pool: ThreadPoolExecutor) -> None:
    audited = audit.segments[0].audited
    last = request.last
    scopes = [
        scope
        for scope in find_evals(audited, audit.tally)
        if scope.version >= (request.first or 0) and (last is None or scope.version <= last)
    ]
    for done in in_order(pool, partial(_audit_eval, audited), scopes):
        audit.tally.add(done)


def _audit_eval(audited: Audited, scope: EvalScope) -> Tally:
    measured = read_link(audited, scope.version)
    tally = audit_eval(audited, scope, measured)
    if measured is None and not _is_committed(audited, scope.version):
        tally.broken(
            commit_key(audited.run.run, scope.version),
            expected=f"a commit, because version {scope.version} was evaluated",
            found="no object: the end of the chain was cut off",
        )
    return tally


def _is_committed(audited: Audited, step: int) -> bool:
    return exists(audited.store, commit_key(audited.run.run, step))


def in_order(
    pool: ThreadPoolExecutor, call: Callable[[Item], Done], items: Sequence[Item]
) -> Iterator[Done]:
    """Yields `call` of every item in order; a few are under way, however many there are."""
    waiting: deque[Future[Done]] = deque()
    for item in items:
        waiting.append(pool.submit(call, item))
        if len(waiting) >= 2 * NUM_THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
