"""The status of a service as one artifact of its flow run, changed in place while it serves."""

from typing import Self

from flows.posting import LiveArtifact, Poster, artifact_key
from flows.prefect_server import run_url
from flows.service_pages import status_markdown
from tasks.service_contract import Health


class StatusReport:
    """Shows a service's health at its flow run; nobody waits for it, and no failure of it counts.

    Args:
        run: whose stages the service serves.
        stage: which of them.
        address: where it listens.
        flow_run_id: of the service's own flow run.
    """

    def __init__(self, *, run: str, stage: str, address: str, flow_run_id: str | None) -> None:
        self._run = run
        self._address = address
        self._page = LiveArtifact(
            key=artifact_key(run, f"{stage}-service"),
            kind="markdown",
            description=f"Status of a {stage} service of {run}",
            flow_run_id=flow_run_id,
        )
        self._poster = Poster(f"the {stage} service of run {run}", self._page.flush)

    def __enter__(self) -> Self:
        self._poster.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._poster.put(lambda client: self._page.flush(client, now=True))
        self._poster.__exit__(*error)

    def show(self, health: Health, *, run_flow_id: str | None = None) -> None:
        """Takes the service's health and returns at once; at most every 2 s one is posted.

        Args:
            health: as the service says it.
            run_flow_id: the flow run that advances the run at present, for a link to it.
        """
        url = run_url(run_flow_id)

        def page() -> str:
            return status_markdown(health, run=self._run, run_url=url, address=self._address)

        self._page.show(page)
