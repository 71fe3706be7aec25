"""What must hold after a soak: every group consumed once, and nothing left on this host."""

import time
from pathlib import Path

import duckdb
import pyarrow as pa

from storage.experience import read_shard
from storage.ledger import commits, read_record
from storage.object_store import ObjectStore
from storage.records import ObjectRef, StageRecord
from storage.schemas import SCHEMAS
from tests.benchmarks.soak_world import Controller

COLUMNS = {
    "prompts": ["prompt_id", "group_id"],
    "samples": ["sample_id"],
    "rewards": ["sample_id"],
    "train": ["sample_id", "group_id"],
}
EXACTLY_ONCE = """
with consumed as (
  select step, group_id, count(*) as rows, count(distinct sample_id) as samples,
         count(r.sample_id) as graded, count(s.sample_id) as sampled
  from train left join rewards r using (step, sample_id)
             left join samples s using (step, sample_id)
  group by step, group_id)
select (select count(*) from prompts) as planned,
       (select count(*) from prompts anti join consumed using (step, group_id)) as missing,
       (select count(*) from consumed anti join prompts using (step, group_id)) as strangers,
       (select count(*) - count(distinct group_id) from consumed) as repeated,
       (select count(*) from consumed where rows != $group_size or samples != rows
          or graded != rows or sampled != rows) as uneven,
       (select count(*) - count(distinct prompt_id) from prompts) as prompts_twice
"""
"""Over the shards that commits name; all but `planned` must be 0 (prompts: within one epoch)."""


def exactly_once(store: ObjectStore, run: str) -> dict[str, int]:
    """Returns the counts of `EXACTLY_ONCE` for a run."""
    tables: dict[str, list[pa.Table]] = {name: [] for name in COLUMNS}
    group_size = 0
    for commit, _ in commits(store, run, start=1):
        for ref in commit.records:
            record = read_record(store, ref)
            group_size = _group_size(record) or group_size
            for name in record.outputs.keys() & COLUMNS.keys():
                tables[name].append(_table(store, record.outputs[name], name, commit.step))
    connection = duckdb.connect()
    for name, parts in tables.items():
        connection.register(name, pa.concat_tables(parts))
    result = connection.execute(EXACTLY_ONCE, {"group_size": group_size})
    names = [column[0] for column in result.description or ()]
    return dict(zip(names, result.fetchone() or (), strict=True))


def _group_size(record: StageRecord) -> int:
    return int(record.request.get("sampling", {}).get("group_size", 0))


def _table(store: ObjectStore, ref: ObjectRef, name: str, step: int) -> pa.Table:
    table = read_shard(store, ref, schema=SCHEMAS[name], columns=COLUMNS[name])
    return table.append_column("step", pa.array([step] * table.num_rows, pa.int64()))


def policy_digests(store: ObjectStore, run: str) -> list[str]:
    """Returns the policy digest of every step."""
    return [commit.policy_digest for commit, _ in commits(store, run)]


def leftovers(controller: Controller, *, root: Path) -> list[str]:
    """Returns what a run left behind on this host: processes, scratch, shared memory, temp."""
    deadline = time.monotonic() + 20.0
    while controller.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    running = [f"process {each.pid} {each.cmdline()}" for each in controller.processes()]
    scratch = [str(path) for path in (controller.home / "scratch").glob("*")]
    temporary = [str(path) for path in (root / "tmp").glob("*") if not path.is_socket()]
    return [*running, *scratch, *_shared_memory(), *temporary]


def _shared_memory() -> list[str]:
    """Returns DeepSpeed's buffers that no living process has mapped: some dead rank's."""
    named = {str(path) for path in Path("/dev/shm").glob("deepspeed_*")}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        named -= {path for path in named if path in text}
    return sorted(named)
