"""The rollout stage as a Prefect task: one shard a call."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.client import StageClient
from tasks.errors import is_transient
from tasks.rollout.contract import RolloutRequest, RolloutResult


@task(
    name="rollout",
    task_run_name="rollout {request.shard}",
    retries=3,
    retry_delay_seconds=1,
    retry_condition_fn=is_transient,
    persist_result=False,
    cache_policy=NO_CACHE,
)
def rollout(request: RolloutRequest, client: StageClient) -> RolloutResult:
    """Samples one shard through `client`; a retry finds the record or draws the same samples."""
    return client.run(request, RolloutResult)
