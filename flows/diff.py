"""Where two runs part: the first differing step, and in which stage, setting or version."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storage.ledger import head, lineage, read_commit, read_plan, read_record
from storage.object_store import ObjectStore
from storage.records import Record, RunRecord, StageRecord, StepCommit

NUM_READS = 16
CHUNK = 500
"""Steps whose commits are read at once."""

STAGES = ("prompts", "rollout", "reward", "train")
"""In the order in which a step runs them: the first that differs is where a step parts."""


class Change(Record):
    """One thing that is not equal: what it is called, and its value in either run."""

    name: str
    a: Any
    b: Any


class Parting(Record):
    """The first step whose policies differ, and the first stage of it whose results do.

    `stage` carries the shard: `rollout-0003`; it is None where all results are equal and the plans
    are not. `request` is what was asked of it differently, `environment` what ran it.
    """

    step: int
    stage: str | None
    results: list[Change]
    request: list[Change]
    environment: list[Change]
    plan: list[Change]


class RunDiff(Record):
    """What differs between two runs; `a` and `b` name them.

    `shared` is the last step that is one commit in both histories, because one run was forked from
    the other or both from a third; `owner` the run that committed it. Steps up to `compared` were
    looked at.
    """

    a: str
    b: str
    owner: str | None
    shared: int | None
    launch: list[Change]
    heads: tuple[int | None, int | None]
    compared: int | None
    parting: Parting | None


def diff_runs(store: ObjectStore, a: str, b: str) -> RunDiff:
    """Compares two runs of a store. Only reads.

    Raises:
        NotFound: there is no such run.
        Corrupt: a commit or record that is looked at was changed or is gone.
    """
    lines = (lineage(store, a), lineage(store, b))
    newest = [head(store, run) for run in (a, b)]
    heads = [found[0].step if found else None for found in newest]
    compared = min((step for step in heads if step is not None), default=None)
    if None in heads:
        compared = None
    shared = _last_shared(lines, compared)
    parting = None
    if compared is not None:
        start = 0 if shared is None else shared + 1
        parting = _find_parting(store, lines, start=start, stop=compared)
    return RunDiff(
        a=a,
        b=b,
        owner=None if shared is None else _owner(lines[0], shared),
        shared=shared,
        launch=_launch_changes(lines[0][0], lines[1][0]),
        heads=(heads[0], heads[1]),
        compared=compared if parting is None else parting.step,
        parting=parting,
    )


def changes(a: Any, b: Any, *, name: str = "") -> list[Change]:
    """Returns what differs between two plain values, by dotted keys; lists are compared whole."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found: list[Change] = []
        for key in sorted(set(a) | set(b)):
            inner = f"{name}.{key}" if name else str(key)
            found += changes(a.get(key), b.get(key), name=inner)
        return found
    return [] if a == b else [Change(name=name, a=a, b=b)]


def _owner(line: Sequence[RunRecord], step: int) -> str:
    """Returns whose commit of `step` a run's history holds: its own, or an ancestor's.

    The first commit of a fork only repeats its parent's, so the parent's counts.
    """
    return next(record.run for record in line if record.parent is None or step > record.parent.step)


def _last_shared(
    lines: tuple[Sequence[RunRecord], Sequence[RunRecord]], compared: int | None
) -> int | None:
    """Returns the last step up to which both histories are the same commits."""
    shared = None
    for step in range(0 if compared is None else compared + 1):
        if _owner(lines[0], step) != _owner(lines[1], step):
            break
        shared = step
    return shared


def _launch_changes(a: RunRecord, b: RunRecord) -> list[Change]:
    """Returns what was asked for differently, and which inputs differ."""
    found = changes(a.config, b.config)
    inputs = [
        ("base model", a.weights, b.weights),
        ("tokenizer and model config", a.model.digest, b.model.digest),
        ("prompts", a.prompts.mixture_digest, b.prompts.mixture_digest),
        ("stop_token_ids", a.stop_token_ids, b.stop_token_ids),
    ]
    return found + [Change(name=name, a=x, b=y) for name, x, y in inputs if x != y]


def _find_parting(
    store: ObjectStore,
    lines: tuple[Sequence[RunRecord], Sequence[RunRecord]],
    *,
    start: int,
    stop: int,
) -> Parting | None:
    for ours, theirs in _commit_pairs(store, lines, start=start, stop=stop):
        if (ours.kind, ours.policy_digest) != (theirs.kind, theirs.policy_digest):
            return _look_into(store, ours, theirs)
    return None


def _commit_pairs(
    store: ObjectStore,
    lines: tuple[Sequence[RunRecord], Sequence[RunRecord]],
    *,
    start: int,
    stop: int,
) -> Iterator[tuple[StepCommit, StepCommit]]:
    def read(step: int) -> tuple[StepCommit, StepCommit]:
        first, second = (read_commit(store, _owner(line, step), step)[0] for line in lines)
        return first, second

    with ThreadPoolExecutor(NUM_READS) as pool:
        for begin in range(start, stop + 1, CHUNK):
            yield from pool.map(read, range(begin, min(begin + CHUNK, stop + 1)))


def _look_into(store: ObjectStore, a: StepCommit, b: StepCommit) -> Parting:
    """Goes down to the first stage whose results differ; the inputs of it are then equal."""
    plans = [read_plan(store, commit.plan) for commit in (a, b)]
    unlike = {"run", "previous", "prompts", "schema_version", "revision", "reason"}
    planned = changes(*[plan.model_dump(mode="json", exclude=unlike) for plan in plans])
    records = [{ref.stage: ref for ref in commit.records} for commit in (a, b)]
    for stage in sorted(set(records[0]) | set(records[1]), key=_order):
        refs = [named.get(stage) for named in records]
        ours, theirs = (read_record(store, ref) if ref else None for ref in refs)
        results = changes(_results(ours), _results(theirs))
        if results:
            return Parting(
                step=a.step,
                stage=stage,
                plan=planned,
                results=results,
                request=changes(_request(ours), _request(theirs)),
                environment=changes(_environment(ours), _environment(theirs)),
            )
    return Parting(step=a.step, stage=None, results=[], request=[], environment=[], plan=planned)


def _order(stage: str) -> tuple[int, str]:
    kind = stage.partition("-")[0]
    return (STAGES.index(kind) if kind in STAGES else len(STAGES), stage)


def _results(record: StageRecord | None) -> dict[str, Any]:
    """Returns the digests of what a stage made; a snapshot's bytes belong to no promise."""
    if record is None or record.stage == "snapshot":
        return {}
    made: dict[str, Any] = {name: ref.sha256 for name, ref in record.outputs.items()}
    if record.policy is not None:
        made["policy"] = record.policy.digest
    return made | ({"state": record.state_digest} if record.state_digest else {})


def _request(record: StageRecord | None) -> dict[str, Any]:
    """Returns what was asked; the state id, which hashes times and attempts, always differs."""
    if record is None:
        return {}
    return {name: value for name, value in record.request.items() if name != "state_id"}


def _environment(record: StageRecord | None) -> dict[str, str]:
    return record.environment if record else {}
