"""The reward stage as a Prefect task: one shard a call."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.client import StageClient
from tasks.errors import is_transient
from tasks.reward.contract import RewardRequest, RewardResult


@task(
    name="reward",
    task_run_name="reward {request.shard}",
    retries=3,
    retry_delay_seconds=1,
    retry_condition_fn=is_transient,
    persist_result=False,
    cache_policy=NO_CACHE,
)
def reward(request: RewardRequest, client: StageClient) -> RewardResult:
    """Grades one shard through `client`; a retry finds the record or grades again."""
    return client.run(request, RewardResult)
