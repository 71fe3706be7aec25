"""The prompts stage: draws the groups of one step from the stored prompts."""

import functools
import time
import uuid
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa

from storage import environment
from storage.experience import read_shard, write_shard
from storage.layout import attempt_key
from storage.ledger import find_record, put_record
from storage.object_store import ObjectStore
from storage.records import Metrics, ObjectRef, PromptInputs, StageRecord
from storage.schemas import PROMPTS
from tasks.prompts.contract import PromptsRequest, PromptsResult
from tasks.prompts.draw import Draw, draw_groups
from tasks.workspace import Workspace

STAGE = "prompts"
REQUESTS = (PromptsRequest,)
PACKAGES = ("pyarrow", "pydantic")


def run(
    request: PromptsRequest,
    store: ObjectStore,
    engine: None = None,
    *,
    workspace: Workspace | None = None,
) -> PromptsResult:
    """Writes the prompts shard of one step, `num_groups` rows in plan order, and its record.

    A second call finds the record and writes nothing. The cursor follows from the request alone,
    so it is the same whether or not the record was found.

    Args:
        request: seed, stored prompts, the previous commit's cursor, round and size.
        store: where the stored prompts are.
        engine: none; the parameter keeps the door alike in every room.
        workspace: unused, likewise.

    Raises:
        ValueError: the step asks for more groups of a set than the set has rows.
        Corrupt: the stored prompts are not what the run recorded.
    """
    draws, cursor = draw_groups(
        request.inputs.sets,
        seed=request.seed,
        cursor=request.cursor,
        round=request.round,
        num_groups=request.num_groups,
    )
    found = find_record(store, request.scope, stage=STAGE, request_digest=request.digest())
    if found is not None:
        return PromptsResult(record=found, cursor=cursor, reused=True)
    started = time.perf_counter()
    attempt = uuid.uuid4().hex
    shard = write_shard(
        store,
        drawn_table(stored_prompts(store, request.inputs.train), draws, inputs=request.inputs),
        schema=PROMPTS,
        key=attempt_key(request.scope, attempt, "prompts.parquet"),
    )
    elapsed: Metrics = {"total": time.perf_counter() - started}
    mine = _record(request, attempt=attempt, shard=shard, timings_s=elapsed)
    winner, _ = put_record(store, request.scope, mine)
    return PromptsResult(record=winner, cursor=cursor, reused=winner.attempt != attempt)


def held_out_rows(inputs: PromptInputs, *, limit: int | None = None) -> range:
    """Returns which rows of `inputs.held_out` an evaluation takes: the first `limit`, or all.

    The shard is in an order that the seed shuffled, so its first rows are a fair sample; its
    group ids are ready to sample from.
    """
    rows = inputs.held_out.rows or 0
    return range(rows if limit is None else min(limit, rows))


def drawn_table(prompts: pa.Table, draws: Sequence[Draw], *, inputs: PromptInputs) -> pa.Table:
    """Returns the rows of a step's prompts shard, one per draw, in order.

    Args:
        prompts: the stored prompts of the run, `inputs.train`.
        draws: which rows of them.
        inputs: how many rows each set has there.
    """
    firsts = list(accumulate((found.train_rows for found in inputs.sets), initial=0))
    drawn = prompts.take(pa.array([firsts[draw.set_index] + draw.row for draw in draws]))
    # Made per draw and not from the prompt: the same prompt drawn twice is two groups, and from
    # the number in the run and not from the step: the request digest decides the bytes.
    group_ids = pa.array([f"group-{draw.number:09d}" for draw in draws], pa.string())
    index = PROMPTS.get_field_index("group_id")
    return drawn.set_column(index, PROMPTS.field(index), group_ids)


def _record(
    request: PromptsRequest, *, attempt: str, shard: ObjectRef, timings_s: Metrics
) -> StageRecord:
    described = environment.describe(PACKAGES)
    return StageRecord(
        stage=STAGE,
        request=request.body(),
        request_digest=request.digest(),
        outputs={"prompts": shard},
        attempt=attempt,
        environment=described,
        environment_digest=environment.digest(described),
        timings_s=timings_s,
        metrics={"groups": float(request.num_groups)},
    )


def stored_prompts(store: ObjectStore, ref: ObjectRef) -> pa.Table:
    """Returns the stored prompts that `ref` names; a process reads them once.

    Raises:
        NotFound: they are gone.
        Corrupt: other bytes than `ref` names.
    """
    return _read_once(store, ref.to_bytes())


@functools.lru_cache(maxsize=2)
def _read_once(store: ObjectStore, ref: bytes) -> pa.Table:
    """Reads a run's prompts once per process: a step then costs what it draws."""
    return read_shard(store, ObjectRef.from_bytes(ref), schema=PROMPTS)
