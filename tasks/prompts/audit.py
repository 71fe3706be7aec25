"""The groups of a committed step drawn again from the stored prompts, and compared. No engine."""

from storage.audit_findings import EXACTLY_ONCE, REPLAY, Tally
from storage.audit_tables import other_rows
from storage.experience import read_shard
from storage.object_store import ObjectStore
from storage.records import Cursor, PromptInputs, RecordRef, StageRecord
from storage.schemas import PROMPTS
from tasks.prompts.draw import draw_groups
from tasks.prompts.stage import drawn_table, stored_prompts


def audit_prompts(
    store: ObjectStore,
    ref: RecordRef,
    record: StageRecord,
    *,
    inputs: PromptInputs,
    cursor: Cursor,
    tally: Tally,
) -> None:
    """Says so if the groups of a step are not those that seed, mixture and cursor give.

    Args:
        store: holds the stored prompts and the step's shard.
        ref: names the prompts record.
        record: of the step's prompts stage.
        inputs: the run's stored prompts.
        cursor: what the step's commit says was consumed after it.
        tally: is told.

    Raises:
        NotFound: stored prompts or shard are gone.
        Corrupt: they are not what their references name.
        ValueError: the request asks for what cannot be drawn.
    """
    request, shard = record.request, record.outputs["prompts"]
    stored = read_shard(store, shard, schema=PROMPTS)
    asked = (request["round"], request["num_groups"], stored.num_rows)
    # Before anything is drawn: what is not so could make an auditor draw for ever.
    expected = (0, stored.num_rows, shard.rows)
    name = "round, groups, rows"
    if not tally.expect(ref.key, name, asked, expected, promise=EXACTLY_ONCE):
        return
    draws, after = draw_groups(
        inputs.sets,
        seed=int(request["seed"]),
        cursor=Cursor.model_validate(request["cursor"]),
        round=request["round"],
        num_groups=request["num_groups"],
    )
    tally.expect(ref.key, "cursor after the step", cursor, after, promise=EXACTLY_ONCE)
    again = drawn_table(stored_prompts(store, inputs.train), draws, inputs=inputs)
    others = other_rows(stored, again)
    if others:
        tally.broken(shard.key, expected=others[0].expected, found=others[0].found, promise=REPLAY)
    tally.counts["prompts drawn again"] += len(draws)
