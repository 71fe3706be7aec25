"""Whole runs of tiny objects: every kind of object that a step leaves, and no engine.

`from tests.contract.synthetic_runs import SyntheticRun`
"""

import uuid
from collections.abc import Sequence
from typing import Any

from storage.layout import StepScope, attempt_key
from storage.ledger import adopt_plan, create_run, put_commit, put_record
from storage.object_store import ObjectStore
from storage.objects import put_object
from storage.records import (
    Cursor,
    ObjectRef,
    ParentRef,
    Plan,
    PolicyRef,
    Rebase,
    RecordRef,
    SnapshotRef,
    StageRecord,
    StepCommit,
    request_digest,
    sha256_hex,
)
from tests.contract.records import run_record

REBASE = Rebase(steps=[1], num_elements=1, max_abs_diff=0.0, share=0.0, was="a", now="b")


class SyntheticRun:
    """One run in a store, advanced step by step. `snapshots_every` 0 makes none after genesis.

    What a stage makes is a function of its step, its `settings` (by stage; part of its request) and
    its `noise` (which no request names): equal runs have equal digests.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str = "r",
        *,
        snapshots_every: int = 2,
        parent: "tuple[SyntheticRun, int] | None" = None,
        configs: dict[str, Any] | None = None,
        noise: dict[str, str] | None = None,
    ) -> None:
        self.store, self.run, self.snapshots_every = store, run, snapshots_every
        self.configs = configs or {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.noise = dict(noise or {})
        self.environment = {"python": "3.11"}
        self.commits: dict[int, StepCommit] = {}
        self.digests: dict[int, str] = {}
        self._waiting: list[RecordRef] = []
        """Snapshot records that the next commit names."""
        record = run_record(run)
        if parent is not None:
            older, step = parent
            self._parent = ParentRef(run=older.run, step=step, sha256=older.digests[step])
            record = record.model_copy(update={"parent": self._parent})
        self._last = create_run(store, record)
        if parent is not None:
            self._commit(step, "fork", [], older.commits[step].policy, older.commits[step].state_id)
        else:
            self._train(0, changed=True, rebased=False)

    @property
    def head(self) -> int:
        return max(self.commits)

    def step(self, *, changed: bool = True, rebased: bool = False) -> StepCommit:
        """Commits one training step; with `changed` False its policy is the one before."""
        return self._train(self.head + 1, changed=changed, rebased=rebased)

    def steps(self, count: int) -> "SyntheticRun":
        for _ in range(count):
            self.step()
        return self

    def skip(self) -> StepCommit:
        before = self.commits[self.head]
        policy = before.policy.model_copy(update={"version": self.head + 1})
        refs = [self.record(self.head + 1, "prompts", outputs=["prompts.parquet"])]
        return self._commit(self.head + 1, "skipped", refs, policy, before.state_id)

    def begin(self, step: int) -> list[str]:
        """Leaves what a step has before its commit; returns the keys of its objects."""
        before = {entry.key for entry in self.store.list(StepScope(run=self.run, step=step).prefix)}
        for stage in ("prompts", "rollout-0000", "reward-0000"):
            self.record(step, stage, outputs=[f"{stage}.parquet"], redo=uuid.uuid4().hex)
        self.leftover(step, "policy/model.safetensors")
        after = {entry.key for entry in self.store.list(StepScope(run=self.run, step=step).prefix)}
        return sorted(after - before)

    def leftover(self, step: int, name: str) -> ObjectRef:
        """An object of an attempt that has left no record."""
        return self._put(step, uuid.uuid4().hex, name)

    def stop(self) -> RecordRef:
        """A snapshot of the head, made as at a graceful stop; the next commit names it."""
        attempt, step = uuid.uuid4().hex, self.head
        body = {"kind": "snapshot", "state_id": self.commits[step].state_id}
        ref = self.record(step, "snapshot", body=body, snapshot=self._snapshot(step, attempt))
        self._waiting = [ref]
        return ref

    def record(
        self,
        step: int,
        stage: str,
        *,
        outputs: Sequence[str] = (),
        body: dict[str, Any] | None = None,
        redo: str = "",
        **fields: Any,
    ) -> RecordRef:
        attempt = uuid.uuid4().hex
        body = body or {"seed": f"{step}{redo}", "kind": stage, **self.settings.get(stage, {})}
        record = StageRecord(
            stage=stage,
            request=body,
            request_digest=request_digest(stage.partition("-")[0], body),
            outputs={name.partition(".")[0]: self._put(step, attempt, name) for name in outputs},
            attempt=attempt,
            environment=self.environment,
            environment_digest="e",
            **fields,
        )
        return put_record(self.store, StepScope(run=self.run, step=step), record)[1]

    def _train(self, step: int, *, changed: bool, rebased: bool) -> StepCommit:
        stages = ("prompts", "rollout-0000", "reward-0000") if step else ()
        refs = [self.record(step, stage, outputs=[f"{stage}.parquet"]) for stage in stages]
        attempt = uuid.uuid4().hex
        due = step == 0 or rebased or (self.snapshots_every and step % self.snapshots_every == 0)
        policy = self._policy(step, attempt) if changed else self.commits[step - 1].policy
        policy = policy.model_copy(update={"version": step})
        ref = self.record(
            step,
            "train",
            outputs=["train.parquet"] if step else [],
            policy=policy,
            snapshot=self._snapshot(step, attempt) if due else None,
            rebased=REBASE if rebased else None,
        )
        return self._commit(step, "train" if step else "genesis", [*refs, ref], policy, ref.sha256)

    def _commit(
        self, step: int, kind: Any, refs: list[RecordRef], policy: PolicyRef, state_id: str
    ) -> StepCommit:
        _, plan = adopt_plan(
            self.store,
            Plan(
                run=self.run,
                step=step,
                kind=kind,
                previous=self._last,
                prompts=None,
                shards=[],
                cursor=Cursor(),
                configs=self.configs,
            ),
        )
        commit = StepCommit(
            run=self.run,
            step=step,
            kind=kind,
            plan=plan,
            records=[*refs, *self._waiting],
            policy_version=step,
            policy_digest=policy.digest,
            policy=policy,
            state_id=state_id,
            cursor=Cursor(),
            metrics={},
            previous=self._last,
            parent=self._parent if kind == "fork" else None,
            attempt=uuid.uuid4().hex,
            committed_at="2026-11-29T00:00:00Z",
        )
        stands, self._last, _ = put_commit(self.store, commit)
        self.commits[step], self.digests[step], self._waiting = stands, self._last, []
        return stands

    def _policy(self, step: int, attempt: str) -> PolicyRef:
        return PolicyRef(
            version=step,
            digest=sha256_hex(self._content(step, "train")),
            dtype="float32",
            files=[self._put(step, attempt, "policy/model.safetensors")],
            probe=self._put(step, attempt, "probe.json"),
        )

    def _snapshot(self, step: int, attempt: str) -> SnapshotRef:
        file = self._put(step, attempt, "snapshot/state.safetensors")
        return SnapshotRef(files={"state.safetensors": file}, ranks=1, zero_stage=2)

    def _put(self, step: int, attempt: str, name: str) -> ObjectRef:
        key = attempt_key(StepScope(run=self.run, step=step), attempt, name)
        stage = "train" if "/" in name else name.partition(".")[0]
        return put_object(self.store, key, name.encode() + self._content(step, stage))

    def _content(self, step: int, stage: str) -> bytes:
        return f"{step} {self.settings.get(stage)} {self.noise.get(stage)}".encode()
