"""A flow that a worker runs with credentials which its work pool takes from a secret block."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from storage.ledger import head
from storage.opening import open_store
from storage.store_config import StoreConfig


@flow(name="reads-a-store", persist_result=False)
def read_head(run: str, uri: str, endpoint: str) -> State:
    newest = head(open_store(StoreConfig(uri=uri, endpoint=endpoint), writing=False), run)
    assert newest is not None
    return Completed(message=f"head is step {newest[0].step}")
