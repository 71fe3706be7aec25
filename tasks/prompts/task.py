"""The prompts stage as a Prefect task."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.client import StageClient
from tasks.errors import is_transient
from tasks.prompts.contract import PromptsRequest, PromptsResult


@task(
    name="prompts",
    task_run_name="prompts",
    retries=3,
    retry_delay_seconds=1,
    retry_condition_fn=is_transient,
    persist_result=False,
    cache_policy=NO_CACHE,
)
def prompts(request: PromptsRequest, client: StageClient) -> PromptsResult:
    """Draws the groups of one step through `client`; a retry finds the record."""
    return client.run(request, PromptsResult)
