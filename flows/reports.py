"""Prefect artifacts of a run, made on a thread of their own so that no step waits for them."""

import contextvars
import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

from flows.report_pages import Curve, curve_image, sample_rows, step_markdown, table_rows
from storage.ledger import commits, read_evals
from storage.object_store import ObjectStore
from storage.records import EvalRecord, RunRecord, StepCommit
from tasks.workspace import Workspace

log = logging.getLogger(__name__)

_MOST_WAITING = 2
"""With more step reports than this in the queue the curve is left to the newest of them."""
_MOST_RECALLED = 1000
"""Steps before the first of this controller that the curve shows."""
_CLOSE_LIMIT_S = 20.0


@dataclass
class Reports:
    """Posts per-step reports, tables, curves and the run's progress to Prefect.

    A report that cannot be made or posted is a warning in the log; training goes on.
    """

    store: ObjectStore
    run: RunRecord
    workspace: Workspace
    run_flow_id: str | None
    first: int
    last: int
    curve: Curve = field(default_factory=Curve)
    _queue: "queue.SimpleQueue[Callable[[], None] | None]" = field(
        default_factory=queue.SimpleQueue[Callable[[], None] | None]
    )
    _client: SyncPrefectClient | None = None
    _thread: threading.Thread | None = None
    _progress_id: UUID | None = None
    _shown: float = 0.0

    def __enter__(self) -> Self:
        # The thread sees the settings (which server) that this flow runs under.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work,), name="reports", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_LIMIT_S)

    def step(self, commit: StepCommit, *, flow_run_id: str | None) -> None:
        """Queues the report of a committed step, bound to its flow run."""
        self._queue.put(lambda: self._report_step(commit, flow_run_id))

    def evaluated(self, record: EvalRecord, *, flow_run_id: str | None) -> None:
        """Queues an evaluation: its point on the curve, shown at its flow run."""
        self._queue.put(lambda: self._report_evaluation(record, flow_run_id))

    def _work(self) -> None:
        with get_client(sync_client=True) as client:
            self._client = client
            self._attempt(self._recall)
            while (job := self._queue.get()) is not None:
                self._attempt(job)

    def _recall(self) -> None:
        """Takes what the run did before this controller into the curve."""
        begin = max(self.first - _MOST_RECALLED, 1)
        if self.first > begin:
            for commit, _ in commits(self.store, self.run.run, start=begin):
                if commit.step < self.first:
                    self.curve.add_step(commit)
        if self.first > 1:
            for record in read_evals(self.store, self.run.run):
                self.curve.add_evaluation(record)

    def _attempt(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            # A report is no part of the ledger: whatever breaks it must not break the run.
            log.warning("A report of run %s was not made", self.run.run, exc_info=True)

    def _report_evaluation(self, record: EvalRecord, flow_run_id: str | None) -> None:
        self.curve.add_evaluation(record)
        self._post_curve(flow_run_id)

    def _post_curve(self, flow_run_id: str | None) -> None:
        image = curve_image(self.curve, self.run.run)
        self._post("curve", "image", image, flow_run_id, "Reward and held-out accuracy")

    def _report_step(self, commit: StepCommit, flow_run_id: str | None) -> None:
        self.curve.add_step(commit)
        self._show_progress(commit.step)
        rows = sample_rows(self.store, self.run, commit, cache=self.workspace.cache)
        markdown = step_markdown(commit, rows)
        self._post("report", "markdown", markdown, flow_run_id, f"Step {commit.step}")
        table = json.dumps(table_rows(rows))
        self._post("samples", "table", table, flow_run_id, f"Samples of step {commit.step}")
        if self._queue.qsize() <= _MOST_WAITING:
            self._post_curve(flow_run_id)

    def _post(
        self, name: str, kind: str, content: Any, flow_run_id: str | None, description: str
    ) -> UUID | None:
        assert self._client is not None, "the thread opens the client first"
        artifact = ArtifactCreate(
            key=artifact_key(self.run.run, name),
            type=kind,
            data=content,
            description=description,
            flow_run_id=UUID(flow_run_id) if flow_run_id else None,
        )
        return self._client.create_artifact(artifact).id

    def _show_progress(self, step: int) -> None:
        """Makes or moves the run's progress bar, at most twice a second."""
        if time.monotonic() - self._shown < 0.5 and step < self.last:
            return
        self._shown = time.monotonic()
        share = 100.0 * (step - self.first + 1) / max(self.last - self.first + 1, 1)
        if self._progress_id is None:
            text = f"Steps {self.first} to {self.last}"
            self._progress_id = self._post("progress", "progress", share, self.run_flow_id, text)
        else:
            assert self._client is not None
            self._client.update_artifact(self._progress_id, ArtifactUpdate(data=share))


def artifact_key(run: str, name: str) -> str:
    """Returns a key that Prefect accepts: lower case letters, digits and dashes."""
    text = f"{run}-{name}".lower()
    return "".join(letter if letter.isalnum() else "-" for letter in text).strip("-")
