"""Prefect artifacts of a run, made on a thread of their own so that no step waits for them."""

import json
import time
from dataclasses import dataclass, field
from typing import Self

from prefect.client.orchestration import SyncPrefectClient

from flows.grading_progress import grading_artifact, percent
from flows.overview_page import Overview, overview_markdown, utc_now
from flows.posting import LiveArtifact, Poster, artifact_key
from flows.prefect_server import run_url
from flows.report_pages import Curve, curve_image, sample_rows, step_markdown, table_rows
from flows.stores import store_options
from storage.lease_watch import LeaseWatch
from storage.ledger import commits, read_evals
from storage.object_store import ObjectStore
from storage.records import EvalRecord, RunRecord, StepCommit
from storage.store_config import StoreConfig
from tasks.workspace import Workspace

_MOST_WAITING = 2
"""With more step reports than this in the queue the curve is left to the newest of them."""
_MOST_RECALLED = 1000
"""Steps before the first of this controller that the curve shows."""
_CURVE = "Reward and held-out accuracy"


@dataclass
class Reports:
    """Posts the run's overview, per-step reports, tables, curves and progress to Prefect.

    A report that cannot be made or posted is a warning in the log; training goes on.
    """

    store: ObjectStore
    run: RunRecord
    workspace: Workspace
    run_flow_id: str | None
    first: int
    last: int
    store_config: StoreConfig | None = None
    """For the commands that the overview names; without it they name the store by its address."""
    curve: Curve = field(default_factory=Curve)
    _image: str | None = None

    def __post_init__(self) -> None:
        run, where = self.run.run, self.store_config or StoreConfig(uri=self.store.uri)
        options = store_options(where.uri, where.endpoint)
        self._overview = Overview(run, self.first, self.last, where.uri, options)
        steps = f"Steps {self.first} to {self.last}"
        self._overview_page = self._live("overview", "markdown", f"Run {run}", every_s=2.0)
        self._progress = self._live("progress", "progress", steps, every_s=0.5)
        self._grading = grading_artifact(run, self.run_flow_id)
        self._leases = LeaseWatch(self.store, run, "")
        self._poster = Poster(f"run {run}", self._flush)

    def __enter__(self) -> Self:
        self._poster.__enter__()
        self._poster.tag(self.run_flow_id, f"run:{self.run.run}")
        self._poster.put(self._recall)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._poster.put(lambda client: self._end(client, kind))
        self._poster.__exit__()

    def step(self, commit: StepCommit, *, digest: str, flow_run_id: str | None) -> None:
        """Queues the report of a committed step, bound to its flow run."""
        at = time.monotonic()
        self._poster.put(
            lambda client: self._report_step(client, commit, digest, flow_run_id, at=at)
        )

    def evaluated(self, record: EvalRecord, *, flow_run_id: str | None) -> None:
        """Queues an evaluation: its point on the curve, shown at its flow run."""
        self._poster.put(lambda client: self._report_evaluation(client, record, flow_run_id))

    def graded(self, done: int, total: int) -> None:
        """Takes how many samples of the open step have their reward."""
        self._grading.show(lambda: percent(done, total))

    def _recall(self, client: SyncPrefectClient) -> None:
        """Takes what the run did before this controller into curve and overview."""
        self._overview_page.show(self._page)
        self._overview_page.flush(client)
        begin = max(self.first - _MOST_RECALLED, 1)
        if self.first > begin:
            for commit, _ in commits(self.store, self.run.run, start=begin):
                if commit.step < self.first:
                    self.curve.add_step(commit)
        if self.first > 1:
            for record in read_evals(self.store, self.run.run):
                self.curve.add_evaluation(record)
                self._overview.evaluations.append(record)
            self._image = curve_image(self.curve, self.run.run)
            self._overview_page.show(self._page)

    def _report_evaluation(
        self, client: SyncPrefectClient, record: EvalRecord, flow_run_id: str | None
    ) -> None:
        self.curve.add_evaluation(record)
        self._overview.evaluations.append(record)
        self._post_curve(client, flow_run_id)
        self._overview_page.show(self._page)

    def _post_curve(self, client: SyncPrefectClient, flow_run_id: str | None) -> None:
        self._image = curve_image(self.curve, self.run.run)
        self._post(client, "curve", "image", self._image, flow_run_id, _CURVE)

    def _report_step(
        self,
        client: SyncPrefectClient,
        commit: StepCommit,
        digest: str,
        flow_run_id: str | None,
        *,
        at: float,
    ) -> None:
        self.curve.add_step(commit)
        self._overview.add_step(commit, digest=digest, flow_run_id=flow_run_id, at=at)
        share = 100.0 * (commit.step - self.first + 1) / max(self.last - self.first + 1, 1)
        self._progress.show(lambda: share)
        rows = sample_rows(self.store, self.run, commit, cache=self.workspace.cache)
        markdown = step_markdown(commit, rows, run_url=run_url(self.run_flow_id))
        number = commit.step
        self._post(client, "report", "markdown", markdown, flow_run_id, f"Step {number}")
        table = json.dumps(table_rows(rows))
        self._post(client, "samples", "table", table, flow_run_id, f"Samples of step {number}")
        if self._poster.waiting <= _MOST_WAITING:
            self._post_curve(client, flow_run_id)
        self._overview_page.show(self._page)

    def _page(self) -> str:
        self._overview.services = [
            state for state in self._leases.living() if "-service-" in state.role
        ]
        return overview_markdown(self._overview, image=self._image, now=utc_now(), link=run_url)

    def _flush(self, client: SyncPrefectClient) -> None:
        self._progress.flush(client)
        self._grading.flush(client)
        self._overview_page.flush(client)

    def _end(self, client: SyncPrefectClient, kind: type[BaseException] | None) -> None:
        """Shows how things stand when this controller lets go of the run."""
        done = self._overview.done
        if kind is not None:
            self._overview.ended = f"stopped: {kind.__name__}; the flow run's state says more"
        else:
            whole = bool(done) and done[-1].commit.step >= self.last
            self._overview.ended = f"done: step {self.last} is committed" if whole else "ended"
        if self.curve.steps:
            self._image = curve_image(self.curve, self.run.run)
        self._overview_page.show(self._page)
        self._overview_page.flush(client, now=True)
        self._progress.flush(client, now=True)
        self._grading.flush(client, now=True)

    def _live(self, name: str, kind: str, description: str, *, every_s: float) -> LiveArtifact:
        key = artifact_key(self.run.run, name)
        return LiveArtifact(key, kind, description, self.run_flow_id, every_s=every_s)

    def _post(
        self,
        client: SyncPrefectClient,
        name: str,
        kind: str,
        content: str,
        flow_run_id: str | None,
        description: str,
    ) -> None:
        key = artifact_key(self.run.run, name)
        made = LiveArtifact(key, kind, description, flow_run_id)
        made.show(lambda: content)
        made.flush(client)
