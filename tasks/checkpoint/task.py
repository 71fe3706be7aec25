"""The checkpoint stage as a Prefect task."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.checkpoint.contract import CheckpointRequest, CheckpointResult
from tasks.client import StageClient
from tasks.errors import is_transient


@task(
    name="checkpoint",
    task_run_name="checkpoint",
    retries=3,
    retry_delay_seconds=1,
    retry_condition_fn=is_transient,
    persist_result=False,
    cache_policy=NO_CACHE,
)
def checkpoint(request: CheckpointRequest, client: StageClient) -> CheckpointResult:
    """Commits one step through `client`; a retry adopts the commit that stands."""
    return client.run(request, CheckpointResult)
