"""Posts to Prefect on a thread of its own, so that nobody waits for it; what fails is a warning."""

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

log = logging.getLogger(__name__)

_TICK_S = 0.5
_CLOSE_LIMIT_S = 20.0

Job = Callable[[SyncPrefectClient], None]


def artifact_key(run: str, name: str) -> str:
    """Returns a key that Prefect accepts: lower case letters, digits and dashes."""
    text = f"{run}-{name}".lower()
    return "".join(letter if letter.isalnum() else "-" for letter in text).strip("-")


@dataclass
class LiveArtifact:
    """One artifact that is made once and then changed in place, at most every `every_s` seconds."""

    key: str
    kind: str
    description: str
    flow_run_id: str | None
    every_s: float = 2.0
    _next: Callable[[], Any] | None = None
    _id: UUID | None = None
    _shown: float | None = None

    def show(self, make: Callable[[], Any]) -> None:
        """Takes what is to be shown next; it is made only when it is posted."""
        self._next = make

    def flush(self, client: SyncPrefectClient, *, now: bool = False) -> None:
        """Posts what is to be shown, if it is time or `now` says so."""
        early = self._shown is not None and time.monotonic() - self._shown < self.every_s
        if self._next is None or (early and not now):
            return
        make, self._next = self._next, None
        self._shown = time.monotonic()
        content = make()
        if self._id is None:
            made = ArtifactCreate(
                key=self.key,
                type=self.kind,
                data=content,
                description=self.description,
                flow_run_id=UUID(self.flow_run_id) if self.flow_run_id else None,
            )
            self._id = client.create_artifact(made).id
        else:
            client.update_artifact(self._id, ArtifactUpdate(data=content))


@dataclass
class Poster:
    """A thread with Prefect's client that does jobs in order, and `each_tick` twice a second."""

    about: str
    """For the warning about a job that failed."""
    each_tick: Job
    _queue: "queue.SimpleQueue[Job | None]" = field(
        default_factory=queue.SimpleQueue[Job | None], init=False
    )
    _thread: threading.Thread | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        # The thread sees the settings (which server) that this flow runs under.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work,), name="posting", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_LIMIT_S)

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return self._queue.qsize()

    def put(self, job: Job) -> None:
        """Queues a job and returns at once."""
        self._queue.put(job)

    def tag(self, flow_run_id: str | None, *tags: str) -> None:
        """Adds tags to a flow run, which somebody else may have started without them."""
        if flow_run_id is not None:
            self.put(lambda client: _tag(client, UUID(flow_run_id), tags))

    def _work(self) -> None:
        with get_client(sync_client=True) as client:
            while True:
                try:
                    job = self._queue.get(timeout=_TICK_S)
                except queue.Empty:
                    job = self.each_tick
                if job is None:
                    return
                self._attempt(job, client)
                if job is not self.each_tick:
                    self._attempt(self.each_tick, client)

    def _attempt(self, job: Job, client: SyncPrefectClient) -> None:
        try:
            job(client)
        except Exception:
            # A report is no part of the ledger: whatever breaks it must not break the run.
            log.warning("A report of %s was not made", self.about, exc_info=True)


def _tag(client: SyncPrefectClient, flow_run_id: UUID, tags: Iterable[str]) -> None:
    found = set(client.read_flow_run(flow_run_id).tags)
    if not found.issuperset(tags):
        client.update_flow_run(flow_run_id, tags=sorted(found.union(tags)))
