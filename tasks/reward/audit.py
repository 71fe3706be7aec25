"""A committed shard graded again, and compared row by row: what this grader would say today."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from rewards import is_foreign, needs
from storage import environment
from storage.audit_findings import NO_SILENT_ZERO, REPLAY, Tally
from storage.audit_tables import OtherRow, other_rows
from storage.experience import read_shard
from storage.inputs import open_input
from storage.object_store import ObjectStore
from storage.records import ObjectRef, StageRecord
from storage.schemas import PROMPTS, REWARDS, SAMPLES
from tasks.reward.contract import RewardConfig, RewardEngine, RewardRequest
from tasks.reward.decoding import open_decoder
from tasks.reward.inputs import PROMPT_COLUMNS, SAMPLE_COLUMNS, reward_inputs
from tasks.reward.mixture import combine
from tasks.reward.stage import describe, rewards_table

NOT_REPLAYABLE = "not replayable: "
"""How a record's notes begin that name a sample which ran into a limit."""

MAX_LIMIT_S = 86_400
MAX_LIMIT_BYTES = 1 << 50
"""Beyond these a worker cannot set its limits."""

STATUSES = ("graded", "grader_error", "grader_timeout", "not_applicable")


@dataclass(frozen=True)
class OtherReward:
    """One sample that is graded otherwise today than it was."""

    sample_id: str
    was: float | None
    was_status: str
    now: float | None
    now_status: str
    columns: list[str]

    @property
    def is_other_verdict(self) -> bool:
        """Whether the reward itself, or whether there is one, is another."""
        return (self.was, self.was_status) != (self.now, self.now_status)


@dataclass
class Regraded:
    """How one shard comes out when it is graded again.

    `left_out` are samples that ran into a limit, then or now, and why; `environment_changes` says
    what grades otherwise than it did, a line each.
    """

    num_samples: int = 0
    others: list[OtherReward] = field(default_factory=list[OtherReward])
    left_out: list[str] = field(default_factory=list[str])
    environment_changes: list[str] = field(default_factory=list[str])


def regrade(
    request: RewardRequest,
    record: StageRecord,
    store: ObjectStore,
    engine: RewardEngine,
    *,
    cache: Path,
    as_recorded: bool = True,
) -> Regraded:
    """Returns how the samples of a reward record are graded by the code that runs now.

    Args:
        request: a samples shard, the prompts that it answers, and how it was graded.
        record: what came out.
        store: holds samples, prompts, tokenizer and the stored rewards.
        engine: the grading processes.
        cache: where the tokenizer's files are kept on this host.
        as_recorded: whether `request` is what the record answers, and not another way to grade:
            then a service that says otherwise proves nothing.

    Raises:
        NotFound, Corrupt: something is gone, or is not what its reference names.
        Permanent: the shards do not belong together.
        Transient: the grading processes do not start.
        ValueError: limits that no run can have been graded with.
    """
    config = request.config
    _check_limits(config)
    samples = read_shard(store, request.samples, schema=SAMPLES, columns=SAMPLE_COLUMNS)
    prompts = read_shard(store, request.prompts, schema=PROMPTS, columns=PROMPT_COLUMNS)
    decode = open_decoder(open_input(store, request.model, cache=cache))
    items = reward_inputs(samples, prompts, decode=decode)
    parts = engine.grade(items, config=config, about=record.stage)
    scores = combine(config, parts, groups=samples.column("group_id").to_pylist())
    again = rewards_table([item.sample_id for item in items], scores)
    stored = read_shard(store, record.outputs["rewards"], schema=REWARDS)
    found = Regraded(num_samples=stored.num_rows)
    found.environment_changes = environment.changes(record.environment, describe(engine, config))
    asks_service = as_recorded and any(needs(part.kind) == "endpoint" for part in config.parts)
    noted = {_noted_sample(note) for note in record.notes if note.startswith(NOT_REPLAYABLE)}
    for other in other_rows(stored, again):
        limit = _ran_into_limit(other, noted)
        if limit:
            found.left_out.append(limit)
        elif asks_service:
            found.left_out.append(f"{_sample_of(other)}: a service may say otherwise each time")
        else:
            found.others.append(_other_reward(other))
    found.left_out += [
        f"{sample_id}: {NOT_REPLAYABLE.rstrip(': ')}, as its record says"
        for sample_id in sorted(noted - {line.partition(":")[0] for line in found.left_out})
    ]
    return found


def needs_trust(config: RewardConfig) -> str | None:
    """Returns what grading by a stranger's config would do to whoever does it, or None.

    A config names functions that are called, addresses that are asked with a token of the
    environment, models that are loaded, and whether programs are contained.
    """
    for part in config.parts:
        if is_foreign(part.kind):
            code = part.options.get("function", part.kind)
            return f"it would run {code}, which is code of whoever launched the run"
        if needs(part.kind) == "endpoint":
            where = part.options.get("url") or part.options.get("path")
            return f"it would ask {where}, as whoever launched the run wished"
        if needs(part.kind) == "sandbox" and (
            config.sandbox.allow_unsandboxed or config.sandbox.url is not None
        ):
            where = config.sandbox.url or "unsandboxed processes here"
            return f"it would run programs of the run's models by {where}"
    return None


def _check_limits(config: RewardConfig) -> None:
    """Refuses limits that no worker can be given, before each sample kills one."""
    seconds = max(config.cpu_limit_s, config.wall_limit_s)
    if seconds > MAX_LIMIT_S or config.memory_limit_bytes > MAX_LIMIT_BYTES:
        raise ValueError(
            f"A sample may take {seconds:g} s and {config.memory_limit_bytes} bytes by this "
            f"record. Expected at most {MAX_LIMIT_S} s and {MAX_LIMIT_BYTES} bytes."
        )


def _noted_sample(note: str) -> str:
    return note.removeprefix(NOT_REPLAYABLE).partition(":")[0]


def _sample_of(other: OtherRow) -> str:
    row = other.stored or other.again or {}
    return str(row.get("sample_id"))


def _ran_into_limit(other: OtherRow, noted: set[str]) -> str | None:
    """Returns why a row is not compared: a clock decided it, on one of the two sides."""
    for when, row in (("when it was graded", other.stored), ("now", other.again)):
        if row is not None and any(part["status"] == "grader_timeout" for part in row["parts"]):
            return f"{row['sample_id']}: ran into a limit {when}"
        if row is not None and row["sample_id"] in noted:
            return f"{row['sample_id']}: ran into a limit, as its record says"
    return None


def _other_reward(other: OtherRow) -> OtherReward:
    nothing: Mapping[str, Any] = {"sample_id": "", "reward": None, "status": "no row"}
    was, now = other.stored or nothing, other.again or nothing
    return OtherReward(
        sample_id=was["sample_id"] or now["sample_id"],
        was=was["reward"],
        was_status=was["status"],
        now=now["reward"],
        now_status=now["status"],
        columns=other.columns,
    )


def audit_rewards(rewards: pa.Table, sample_ids: list[str], *, key: str, tally: Tally) -> None:
    """Says so if a failure is stored as a number, or a sample has no row (promise 5).

    Args:
        rewards: rows of a rewards shard.
        sample_ids: of the samples shard that it grades, in order.
        key: of the shard.
        tally: is told.
    """
    rows = rewards.to_pylist()
    found_ids = [row["sample_id"] for row in rows]
    tally.expect(key, "sample ids", found_ids, sample_ids, promise=NO_SILENT_ZERO)
    for row in rows:
        _check_row(row, key=key, tally=tally)
        tally.counts[f"rewards {row['status']}"] += 1


def _check_row(row: Mapping[str, Any], *, key: str, tally: Tally) -> None:
    verdicts = [("reward", row["reward"], row["status"], row["reason"])]
    verdicts += [
        (part["name"], part["value"], part["status"], part["reason"]) for part in row["parts"]
    ]
    for name, value, status, reason in verdicts:
        is_graded = status == "graded"
        known = status in STATUSES and is_graded == (value is not None)
        if not known or not (is_graded or reason):
            tally.broken(
                key,
                expected=f"{name} of {row['sample_id']}: a number if it is graded, else a reason",
                found=f"{value} as {status!r} ({reason})",
                promise=NO_SILENT_ZERO,
            )


def say_regraded(found: Regraded, ref: ObjectRef, *, tally: Tally) -> None:
    """Says so if samples are graded otherwise today.

    Args:
        found: how the shard came out.
        ref: the stored shard.
        tally: is told.
    """
    tally.counts["rewards graded again"] += found.num_samples - len(found.left_out)
    tally.counts["rewards left out"] += len(found.left_out)
    if not found.others:
        return
    first = found.others[0]
    changes = found.environment_changes
    why = f"; the grader is another: {'; '.join(changes)}" if changes else ""
    tally.broken(
        ref.key,
        expected=f"{first.sample_id} graded {first.now} ({first.now_status}), as it is now",
        found=f"{first.was} ({first.was_status}); {len(found.others)} of {found.num_samples} "
        f"samples differ{why}",
        promise=REPLAY,
    )
