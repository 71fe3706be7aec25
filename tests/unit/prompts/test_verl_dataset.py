"""verl's Parquet files: read as verl reads them, and graded by verl's functions."""

import datetime
import decimal
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.experience import read_shard, rows_to_table, write_shard
from storage.inputs import put_input
from storage.layout import StepScope
from storage.object_store import ObjectStore
from storage.schemas import PROMPTS, REWARDS, SAMPLES
from tasks.prompts.contract import DatasetConfig
from tasks.prompts.opening import read_rows
from tasks.prompts.rows import Row, Rows
from tasks.reward.contract import RewardConfig, RewardPart, RewardRequest
from tasks.reward.grading import Grading
from tasks.reward.stage import check_golds, run
from tasks.workspace import Workspace
from tests.unit.prompts.conftest import Prepare
from tests.unit.reward.tokenizers_for_tests import END, write_tokenizer

FUNCTIONS = Path(__file__).parents[1] / "rewards" / "functions_of_users.py"


def gsm8k(index: int, *, split: str = "train") -> dict[str, Any]:
    """A row as verl's preprocessing of GSM8K writes it: {index} boxes of 6, and their sum."""
    question = f"There are {index} boxes of 6. How many?"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f'{question} Output the answer after "####".'}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(6 * index)},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": f"{index} * 6 = {6 * index}\n#### {6 * index}",
            "question": question,
        },
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes them as verl's scripts do."""
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def read(path: Any, **options: Any) -> Rows:
    return read_rows(DatasetConfig(kind="verl", options={"path": path, **options}))


def stored(rows: list[Row]) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(row.extra)) for row in rows]


def test_rows_keep_what_verl_hands_to_reward_functions(tmp_path: Path):
    rows = [gsm8k(index) for index in range(3)]
    train = read(write(tmp_path / "train.parquet", rows)).train
    assert [row.prompt for row in train] == [row["prompt"] for row in rows]
    assert [row.answer for row in train] == ["0", "6", "12"]
    assert [row.row_id for row in train] == ["train/0", "train/1", "train/2"]
    names = ("data_source", "ability", "reward_model", "extra_info")
    assert stored(train) == [{name: row[name] for name in names} for row in rows]


def test_rows_written_by_pandas_are_the_same(tmp_path: Path):
    rows = [gsm8k(index) for index in range(3)]
    pd.DataFrame(rows).to_parquet(tmp_path / "pandas.parquet")
    write(tmp_path / "datasets.parquet", rows)
    by_pandas, by_datasets = (
        read(tmp_path / f"{name}.parquet").train for name in ("pandas", "datasets")
    )
    assert [(row.prompt, row.answer, row.row_id) for row in by_pandas] == [
        (row.prompt, row.answer, row.row_id) for row in by_datasets
    ]
    assert stored(by_pandas) == stored(by_datasets)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("  1/2 ", "  1/2 "),
        (72, "72"),
        (0.5, "0.5"),
        (True, "true"),
        (["A", "B"], '["A","B"]'),
        ({"target": 98, "numbers": [44, 19]}, '{"numbers":[44,19],"target":98}'),
        ("größer", "größer"),
        (["größer"], '["größer"]'),
    ],
)
def test_a_ground_truth_of_any_type_stays_what_it_is(tmp_path: Path, truth: Any, answer: str):
    row = gsm8k(1) | {"reward_model": {"style": "rule", "ground_truth": truth}}
    (found,) = read(write(tmp_path / "one.parquet", [row])).train
    assert found.answer == answer
    assert stored([found])[0]["reward_model"]["ground_truth"] == truth


def test_a_row_without_ground_truth_has_no_answer(tmp_path: Path):
    rows = [gsm8k(1), gsm8k(2)]
    rows[1]["reward_model"]["ground_truth"] = None
    found = read(write(tmp_path / "some.parquet", rows)).train
    assert [row.answer for row in found] == ["6", None]


def test_what_only_other_rows_have_is_null_as_verl_reads_it(tmp_path: Path):
    rows = [gsm8k(1), gsm8k(2)]
    rows[1]["extra_info"]["level"] = "hard"
    found = read(write(tmp_path / "mixed.parquet", rows)).train
    assert [row.extra["extra_info"]["level"] for row in found] == [None, "hard"]


def test_train_and_validation_files_may_be_several(tmp_path: Path):
    first = write(tmp_path / "a.parquet", [gsm8k(1)])
    second = write(tmp_path / "b.parquet", [gsm8k(2)])
    test = write(tmp_path / "test.parquet", [gsm8k(3, split="test")])
    rows = read([str(first), str(second)], held_out_path=str(test))
    assert rows.held_out is not None
    assert [row.row_id for row in rows.train] == ["train/1", "train/2"]
    assert [row.row_id for row in rows.held_out] == ["test/3"]
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "c.parquet", [gsm8k(4)])
    assert [row.row_id for row in read(tmp_path / "folder").train] == ["train/4"]


def test_a_row_that_is_there_twice_counts_once(tmp_path: Path):
    rows = read(write(tmp_path / "twice.parquet", [gsm8k(1), gsm8k(2), gsm8k(1), gsm8k(1)]))
    assert [row.row_id for row in rows.train] == ["train/1", "train/2"]
    assert rows.dropped == {"repeated": 2}


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row["extra_info"].update(index=1),
        lambda row: row["extra_info"].update(index=None),
        lambda row: row["extra_info"].update(split=None),
        lambda row: row.update(extra_info=None),
        lambda row: row.pop("extra_info"),
    ],
)
def test_indices_that_tell_rows_not_apart_are_no_ids(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
):
    rows = [gsm8k(1), gsm8k(2), gsm8k(3)]
    for row in rows[1:]:
        change(row)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    ids = [row.row_id for row in read(path).train]
    assert len(set(ids)) == 3
    assert all(len(row_id) == 32 for row_id in ids)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC), "datetime"),
        (decimal.Decimal("0.10"), "Decimal"),
        (b"\x00\xff", "bytes"),
        (float("nan"), "float"),
        (float("inf"), "float"),
    ],
)
def test_what_json_would_change_is_refused_by_name_or_left_out(
    tmp_path: Path, value: Any, kind: str
):
    rows = [gsm8k(1), gsm8k(2)]
    for row in rows:
        row["extra_info"]["nested"] = [{"odd": value}]
    path = tmp_path / "odd.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    named = rf"odd\.parquet row 1: 'extra_info\.nested\.odd' is .* \({kind}\)"
    with pytest.raises(ValueError, match=named):
        read(path)
    found = read(path, leave_out=["extra_info.nested.odd"]).train
    assert found[0].extra["extra_info"]["nested"] == [{}]
    assert "nested" not in read(path, leave_out=["extra_info.nested"]).train[0].extra["extra_info"]


def test_turns_and_further_columns_are_stored_where_asked(tmp_path: Path):
    rows = [gsm8k(1) | {"level": "easy", "images": [b"\xff"]}]
    path = write(tmp_path / "more.parquet", rows)
    extra = read(path, keep_prompt=True, extra_fields=["level"]).train[0].extra
    assert (extra["prompt"], extra["level"]) == (rows[0]["prompt"], "easy")
    assert "prompt" not in read(path).train[0].extra


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("data_source"), "has no column 'data_source'. Found the columns"),
        (lambda row: row.pop("reward_model"), "has no column 'reward_model'"),
        (lambda row: row.pop("prompt"), "has no column 'prompt'.*prompt_key"),
        (lambda row: row.update(reward_model=None), "row 1: 'reward_model' has no 'ground_truth'"),
        (lambda row: row["reward_model"].pop("ground_truth"), "has no 'ground_truth'"),
        (lambda row: row.update(prompt=[]), r"row 1: 'prompt' is \[\]"),
        (lambda row: row["prompt"][0].update(content=None), "row 1: 'prompt.content' is None"),
        (lambda row: row["prompt"][0].update(role="robot"), "row 1: a turn of 'prompt' has role"),
    ],
)
def test_a_file_that_is_not_verls_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
):
    row = gsm8k(1)
    change(row)
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_text_that_is_not_utf8_is_refused_with_its_file(tmp_path: Path):
    row = gsm8k(1) | {"ability": b"\xff\xfe"}
    table = pa.Table.from_pylist([row])
    broken = table.set_column(
        table.schema.get_field_index("ability"),
        "ability",
        pa.StringArray.from_buffers(1, *table["ability"].chunk(0).buffers()[1:]),
    )
    pq.write_table(broken, tmp_path / "bytes.parquet")
    with pytest.raises(ValueError, match=r"bytes\.parquet after row 0: a text is not UTF-8"):
        read(tmp_path / "bytes.parquet")


class Stage:
    """A verl file on its way through prompts and reward stage, a completion for each row."""

    def __init__(self, store: ObjectStore, prepare_sets: Prepare, directory: Path) -> None:
        self.store = store
        self.prepare_sets = prepare_sets
        self.model_dir = directory / "model"
        self.tokenizer = write_tokenizer(self.model_dir, special_tags=True)
        (self.model_dir / "chat_template.jinja").write_text(
            "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
        )
        self.model = put_input(store, {path.name: path for path in self.model_dir.iterdir()})
        self.workspace = Workspace(cache=directory / "cache", scratch=directory)

    def grade(
        self, path: Path, completions: list[str], part: RewardPart, **options: Any
    ) -> list[Any]:
        """Returns the rows of the rewards shard, after the check of the golds at launch."""
        options = {"path": str(path), **options}
        inputs = self.prepare_sets(
            {"kind": "verl", "options": options}, tokenizer_dir=self.model_dir
        )
        prompts = read_shard(self.store, inputs.train, schema=PROMPTS).to_pylist()
        samples = [
            self._sample(prompt, text) for prompt, text in zip(prompts, completions, strict=True)
        ]
        table = rows_to_table(samples, schema=SAMPLES)
        config = RewardConfig(parts=[part], workers=1, cpu_limit_s=20.0, max_failed_share=1.0)
        check_golds(config, prompts, workspace=self.workspace)
        request = RewardRequest(
            scope=StepScope(run="r", step=1),
            shard=0,
            samples=write_shard(self.store, table, schema=SAMPLES, key=uuid.uuid4().hex),
            prompts=inputs.train,
            model=self.model,
            config=config,
        )
        with Grading(config, workspace=self.workspace) as grading:
            result = run(request, self.store, grading, workspace=self.workspace)
        rewards = result.record.outputs["rewards"]
        return read_shard(self.store, rewards, schema=REWARDS).to_pylist()

    def _sample(self, prompt: dict[str, Any], text: str) -> dict[str, Any]:
        token_ids = self.tokenizer.encode(f"{text}{END}").ids
        return {
            "sample_id": f"{prompt['group_id']}-0",
            "group_id": prompt["group_id"],
            "sample_index": 0,
            "prompt_token_ids": prompt["prompt_token_ids"],
            "completion_token_ids": token_ids,
            "completion_mask": [True] * len(token_ids),
            "rollout_logprobs": [-0.5] * len(token_ids),
            "finish_reason": "stop",
            "stop_token_id": token_ids[-1],
            "seed": 0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": 64,
            "version_spans": [{"start": 0, "policy_version": 0, "policy_digest": "d"}],
        }


@pytest.fixture
def stage(store: ObjectStore, prepare_sets: Prepare, tmp_path: Path) -> Stage:
    return Stage(store, prepare_sets, tmp_path)


def test_verls_function_grades_verls_rows(stage: Stage, tmp_path: Path):
    rows = [gsm8k(1), gsm8k(2), gsm8k(3) | {"data_source": "unheard of"}]
    path = write(tmp_path / "train.parquet", rows)
    part = RewardPart(kind="python", options={"function": f"{FUNCTIONS}:compute_score"})
    right, wrong, unknown = stage.grade(path, ["6", "13", "18"], part)
    assert (right["reward"], right["status"]) == (1.0, "graded")
    assert right["reason"] == "python: acc=1, pred=6"
    assert (wrong["reward"], wrong["status"]) == (0.0, "graded")
    assert (unknown["reward"], unknown["status"]) == (None, "grader_error")
    assert "NotImplementedError" in unknown["reason"]


def test_house_rewards_grade_verls_rows(stage: Stage, tmp_path: Path):
    path = write(tmp_path / "train.parquet", [gsm8k(1), gsm8k(2)])
    rewards = stage.grade(path, ["\\boxed{6}", "\\boxed{13}"], RewardPart(kind="numeric"))
    assert [row["reward"] for row in rewards] == [1.0, 0.0]


def test_trls_conversational_function_grades_verls_rows(stage: Stage, tmp_path: Path):
    row = gsm8k(1) | {"prompt": [{"role": "user", "content": "2 + 2?"}]}
    path = write(tmp_path / "train.parquet", [row])
    part = RewardPart(kind="python", options={"function": f"{FUNCTIONS}:conversation"})
    assert [row["reward"] for row in stage.grade(path, ["4"], part, keep_prompt=True)] == [1.0]


def test_rows_that_a_function_cannot_grade_are_named_at_launch(stage: Stage, tmp_path: Path):
    path = write(tmp_path / "train.parquet", [gsm8k(1), gsm8k(2)])
    part = RewardPart(kind="python", options={"function": f"{FUNCTIONS}:takes_three"})
    with pytest.raises(ValueError, match=r"2 of 2 prompts .* requires 'level'"):
        stage.grade(path, ["6", "12"], part)
