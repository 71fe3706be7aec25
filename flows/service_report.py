"""The status of a service as one artifact of its flow run, changed in place while it serves."""

from typing import Self

from flows.posting import LiveArtifact, Poster, artifact_key
from flows.prefect_server import run_url
from flows.service_pages import status_markdown
from storage.leases import peek
from storage.object_store import ObjectStore
from tasks.service_contract import Health


class StatusReport:
    """Shows a service's health at its flow run; nobody waits for it, and no failure of it counts.

    Args:
        store: holds the controller's lease, which says where the run is advanced.
        run: whose stages the service serves.
        stage: which of them.
        address: where it listens, as the lease says it.
        flow_run_id: of the service's own flow run; None, without one, shows nothing.
    """

    def __init__(
        self, store: ObjectStore, *, run: str, stage: str, address: str, flow_run_id: str | None
    ) -> None:
        self._store = store
        self._run = run
        self._address = address
        self._in_prefect = flow_run_id is not None
        self._page = LiveArtifact(
            key=artifact_key(run, f"{stage}-service"),
            kind="markdown",
            description=f"{stage.capitalize()} service of {run}",
            flow_run_id=flow_run_id,
        )
        self._tags = (f"run:{run}", f"{stage}-service")
        self._poster = Poster(f"the {stage} service of run {run}", self._page.flush)

    def __enter__(self) -> Self:
        if self._in_prefect:
            self._poster.__enter__()
            self._poster.tag(self._page.flow_run_id, *self._tags)
        return self

    def __exit__(self, *error: object) -> None:
        if self._in_prefect:
            self._poster.put(lambda client: self._page.flush(client, now=True))
            self._poster.__exit__(*error)

    def show(self, health: Health) -> None:
        """Takes the service's health and returns at once; at most one in 2 s is posted."""
        self._page.show(lambda: self._markdown(health))

    def _markdown(self, health: Health) -> str:
        controller = peek(self._store, self._run, "controller")
        found = None if controller is None else controller.holder.get("flow_run_id")
        url = run_url(str(found) if found else None)
        return status_markdown(health, run=self._run, run_url=url, address=self._address)
