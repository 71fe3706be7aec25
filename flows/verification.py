"""`rollbook verify`: checks committed steps from the store alone. No Prefect, no torch here."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.config import RunConfig
from flows.overrides import overridden_reward
from flows.verify_evals import audit_evaluations
from flows.verify_facts import audit_facts
from flows.verify_replay import Replayed, open_replayer
from flows.verify_report import (
    GradingDifference,
    Level,
    ReplayedStage,
    Report,
    SampleDifference,
    cause_of,
    looked_at,
    signature_text,
    tail_text,
    unreferenced,
)
from flows.verify_shards import Facts, open_graders
from flows.verify_verdicts import promise_reports, replay_findings
from storage.audit import ChainAudit, ChainRequest, audit_chain
from storage.errors import Corrupt, NotFound
from storage.ledger import read_commit
from storage.object_store import ObjectStore
from storage.records import RunRecord, StepCommit
from storage.signing import load_public_key, public_hex
from storage.store_config import StoreConfig
from tasks.workspace import Workspace

UNIT = 1 << 64


@dataclass(frozen=True)
class VerifyOptions:
    """What to check, how much of it, and what the auditor knows from elsewhere.

    `sample` is the share of steps whose facts are computed again; which ones follows from `seed`
    and the digests of the commits, so that whoever wrote the run cannot know them beforehand if
    the seed is the auditor's own. `head` is the digest of a commit seen once; `key_file` the
    public key that must have signed all commits. `overrides` (`reward.key=value`) grade samples
    another way: what would change is listed, and whether recorded rewards come out again is then
    not looked at. `trust` grades also by functions and services that the run's config names.
    """

    level: Level = "chain"
    first: int | None = None
    last: int | None = None
    sample: float = 1.0
    seed: str = ""
    head: str | None = None
    key_file: Path | None = None
    overrides: Sequence[str] = ()
    trust: bool = False


Progress = Callable[[str, int, int], None]
"""Told what part of the work is done for how many steps, of how many."""


def parse_steps(text: str | None) -> tuple[int | None, int | None]:
    """Returns the first and last step that `A..B`, `A..`, `..B` or `A` names.

    Raises:
        ValueError: it is none of them.
    """
    if text is None:
        return None, None
    match = re.fullmatch(r"(\d*)(\.\.)?(\d*)", text)
    if match is None or not (match[1] or match[3]):
        raise ValueError(f"--steps is {text!r}. Expected A..B, A.., ..B or one step.")
    first = int(match[1]) if match[1] else None
    last = int(match[3]) if match[3] else None
    return (first, last) if match[2] else (first, first)


def check_options(options: VerifyOptions) -> None:
    """Checks what a person asked for.

    Raises:
        ValueError: it makes no sense; the message says what would.
    """
    if options.overrides and options.level != "facts":
        raise ValueError(
            f"--set was given with level {options.level}. Expected --level facts, where samples "
            "are graded again."
        )
    if not 0 < options.sample <= 1:
        raise ValueError(f"--sample is {options.sample}. Expected a share above 0 and up to 1.")
    if options.head is not None and not re.fullmatch(r"[0-9a-f]{64}", options.head):
        raise ValueError(
            f"--head is {options.head!r}. Expected the 64 hex digits of a commit's digest, as "
            "`rollbook verify` and `rollbook show --json` print them."
        )


def verify_run(
    store: ObjectStore,
    run: str,
    options: VerifyOptions,
    *,
    workspace: Workspace,
    progress: Progress,
    where: StoreConfig | None = None,
) -> Report:
    """Returns what holds of a run, promise by promise. Writes nothing to the store.

    Args:
        store: holds the run, or a copy of it; opened for reading.
        run: its name.
        options: how much is checked.
        workspace: tokenizers are cached there; graders log there.
        progress: told while it goes on.
        where: the address of the store, for the engines that level `replay` starts.

    Raises:
        NotFound: there is no such run.
        ValueError: the options make no sense, or the run has no such steps.
        Unavailable: the store cannot be read.
        Transient: the grading processes do not start.
    """
    check_options(options)
    began = time.monotonic()
    key = load_public_key(options.key_file) if options.key_file else None
    request = ChainRequest(first=options.first, last=options.last, head=options.head, key=key)

    def walked(done: int, total: int) -> None:
        progress("chain", done, total)

    chain = audit_chain(store, run, request, progress=walked)
    look = _Look(store, chain, options, workspace, progress, where)
    facts, evals, replayed = _look_inside(look)
    with_facts = options.level != "chain"
    sees_head = options.last is None or options.head is not None
    promises = promise_reports(
        chain,
        facts.tally if with_facts else None,
        evals.tally,
        replayed if options.level == "replay" else None,
    )
    cause = cause_of(promises, run)
    return Report(
        run=run,
        store=store.uri,
        level=options.level,
        holds=cause is None,
        cause=cause,
        first_step=options.first if options.first is not None else _first_step(chain),
        last_step=options.last if options.last is not None else chain.head_step,
        head_step=chain.head_step if sees_head else None,
        head_digest=chain.head_digest if sees_head else None,
        tail=tail_text(chain, options.head),
        signatures=signature_text(chain.tally, public_hex(key) if key else None),
        promises=promises,
        num_broken=sum(promise.num_broken for promise in promises),
        notes=chain.tally.notes,
        facts_of_steps=facts.steps,
        grading_differences=_differences(facts, evals),
        left_out=[*facts.left_out, *evals.left_out],
        unchecked=[*facts.unchecked, *evals.unchecked],
        replayed=[
            ReplayedStage(step=step, stage=found.stage, outcome=found.outcome, detail=found.detail)
            for step, found in replayed
        ],
        overrides=list(options.overrides),
        looked_at=looked_at(chain),
        unreferenced=unreferenced(chain),
        given_up=dict(chain.tally.given_up),
        seconds=time.monotonic() - began,
    )


def _first_step(chain: ChainAudit) -> int:
    return chain.segments[-1].first if chain.segments else 0


def _differences(*found: Facts) -> list[GradingDifference]:
    return [
        GradingDifference(
            step=other.step,
            shard=other.shard,
            num_samples=other.num_samples,
            num_differing=other.num_differing,
            examples=[
                SampleDifference(
                    sample_id=sample.sample_id,
                    was=sample.was,
                    was_status=sample.was_status,
                    now=sample.now,
                    now_status=sample.now_status,
                )
                for sample in other.examples
            ],
        )
        for facts in found
        for other in facts.differences
    ]


@dataclass(frozen=True)
class _Look:
    """What is looked inside of, how, and who is told."""

    store: ObjectStore
    chain: ChainAudit
    options: VerifyOptions
    workspace: Workspace
    progress: Progress
    where: StoreConfig | None


def _look_inside(look: _Look) -> tuple[Facts, Facts, list[tuple[int, Replayed]]]:
    """Returns the facts of steps, those of evaluations, and what engines said."""
    store, chain, options = look.store, look.chain, look.options
    broken = chain.tally.num_findings > 0
    facts, evals = Facts(chain_is_broken=broken), Facts(chain_is_broken=broken)
    if chain.run is None or chain.head_step is None:
        return facts, evals, []
    first, last = options.first or 0, chain.head_step
    if options.overrides:
        # So that a slip is an error at once, and not a step that could not be checked.
        overridden_reward(RunConfig.model_validate(chain.run.config).reward, options.overrides)
    with open_graders(look.workspace, trust=options.trust, overrides=options.overrides) as graders:
        regrading = graders if options.level != "chain" else None
        audit_evaluations(store, chain.run, first=first, last=last, graders=regrading, facts=evals)
        if options.level == "chain":
            return facts, evals, []
        picked = pick_steps(store, chain, options)
        for done, (run, commit, before) in enumerate(_read_steps(store, chain, picked)):
            look.progress("facts", done, len(picked))
            audit_facts(store, run, commit, before, graders=graders, facts=facts)
        look.progress("facts", len(picked), len(picked))
    if options.level != "replay":
        return facts, evals, []
    replayed = _replay(look, picked)
    replay_findings(replayed, facts.tally)
    return facts, evals, replayed


def _replay(look: _Look, picked: list[tuple[str, int]]) -> list[tuple[int, Replayed]]:
    assert look.where is not None, "level replay needs the address that engines open"
    replayed: list[tuple[int, Replayed]] = []
    store, workspace = look.store, look.workspace
    with open_replayer(store, look.where, workspace=workspace) as replay:
        for done, (run, commit, _) in enumerate(_read_steps(store, look.chain, picked)):
            look.progress("replay", done, len(picked))
            replayed += [(commit.step, found) for found in replay(run, commit)]
    look.progress("replay", len(picked), len(picked))
    return replayed


def pick_steps(
    store: ObjectStore, chain: ChainAudit, options: VerifyOptions
) -> list[tuple[str, int]]:
    """Returns the run and step of every commit whose facts are looked at, in chain order.

    With a share below 1 each commit is drawn by its digest and the seed, and at least one is.
    """
    steps = list(_steps(chain, options))
    if options.sample >= 1:
        return steps
    drawn: list[tuple[float, tuple[str, int]]] = []
    for run, step in steps:
        found = _commit_or_none(store, run, step)
        if found is not None and found[0].kind in ("train", "skipped"):
            drawn.append((_draw(options.seed, found[1]), (run, step)))
    picked = [where for number, where in drawn if number < options.sample]
    return picked or [where for _, where in sorted(drawn)[:1]]


def _draw(seed: str, digest: str) -> float:
    """Returns a number in [0, 1) that nobody chose."""
    text = f"{seed}/{digest}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / UNIT


def _steps(chain: ChainAudit, options: VerifyOptions) -> Iterator[tuple[str, int]]:
    for segment in reversed(chain.segments):
        last = segment.last if segment.last is not None else (chain.head_step or 0)
        begin = max(segment.first, options.first or 0)
        end = last if options.last is None else min(last, options.last)
        for step in range(begin, end + 1):
            yield segment.audited.run.run, step


def _read_steps(
    store: ObjectStore, chain: ChainAudit, picked: list[tuple[str, int]]
) -> Iterator[tuple[RunRecord, StepCommit, StepCommit | None]]:
    """Yields run, commit and the commit before; what the chain says is broken is left out."""
    runs = {segment.audited.run.run: segment.audited.run for segment in chain.segments}
    for name, step in picked:
        found = _commit_or_none(store, name, step)
        if found is None:
            continue
        commit, parent = found[0], found[0].parent
        before = None
        if parent is not None:
            before = _commit_or_none(store, parent.run, parent.step)
        elif commit.kind != "genesis":
            before = _commit_or_none(store, name, step - 1)
        yield runs[name], commit, before[0] if before else None


def _commit_or_none(store: ObjectStore, run: str, step: int) -> tuple[StepCommit, str] | None:
    try:
        return read_commit(store, run, step)
    except (NotFound, Corrupt):
        return None
