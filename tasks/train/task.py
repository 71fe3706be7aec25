"""The train stage as a Prefect task: genesis or one step."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.client import StageClient
from tasks.errors import is_transient
from tasks.train.contract import GenesisRequest, TrainRequest, TrainResult


@task(
    name="train",
    task_run_name="train",
    retries=3,
    retry_delay_seconds=1,
    retry_condition_fn=is_transient,
    persist_result=False,
    cache_policy=NO_CACHE,
)
def train(request: GenesisRequest | TrainRequest, client: StageClient) -> TrainResult:
    """Makes the next policy through `client`; a retry finds the record or restores the state."""
    return client.run(request, TrainResult)
