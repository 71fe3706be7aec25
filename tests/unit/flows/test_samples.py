import io
import math
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from flows.samples import StepSamples, choose_rows, open_samples, show_rows
from flows.samples_page import print_groups, print_samples
from storage.errors import Corrupt, NotFound
from storage.ledger import read_commit, read_record
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig
from tests.contract.sampled_run import SampledRun, Shape

HOSTILE = "\x00\u202e[bold]"
SHAPE = Shape(
    timed_out=((2, 3, 1),),
    gaps=(((2, 1, 0), math.log(3.0)), ((2, 2, 0), math.log(0.75))),
    texts=(((2, 2, 1), HOSTILE),),
    skipped=(3,),
)


@pytest.fixture
def store() -> ObjectStore:
    return open_store(StoreConfig(uri=f"memory://{uuid.uuid4().hex}"), writing=True)


@pytest.fixture
def run(store: ObjectStore, tmp_path: Path) -> SampledRun:
    return SampledRun(store, tmp_path / "tokenizer", shape=SHAPE).write(3)


@pytest.fixture
def step(store: ObjectStore, run: SampledRun, tmp_path: Path) -> StepSamples:
    return open_samples(store, "r@2", cache=tmp_path / "cache")


def shown(step: StepSamples, width: int = 100, colours: bool = False, **wish) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        highlight=False,
        force_terminal=colours,
        color_system="standard" if colours else None,
    )
    chosen = show_rows(step, choose_rows(step, **wish))
    (print_samples if wish else print_groups)(chosen, console)
    return stream.getvalue()


def test_worst_and_best_are_by_reward_then_advantage(step: StepSamples):
    chosen = show_rows(step, choose_rows(step, worst=2, best=1))
    samples = [sample for group in chosen.groups for sample in group.samples]
    assert [(sample.reward, sample.sample_id) for sample in samples] == [
        (0.0, "group-000000004-1"),
        (1.0, "group-000000004-0"),
        (0.0, "group-000000005-1"),
    ]
    rows = pa.table({"reward": [0.0, 1.0, 0.0, None], "advantage": [-1.0, 2.0, -3.0, None]})
    other = StepSamples(step.commit, rows, prompts={}, decode=step.decode)
    assert other.by_reward() == [2, 0, 1]
    assert other.by_reward(best=True) == [1, 0, 2]


def test_a_sample_without_reward_is_neither_best_nor_worst(step: StepSamples):
    chosen = show_rows(step, choose_rows(step, worst=100))
    assert sum(len(group.samples) for group in chosen.groups) == 7
    assert chosen.num_ungraded == 1


@pytest.mark.parametrize("name", ["group-000000005", "5", "set/1"])
def test_a_group_is_found_by_id_number_or_prompt(step: StepSamples, name: str):
    chosen = show_rows(step, choose_rows(step, group=name))
    assert [group.group_id for group in chosen.groups] == ["group-000000005"]
    assert chosen.groups[0].prompt == "1?"
    assert [sample.completion for sample in chosen.groups[0].samples] == [
        "yes<|im_end|>",
        "no<|im_end|>",
    ]


def test_an_unknown_group_is_named_with_some_that_are(step: StepSamples):
    with pytest.raises(ValueError, match=r"no group '99'.*4: group-000000004"):
        choose_rows(step, group="99")


def test_a_token_that_learner_and_sampler_see_apart_stands_alone(step: StepSamples):
    sample = show_rows(step, step.of_group("5")).groups[0].samples[0]
    marked = [(piece.text, piece.ratio) for piece in sample.pieces]
    assert marked == [("y", None), ("e", pytest.approx(3.0)), ("s<|im_end|>", None)]
    assert sample.ratio_max == pytest.approx(3.0)


def test_groups_read_a_line_per_sample(step: StepSamples):
    lines = [line.rstrip() for line in shown(step).splitlines()]
    assert lines[0].startswith("r@2  4 groups, 8 samples, 1 without a reward  reward 0.500")
    assert lines[2].startswith("group-000000004  set/0  answer yes · mean reward 0.500 ─")
    assert lines[3] == "┃ 0?"
    assert lines[4].split() == ["#", "reward", "advantage", "tokens", "finish", "completion", "why"]
    assert lines[5].split() == ["0", "1.000", "+1.000", "4", "stop", "yes<|im_end|>"]
    assert lines[6].split()[5:] == ["no<|im_end|>", "format:", "wrong"]


def test_a_failure_is_told_as_one_and_never_as_a_zero(step: StepSamples):
    text = shown(step, group="7")
    assert "reward -  advantage -  3 tokens" in text
    assert "format grader_timeout: took more than 5 s" in text
    assert "dropped: grader_timeout" in text


def test_marked_tokens_are_named_where_no_colours_are(step: StepSamples):
    assert '"e" x3 (token 1)' in shown(step, group="5")
    assert '"e" x0.75 (token 1)' in shown(step, group="6")


def test_marked_tokens_are_coloured_by_direction_and_size(step: StepSamples):
    assert "\x1b[1;37;44me\x1b[0m" in shown(step, colours=True, group="5")
    assert "\x1b[30;43me\x1b[0m" in shown(step, colours=True, group="6")
    assert "above 2" in shown(step, group="5")
    assert "no token" in shown(step, group="4")


@pytest.mark.parametrize("wish", [{}, {"group": "6"}])
def test_text_of_a_model_does_not_steer_the_terminal(step: StepSamples, wish: dict[str, str]):
    text = shown(step, **wish)
    assert "\\x00\\u202e[bold]<|im_end|>" in text
    assert not {"\x00", "\u202e"} & set(text)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("wish", [{}, {"worst": 8}])
def test_no_line_is_wider_than_the_terminal(step: StepSamples, width: int, wish: dict[str, int]):
    lines = shown(step, width=width, **wish).splitlines()
    assert max(map(len, lines)) <= width


def test_of_a_long_prompt_the_middle_is_left_out(step: StepSamples):
    chosen = show_rows(step, step.of_group("4"))
    prompt = "\n".join(f"line {number}" for number in range(40))
    groups = [chosen.groups[0].model_copy(update={"prompt": prompt})]
    stream = io.StringIO()
    print_groups(chosen.model_copy(update={"groups": groups}), Console(file=stream, width=80))
    lines = stream.getvalue().splitlines()[3:8]
    assert lines == ["┃ line 0", "┃ line 1", "┃ ... 36 lines ...", "┃ line 38", "┃ line 39"]


def test_without_a_step_the_newest_with_samples_is_read(
    store: ObjectStore, run: SampledRun, tmp_path: Path
):
    assert open_samples(store, "r", cache=tmp_path / "cache").commit.step == 2


@pytest.mark.parametrize(("target", "kind"), [("r@0", "genesis"), ("r@3", "skipped")])
def test_a_step_without_samples_says_its_kind(
    store: ObjectStore, run: SampledRun, tmp_path: Path, target: str, kind: str
):
    with pytest.raises(ValueError, match=f"kind {kind}: nothing was sampled"):
        open_samples(store, target, cache=tmp_path)


def test_a_step_before_the_fork_is_the_parents(store: ObjectStore, run: SampledRun, tmp_path: Path):
    SampledRun(store, tmp_path / "tokenizer", run="f", parent=run.parent_ref()).write(1)
    with pytest.raises(ValueError, match=r"forked from 'r' after step 3.*See r@2"):
        open_samples(store, "f@2", cache=tmp_path)
    assert open_samples(store, "f@4", cache=tmp_path / "cache").rows.num_rows == 8


def test_a_step_that_is_not_there_is_an_error(store: ObjectStore, run: SampledRun, tmp_path: Path):
    with pytest.raises(NotFound, match="00000009"):
        open_samples(store, "r@9", cache=tmp_path)


def test_a_changed_shard_is_refused(store: ObjectStore, run: SampledRun, tmp_path: Path):
    commit, _ = read_commit(store, "r", 2)
    ref = next(ref for ref in commit.records if ref.stage == "reward-0001")
    key = read_record(store, ref).outputs["rewards"].key
    store.put(key, store.get(key)[:-1] + b"?")
    with pytest.raises(Corrupt, match=key):
        open_samples(store, "r@2", cache=tmp_path)
