"""The samples of one committed step as a person wants to see them, decoded; checked digests.

How they are printed is in `samples_page`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flows.export import parse_target
from flows.token_texts import Piece, completion_pieces, token_ratios
from storage.errors import NotFound
from storage.experience import read_shard
from storage.inputs import open_input
from storage.ledger import first_step, head, read_commit, read_record, read_run
from storage.object_store import ObjectStore
from storage.records import ObjectRef, Record, RunRecord, StepCommit
from storage.schemas import PROMPTS, REWARDS, SAMPLES, TRAIN
from tasks.reward.decoding import Decode, open_decoder

FEW_GROUPS = 4
_SHARDS = {
    "samples": (
        SAMPLES,
        [
            *("sample_id", "group_id", "prompt_token_ids", "completion_token_ids"),
            *("completion_mask", "rollout_logprobs", "finish_reason", "version_spans"),
        ],
    ),
    "rewards": (REWARDS, REWARDS.names),
    "train": (TRAIN, ["sample_id", "advantage", "kept", "reason", "learner_logprobs"]),
    "prompts": (PROMPTS, ["group_id", "prompt_id", "domain", "prompt_token_ids", "answer"]),
}


class ShownSample(Record):
    """One completion and what was said of it; ratios are null where it was not trained."""

    sample_id: str
    completion: str
    pieces: list[Piece]
    num_tokens: int
    finish_reason: str
    policy_versions: list[int]
    reward: float | None
    status: str | None
    reason: str | None
    parts: list[dict[str, Any]]
    advantage: float | None
    kept: bool | None
    drop_reason: str | None
    ratio_min: float | None
    ratio_max: float | None


class ShownGroup(Record):
    """A prompt and the chosen ones of its completions; `num_samples`, `reward_mean` of them all."""

    group_id: str
    prompt_id: str | None
    domain: str | None
    answer: str | None
    prompt: str
    num_samples: int
    reward_mean: float | None
    samples: list[ShownSample]


class ShownStep(Record):
    """The chosen groups of a step; the counts are of all of it."""

    run: str
    step: int
    policy_version: int
    num_groups: int
    num_samples: int
    num_ungraded: int
    metrics: dict[str, float | None]
    groups: list[ShownGroup]


@dataclass(frozen=True)
class StepSamples:
    """All samples of a step, a row each in plan order, undecoded; prompts by group."""

    commit: StepCommit
    rows: pa.Table
    prompts: Mapping[str, dict[str, Any]]
    decode: Decode

    def groups(self) -> list[str]:
        """Returns the group ids in plan order."""
        return list(self.prompts)

    def of_group(self, name: str) -> list[int]:
        """Returns the rows of a group, by its id, its number or the id of its prompt.

        Raises:
            ValueError: the step has no such group.
        """
        found = [
            group_id
            for group_id, prompt in self.prompts.items()
            if name in (group_id, prompt["prompt_id"], str(int(group_id.rpartition("-")[2])))
        ]
        ids = self.rows["group_id"].to_pylist()
        chosen = [row for row, group_id in enumerate(ids) if group_id in found]
        if not chosen:
            known = ", ".join(self.groups()[:3])
            raise ValueError(
                f"Step {self.commit.step} of {self.commit.run!r} has no group {name!r}. Expected "
                f"one of its {len(self.prompts)}: {known}, ..., or the id of a prompt."
            )
        return chosen

    def by_reward(self, *, best: bool = False) -> list[int]:
        """Returns the graded rows, worst first (or best): by reward, then by advantage."""
        rewards, advantages = (self.rows[name].to_pylist() for name in ("reward", "advantage"))
        graded = [row for row, reward in enumerate(rewards) if reward is not None]
        sign = -1 if best else 1
        return sorted(graded, key=lambda row: (sign * rewards[row], sign * (advantages[row] or 0)))


def open_samples(store: ObjectStore, target: str, *, cache: Path) -> StepSamples:
    """Reads the samples of `RUN[@STEP]`; without a step, of the newest that has any.

    Every shard is checked against the digest that its record names.

    Raises:
        NotFound: no such run or step.
        ValueError: nothing was sampled in that step.
        Corrupt: a shard is not what its record names.
    """
    run, step = parse_target(target)
    record, _ = read_run(store, run)
    commit = _commit(store, record, step)
    outputs: dict[str, list[ObjectRef]] = {}
    for ref in commit.records:
        for name, output in read_record(store, ref).outputs.items():
            outputs.setdefault(name, []).append(output)
    sampled, graded, trained, asked = (
        _read(store, outputs.get(name, []), schema, columns=columns)
        for name, (schema, columns) in _SHARDS.items()
    )
    return StepSamples(
        commit=commit,
        rows=_beside(_beside(sampled, graded), trained),
        prompts={row["group_id"]: row for row in asked.to_pylist()},
        decode=open_decoder(open_input(store, record.model, cache=cache)),
    )


def choose_rows(
    step: StepSamples,
    *,
    group: str | None = None,
    worst: int = 0,
    best: int = 0,
    max_groups: int | None = FEW_GROUPS,
) -> list[int]:
    """Returns the rows of a group, or the worst and best ones, or else of the first groups.

    Samples without a reward are neither best nor worst.

    Raises:
        ValueError: the step has no such group.
    """
    if group is not None:
        return step.of_group(group)
    if worst or best:
        chosen = [*step.by_reward()[:worst], *step.by_reward(best=True)[:best]]
        return list(dict.fromkeys(chosen))
    return [row for name in step.groups()[:max_groups] for row in step.of_group(name)]


def show_rows(step: StepSamples, rows: Sequence[int]) -> ShownStep:
    """Returns these samples, decoded, under their prompts: groups in the order of their first."""
    members: dict[str, list[dict[str, Any]]] = {}
    for row in step.rows.take(pa.array(rows, pa.int64())).to_pylist():
        members.setdefault(row["group_id"], []).append(row)
    return ShownStep(
        run=step.commit.run,
        step=step.commit.step,
        policy_version=step.commit.policy_version,
        num_groups=len(step.prompts),
        num_samples=step.rows.num_rows,
        num_ungraded=step.rows["reward"].null_count,
        metrics=step.commit.metrics,
        groups=[_group(step, group_id, found) for group_id, found in members.items()],
    )


def _commit(store: ObjectStore, record: RunRecord, step: int | None) -> StepCommit:
    if record.parent and step is not None and step <= record.parent.step:
        parent = record.parent.run
        raise ValueError(
            f"Run {record.run!r} was forked from {parent!r} after step {record.parent.step}, so "
            f"step {step} is not its own. See {parent}@{step}."
        )
    newest = head(store, record.run)
    if newest is None:
        raise NotFound(
            f"Run {record.run!r} has no commit yet, so there are no samples. Resume it first: "
            f"`rollbook resume {record.run}`."
        )
    found = newest[0] if step is None else read_commit(store, record.run, step)[0]
    while step is None and found.kind == "skipped":
        found, _ = read_commit(store, record.run, found.step - 1)
    if found.kind != "train":
        raise ValueError(
            f"Step {found.step} of {record.run!r} is of kind {found.kind}: nothing was sampled in "
            f"it. Expected a step from {first_step(record) + 1} to {newest[0].step} that was "
            "trained."
        )
    return found


def _read(
    store: ObjectStore, refs: Sequence[ObjectRef], schema: pa.Schema, *, columns: list[str]
) -> pa.Table:
    tables = [read_shard(store, ref, schema=schema, columns=columns) for ref in refs]
    empty = pa.schema([schema.field(name) for name in columns]).empty_table()
    return pa.concat_tables([empty, *tables]).combine_chunks()


def _beside(rows: pa.Table, told: pa.Table) -> pa.Table:
    """Returns `rows` with what `told` says of each sample; null where it says nothing."""
    where = pc.SetLookupOptions(value_set=told["sample_id"].combine_chunks())
    found = told.take(pc.call_function("index_in", [rows["sample_id"].combine_chunks()], where))
    for name in told.column_names:
        if name != "sample_id":
            # Both graders and the algorithm give a reason; the second is why it was dropped.
            title = "drop_reason" if name in rows.column_names else name
            rows = rows.append_column(title, found[name])
    return rows


def _group(step: StepSamples, group_id: str, rows: Sequence[Mapping[str, Any]]) -> ShownGroup:
    prompt = step.prompts.get(group_id, {})
    members = step.rows.filter(pc.field("group_id") == group_id)
    rewards = [reward for reward in members["reward"].to_pylist() if reward is not None]
    return ShownGroup(
        group_id=group_id,
        prompt_id=prompt.get("prompt_id"),
        domain=prompt.get("domain"),
        answer=prompt.get("answer"),
        prompt=step.decode(rows[0]["prompt_token_ids"]),
        num_samples=members.num_rows,
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        samples=[_sample(row, step.decode) for row in rows],
    )


def _sample(row: Mapping[str, Any], decode: Decode) -> ShownSample:
    token_ids = row["completion_token_ids"]
    ratios = token_ratios(row["rollout_logprobs"], row["learner_logprobs"])
    known = [ratio for ratio in ratios if ratio is not None]
    return ShownSample(
        sample_id=row["sample_id"],
        completion=decode(token_ids) if token_ids else "",
        pieces=completion_pieces(
            token_ids, ratios=ratios, mask=row["completion_mask"], decode=decode
        ),
        num_tokens=len(token_ids),
        finish_reason=row["finish_reason"],
        policy_versions=[span["policy_version"] for span in row["version_spans"]],
        reward=row["reward"],
        status=row["status"],
        reason=row["reason"],
        parts=row["parts"] or [],
        advantage=row["advantage"],
        kept=row["kept"],
        drop_reason=row["drop_reason"],
        ratio_min=min(known, default=None),
        ratio_max=max(known, default=None),
    )
