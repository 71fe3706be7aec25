"""Writes a run with real shards that no engine made: rows whose figures can be worked out by hand.

Group g of step s asks prompt `set/P`, P = g modulo 3, in the text `P?`; its two samples say `yes`
(reward 1, advantage +1) and `no` (reward 0, advantage -1, reason `format: wrong`). Exceptions are
named by `Shape`.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from storage.experience import rows_to_table, write_shard
from storage.inputs import put_input
from storage.layout import EvalScope, StepScope, attempt_key, input_key
from storage.ledger import adopt_plan, create_run, head, put_commit, put_eval, put_record, read_run
from storage.object_store import ObjectStore
from storage.objects import put_object
from storage.records import (
    Cursor,
    EvalRecord,
    ObjectRef,
    ParentRef,
    Plan,
    PolicyRef,
    PromptInputs,
    PromptSet,
    RecordRef,
    RunRecord,
    SnapshotRef,
    StageRecord,
    StepCommit,
    request_digest,
)
from storage.schemas import PROMPTS, SCHEMAS
from tests.unit.reward.tokenizers_for_tests import END, write_tokenizer

GROUPS = 4
SHARDS = 2
PROMPT_IDS = ("set/0", "set/1", "set/2", "set/3")
"""What can be drawn; the last one never is."""


@dataclass(frozen=True)
class Shape:
    """What is unusual about a run.

    `timed_out`: (step, group, sample) without a reward; `gaps`: {(step, group, sample): learner
    minus sampler at its second token}, 0 elsewhere; `filler`: tokens that every completion has
    besides; `texts`: what a sample says instead.
    """

    timed_out: tuple[tuple[int, int, int], ...] = ()
    gaps: tuple[tuple[tuple[int, int, int], float], ...] = ()
    texts: tuple[tuple[tuple[int, int, int], str], ...] = ()
    skipped: tuple[int, ...] = ()
    snapshots: tuple[int, ...] = ()
    filler: int = 0


class SampledRun:
    """Writes one run into a store, step by step."""

    def __init__(
        self,
        store: ObjectStore,
        directory: Path,
        *,
        run: str = "r",
        shape: Shape | None = None,
        parent: ParentRef | None = None,
    ) -> None:
        self.store = store
        self.run = run
        self.shape = shape or Shape()
        self._tokenizer = write_tokenizer(directory, special_tags=True)
        model = put_input(store, {"tokenizer.json": directory / "tokenizer.json"})
        train, held_out = (self._pool(name) for name in ("train", "held_out"))
        self.record = RunRecord(
            run=run,
            launch_id="launch",
            config={"recipe": "made", "train": {"learning_rate": 0.5}},
            prompts=PromptInputs(
                mixture_digest="m",
                sets=[PromptSet(name="set", weight=1, train_rows=4, held_out_rows=4, dropped={})],
                train=train,
                held_out=held_out,
            ),
            model=model,
            weights={},
            stop_token_ids=[self.ids(END)[0]],
            parent=parent,
            created_at="2026-11-29T00:00:00Z",
        )
        create_run(store, self.record)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text: one per character, one for the end mark."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def write(self, steps: int) -> "SampledRun":
        """Writes the first commit if there is none, and `steps` more."""
        newest = head(self.store, self.run)
        first = self.record.parent.step if self.record.parent else 0
        if newest is None:
            self._commit(first, "fork" if self.record.parent else "genesis", [])
        begin = newest[0].step if newest else first
        for step in range(begin + 1, begin + steps + 1):
            if step in self.shape.skipped:
                self._commit(step, "skipped", [self._prompts(step)])
            else:
                self._commit(step, "train", self._stages(step))
        return self

    def parent_ref(self) -> ParentRef:
        """What a fork of the newest step names."""
        newest = head(self.store, self.run)
        assert newest is not None
        return ParentRef(run=self.run, step=newest[0].step, sha256=newest[1])

    def write_garbage(self, step: int) -> None:
        """Writes what an attempt that died left: a shard with its record that no commit names."""
        rows = [self._sample(step, 0, 9)]
        self._stage(StepScope(run=self.run, step=step), "rollout-0000", "samples", rows, "dead")

    def evaluate(self, version: int) -> None:
        """Evaluates a version on two held-out prompts: the first right, the second wrong."""
        scope = EvalScope(run=self.run, version=version, suite="held_out")
        sampled = [self._sample(version + 1, group, group) for group in range(2)]
        graded = [self._reward(version + 1, group, group) for group in range(2)]
        put_eval(
            self.store,
            EvalRecord(
                run=self.run,
                suite="held_out",
                policy_version=version,
                policy_digest=f"p{version}",
                records=[
                    self._stage(scope, "rollout-0000", "samples", _held_out(sampled)),
                    self._stage(scope, "reward-0000", "rewards", _held_out(graded)),
                ],
                num_prompts=2,
                num_samples=2,
                num_graded=2,
                accuracy=0.5,
                low=0.0,
                high=1.0,
                reward_mean=0.5,
                metrics={"completion_tokens_mean": 3.5},
            ),
        )

    def _pool(self, split: str) -> ObjectRef:
        rows = [self._prompt(number, f"held-{number}") for number in range(len(PROMPT_IDS))]
        table = rows_to_table(rows, schema=PROMPTS)
        key = input_key("pool", f"{split}-{self.run}.parquet")
        return write_shard(self.store, table, schema=PROMPTS, key=key)

    def _prompt(self, number: int, group_id: str) -> dict[str, Any]:
        return {
            "prompt_id": PROMPT_IDS[number],
            "group_id": group_id,
            "domain": "set",
            "prompt_token_ids": self.ids(f"{number}?"),
            "answer": "yes",
            "extra": "{}",
        }

    def _stages(self, step: int) -> list[RecordRef]:
        scope = StepScope(run=self.run, step=step)
        found = [self._prompts(step)]
        whole = [(group, sample) for group in range(GROUPS) for sample in range(2)]
        for shard in range(SHARDS):
            part = whole[shard * len(whole) // SHARDS : (shard + 1) * len(whole) // SHARDS]
            samples = [self._sample(step, *where) for where in part]
            rewards = [self._reward(step, *where) for where in part]
            found.append(self._stage(scope, f"rollout-{shard:04d}", "samples", samples))
            found.append(self._stage(scope, f"reward-{shard:04d}", "rewards", rewards))
        trained = [self._verdict(step, *where) for where in whole]
        found.append(self._stage(scope, "train", "train", trained))
        return found

    def _prompts(self, step: int) -> RecordRef:
        rows = [self._prompt(group % 3, _group_id(step, group)) for group in range(GROUPS)]
        return self._stage(StepScope(run=self.run, step=step), "prompts", "prompts", rows)

    def _text(self, step: int, group: int, sample: int) -> str:
        usual = "no" if sample else "yes"
        return dict(self.shape.texts).get((step, group, sample), usual)

    def _tokens(self, step: int, group: int, sample: int) -> tuple[list[int], list[float]]:
        """The completion and the sampler's logprobs: -1, and noise for the filler."""
        said = self.ids(self._text(step, group, sample))
        noise = Random(f"{step} {group} {sample}")
        filler = noise.choices(range(10, 90), k=self.shape.filler)
        logprobs = [-1.0] * (len(said) + 1) + [-noise.random() for _ in filler]
        return [*said, *filler, self.record.stop_token_ids[0]], logprobs

    def _sample(self, step: int, group: int, sample: int) -> dict[str, Any]:
        ids, logprobs = self._tokens(step, group, sample)
        version = step - 1
        return {
            "sample_id": f"{_group_id(step, group)}-{sample}",
            "group_id": _group_id(step, group),
            "sample_index": sample,
            "prompt_token_ids": self.ids(f"{group % 3}?"),
            "completion_token_ids": ids,
            "completion_mask": [True] * len(ids),
            "rollout_logprobs": logprobs,
            "finish_reason": "stop",
            "stop_token_id": ids[-1],
            "seed": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": 8,
            "version_spans": [
                {"start": 0, "policy_version": version, "policy_digest": f"p{version}"}
            ],
        }

    def _reward(self, step: int, group: int, sample: int) -> dict[str, Any]:
        timed_out = (step, group, sample) in self.shape.timed_out
        value = None if timed_out else 1.0 - bool(sample)
        status = "grader_timeout" if timed_out else "graded"
        reason = "took more than 5 s" if timed_out else "wrong" if sample else None
        part = {"name": "format", "value": value, "weight": 1.0, "status": status}
        return {
            "sample_id": f"{_group_id(step, group)}-{sample}",
            "reward": value,
            "status": status,
            "reason": reason if timed_out or not sample else f"format: {reason}",
            "parts": [{**part, "reason": reason}],
        }

    def _verdict(self, step: int, group: int, sample: int) -> dict[str, Any]:
        where = (step, group, sample)
        dropped = where in self.shape.timed_out
        learner = self._tokens(*where)[1]
        learner[1] += dict(self.shape.gaps).get(where, 0.0)
        return {
            "sample_id": f"{_group_id(step, group)}-{sample}",
            "group_id": _group_id(step, group),
            "advantage": None if dropped else -1.0 if sample else 1.0,
            "kept": not dropped,
            "reason": "grader_timeout" if dropped else None,
            "learner_logprobs": None if dropped else learner,
        }

    def _stage(
        self,
        scope: StepScope | EvalScope,
        stage: str,
        output: str,
        rows: list[dict[str, Any]],
        attempt: str = "lives",
    ) -> RecordRef:
        schema = SCHEMAS[output]
        key = attempt_key(scope, attempt, f"{stage}.parquet")
        shard = write_shard(self.store, rows_to_table(rows, schema=schema), schema=schema, key=key)
        body = {"attempt": attempt}
        made = StageRecord(
            stage=stage,
            request=body,
            request_digest=request_digest(stage.partition("-")[0], body),
            outputs={output: shard},
            attempt=attempt,
            environment={},
            environment_digest="e",
        )
        if stage == "train" and isinstance(scope, StepScope):
            made = made.model_copy(update={"snapshot": self._snapshot(scope)})
        return put_record(self.store, scope, made)[1]

    def _snapshot(self, scope: StepScope) -> SnapshotRef | None:
        if scope.step not in self.shape.snapshots:
            return None
        file = put_object(self.store, attempt_key(scope, "lives", "snapshot"), b"state")
        return SnapshotRef(files={"state": file}, ranks=1, zero_stage=2)

    def _policy(self, step: int) -> PolicyRef:
        scope = StepScope(run=self.run, step=step)
        files = [put_object(self.store, attempt_key(scope, "lives", "model"), b"weights")]
        return PolicyRef(
            version=step, digest=f"p{step}", dtype="float32", files=files, probe=files[0]
        )

    def _commit(self, step: int, kind: Any, records: list[RecordRef]) -> None:
        before = head(self.store, self.run)
        digest = before[1] if before else read_run(self.store, self.run)[1]
        cursor = Cursor(drawn=GROUPS * step)
        plan = Plan(
            run=self.run,
            step=step,
            kind=kind,
            reason="a bad batch" if kind == "skipped" else None,
            previous=digest,
            prompts=None,
            shards=[],
            cursor=cursor,
            configs={},
        )
        put_commit(
            self.store,
            StepCommit(
                run=self.run,
                step=step,
                kind=kind,
                plan=adopt_plan(self.store, plan)[1],
                records=records,
                policy_version=step,
                policy_digest=f"p{step}",
                policy=self._policy(step),
                state_id=f"s{step}",
                cursor=cursor,
                metrics={"reward_mean": 0.5, "loss": 0.1 * step} if kind == "train" else {},
                previous=digest,
                parent=self.record.parent if kind == "fork" else None,
                attempt="lives",
                committed_at=f"2026-11-29T00:00:{step % 60:02d}Z",
            ),
        )


def _group_id(step: int, group: int) -> str:
    return f"group-{GROUPS * (step - 1) + group:09d}"


def _held_out(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an evaluation: one sample per held-out prompt."""
    held: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        named = {"sample_id": f"held-{number}-0"}
        held.append({**row, **named, **({"group_id": f"held-{number}"} if "seed" in row else {})})
    return held
