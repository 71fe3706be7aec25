import os
import signal
import threading
import uuid
from pathlib import Path

import pytest

from flows.query import open_tables, query, view_columns
from flows.views import MEANINGS, SCHEMAS, VIEWS
from storage.errors import Corrupt, NotFound
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig
from tests.contract.faulty_store import FaultyStore
from tests.contract.sampled_run import SampledRun


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLBOOK_HOME", str(tmp_path / "home"))


@pytest.fixture
def store() -> ObjectStore:
    return open_store(StoreConfig(uri=f"memory://{uuid.uuid4().hex}"), writing=True)


@pytest.fixture
def run(store: ObjectStore, tmp_path: Path) -> SampledRun:
    return SampledRun(store, tmp_path / "tokenizer").write(3)


def opened_steps(calls: list[str]) -> set[int]:
    """The steps of which a shard or a stage record was read."""
    inside = [call for call in calls if "/attempts/" in call or "/stages/" in call]
    return {int(call.split("/")[3]) for call in inside}


def test_every_view_is_explained_and_rests_on_a_schema():
    assert list(VIEWS) == list(SCHEMAS) == list(MEANINGS) == list(view_columns())
    assert {"step", "reward", "completion", "staleness"} < set(view_columns()["samples"])


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_empty_where_nothing_is(store: ObjectStore, tmp_path: Path, view: str):
    assert query(f"from {view}", store=store).num_rows == 0
    SampledRun(store, tmp_path)
    names = query(f"from {view}", store=store, run="r").column_names
    assert names == view_columns()[view]


@pytest.mark.parametrize(
    ("where", "steps"),
    [
        ("step = 2", {2}),
        ("step in (1, 3)", {1, 3}),
        ("step between 2 and 3 and run = 'r'", {2, 3}),
        ("run = 'other'", set()),
        ("reward > 0.5", {1, 2, 3}),
    ],
)
def test_a_query_opens_the_steps_that_it_is_about(
    store: ObjectStore, run: SampledRun, where: str, steps: set[int]
):
    counting = FaultyStore(store)
    query(f"select step, avg(reward) from samples where {where} group by step", store=counting)
    assert opened_steps(counting.calls) == steps


def test_an_average_of_rewards_reads_no_rollout_and_no_train_shard(
    store: ObjectStore, run: SampledRun
):
    counting = FaultyStore(store)
    rows = query("select step, avg(reward) from samples group by all", store=counting)
    assert rows.num_rows == 3
    shards = {call.rpartition("/")[2] for call in counting.calls if "/attempts/" in call}
    assert shards == {"reward-0000.parquet", "reward-0001.parquet"}


def test_a_question_about_runs_reads_no_step(store: ObjectStore, run: SampledRun):
    counting = FaultyStore(store)
    assert query("select recipe from runs", store=counting).to_pylist() == [{"recipe": "made"}]
    assert not [call for call in counting.calls if "/steps/" in call]


def test_only_the_named_runs_are_read(store: ObjectStore, run: SampledRun, tmp_path: Path):
    SampledRun(store, tmp_path / "tokenizer", run="other").write(1)
    counting = FaultyStore(store)
    asked = "select distinct run from samples order by run"
    assert query(asked, store=counting, run="other")["run"].to_pylist() == ["other"]
    assert not [call for call in counting.calls if "runs/r/" in call]
    assert query(asked, store=store, run=["r", "other"])["run"].to_pylist() == ["other", "r"]
    assert query(asked, store=store)["run"].to_pylist() == ["other", "r"]


def test_text_is_decoded_with_the_tokenizer_of_its_run(store: ObjectStore, run: SampledRun):
    asked = (
        "select prompt, completion, text_of(run, completion_token_ids[1:2]) as start "
        "from samples where step = 1 order by sample_id limit 1"
    )
    rows = query(asked, store=store).to_pylist()
    assert rows == [{"prompt": "0?", "completion": "yes<|im_end|>", "start": "ye"}]


def test_figures_of_a_step_are_columns_and_a_map(store: ObjectStore, run: SampledRun):
    asked = "select loss, metrics['loss'] as same, reward_mean from steps where step = 2"
    assert query(asked, store=store).to_pylist() == [{"loss": 0.2, "same": 0.2, "reward_mean": 0.5}]


@pytest.mark.parametrize(
    "sql",
    [
        "create table t as select 1",
        "copy steps to 'x.csv'",
        "insert into steps select * from steps",
        "drop view steps",
        "attach 'x.db'",
        "install httpfs",
        "load httpfs",
        "set threads = 1",
        "pragma version",
        "export database 'x'",
        "call pragma_version()",
    ],
)
def test_what_does_not_read_is_refused(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="only reads"):
        query(sql, store=store)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_text('{}')",
        "from '{}'",
        "select * from read_csv('https://example.org/a.csv')",
        "select * from glob('{}')",
        "from sqlite_scan('{}', 'x')",
    ],
)
def test_no_file_and_no_network_is_read(store: ObjectStore, tmp_path: Path, sql: str):
    secret = tmp_path / "secret.csv"
    secret.write_text("secret\n1\n")
    with pytest.raises(ValueError, match=r"reads the views|does not exist|no extensions"):
        query(sql.format(secret), store=store)


def test_variables_of_the_caller_are_no_tables(store: ObjectStore):
    rows = query("select 1 as a", store=store)
    assert rows.num_rows == 1
    with pytest.raises(ValueError, match=r"does not exist.*views samples"):
        query("from rows", store=store)


@pytest.mark.parametrize("sql", ["pivot steps on kind using count(*)", "describe samples"])
def test_other_statements_that_read_are_fine(store: ObjectStore, run: SampledRun, sql: str):
    assert query(sql, store=store).num_rows > 0


def test_a_wrong_column_says_which_there_are(store: ObjectStore):
    with pytest.raises(ValueError, match=r'"rewrd" not found.*samples has run, step, .*staleness'):
        query("select rewrd from samples", store=store)


def test_a_wrong_view_says_which_there_are(store: ObjectStore):
    with pytest.raises(ValueError, match=r'Did you mean "samples"\? Expected one of the views'):
        query("from sampls", store=store)


@pytest.mark.parametrize(("sql", "count"), [("", "0"), ("select 1; select 2", "2")])
def test_one_statement_is_expected(store: ObjectStore, sql: str, count: str):
    with pytest.raises(ValueError, match=f"has {count} statements"):
        query(sql, store=store)


def test_a_syntax_error_shows_its_place(store: ObjectStore):
    with pytest.raises(ValueError, match=r"syntax error") as caught:
        query("select step from steps where", store=store)
    assert "LINE 1" in str(caught.value)


def test_an_unknown_run_is_named_with_the_known(store: ObjectStore, run: SampledRun):
    with pytest.raises(NotFound, match=r"no run 'q'.*\(r\)"):
        query("from samples", store=store, run="q")


def test_a_lost_shard_is_the_stores_own_error(store: ObjectStore, run: SampledRun):
    store.delete("runs/r/steps/00000002/attempts/lives/train.parquet")
    with pytest.raises(NotFound, match=r"00000002/attempts/lives/train\.parquet"):
        query("select advantage, reward from samples", store=store)
    assert query("select avg(reward) from samples", store=store).num_rows == 1


def test_a_broken_chain_is_the_stores_own_error(store: ObjectStore, run: SampledRun):
    store.delete("runs/r/steps/00000001/commit.json")
    with pytest.raises(Corrupt, match="step 1"):
        query("from samples", store=store)
    assert query("from runs", store=store).num_rows == 1


def test_a_callers_connection_may_do_more(store: ObjectStore, run: SampledRun, tmp_path: Path):
    connection = open_tables(store=store).connect()
    connection.execute(f"copy (from steps) to '{tmp_path}/steps.parquet'")
    assert (tmp_path / "steps.parquet").is_file()


def test_a_run_without_a_tokenizer_says_so_when_text_is_asked(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    SampledRun(store, tmp_path / "tokenizer").write(1)
    monkeypatch.setattr("flows.tables.open_input", lambda *_, **__: tmp_path)
    assert query("select reward from samples", store=store).num_rows == 8
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        query("select completion from samples", store=store)


@pytest.mark.timeout(60, method="thread")  # DuckDB is not woken by the other method's alarm.
def test_a_query_can_be_interrupted(store: ObjectStore):
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        query("select count(*) from range(100000000000) a, range(1000000) b", store=store)
    timer.join()
