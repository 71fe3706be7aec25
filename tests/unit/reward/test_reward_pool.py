import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rewards.contract import RewardInput, Score
from tasks.errors import Permanent, Transient
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.reward.pool import RewardPool
from tests.unit.reward.conftest import MISBEHAVING

Configure = Callable[..., RewardConfig]


def items(*acts: str) -> list[RewardInput]:
    return [RewardInput(act, answer="ok", sample_id=f"s{i}") for i, act in enumerate(acts)]


@pytest.mark.parametrize("act", ["spin", "spin_in_c"])
def test_endless_computation_costs_only_its_sample(
    pool: RewardPool, misbehaving: Configure, act: str
) -> None:
    scores = pool.grade(items("a", "b", act, "c", "d", "e", "f", "g"), config=misbehaving())
    assert [score.value for (score,) in scores] == [1, 1, None, 1, 1, 1, 1, 1]
    assert scores[2][0] == Score(None, "grader_timeout", "took more than 1 CPU seconds")


def test_waiting_for_ever_runs_into_the_wall_backstop(
    pool: RewardPool, misbehaving: Configure
) -> None:
    pool.grade(items("warm", "warm"), config=misbehaving())
    begin = time.monotonic()
    scores = pool.grade(items("sleep", "a"), config=misbehaving(wall_limit_s=2.0))
    assert time.monotonic() - begin < 5.0
    assert scores[0][0] == Score(None, "grader_timeout", "took more than 2 s of wall time")
    assert scores[1][0].value == 1.0


def test_s33_a_limit_holds_for_a_call_from_a_worker_thread(
    pool: RewardPool, misbehaving: Configure
) -> None:
    pool.grade(items("warm", "warm"), config=misbehaving())
    with ThreadPoolExecutor(1) as threads:
        blocking = threads.submit(
            pool.grade, items("sleep", "a"), config=misbehaving(wall_limit_s=2.0)
        )
        scores = blocking.result(timeout=5.0)
    assert [score.status for (score,) in scores] == ["grader_timeout", "graded"]


def test_memory_bomb_costs_only_its_sample(pool: RewardPool, misbehaving: Configure) -> None:
    before = pool.pids()
    scores = pool.grade(items("bomb", "a", "b", "c"), config=misbehaving())
    assert scores[0][0] == Score(None, "grader_error", "out of memory in reward 'bad'")
    assert [score.value for (score,) in scores[1:]] == [1, 1, 1]
    scores = pool.grade(items(*["a"] * 8), config=misbehaving())
    assert [score.value for (score,) in scores] == [1] * 8
    assert len(set(before) & set(pool.pids())) == 1


def test_exception_names_reward_and_sample(pool: RewardPool, misbehaving: Configure) -> None:
    scores = pool.grade(items("a", "raise", "nan"), config=misbehaving())
    assert scores[0][0].value == 1.0
    assert scores[1][0] == Score(
        None,
        "grader_error",
        "reward 'bad' raised ZeroDivisionError on sample 's1': nothing to divide by",
    )
    assert scores[2][0].status == "grader_error"
    assert "finite value" in (scores[2][0].reason or "")


@pytest.mark.parametrize(("act", "ending"), [("segfault", "SIGSEGV"), ("exit", "exit status 3")])
def test_sample_that_kills_its_worker_twice_is_an_error(
    pool: RewardPool, misbehaving: Configure, act: str, ending: str
) -> None:
    scores = pool.grade(items("a", act, "b", "c"), config=misbehaving())
    assert [score.value for (score,) in scores] == [1, None, 1, 1]
    assert scores[1][0].status == "grader_error"
    assert scores[1][0].reason == f"the worker died ({ending}) in reward bad on sample 's1'"


def test_worker_killed_from_outside_costs_nothing(
    pool: RewardPool, misbehaving: Configure, tmp_path: Path
) -> None:
    config = misbehaving(once=str(tmp_path / "once"))
    scores = pool.grade(items("a", "die_once", "b", "c"), config=config)
    assert [score.value for (score,) in scores] == [1, 1, 1, 1]
    os.kill(pool.pids()[0], signal.SIGKILL)
    scores = pool.grade(items(*["a"] * 100), config=config)
    assert [score.value for (score,) in scores] == [1] * 100


def test_grader_that_prints_and_reads_disturbs_nothing(
    pool: RewardPool, misbehaving: Configure
) -> None:
    scores = pool.grade(items("print", "a", "print", "b"), config=misbehaving())
    assert [score.value for (score,) in scores] == [1, 1, 1, 1]


def test_results_come_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    config = RewardConfig(parts=[RewardPart(kind="exact"), RewardPart(kind="numeric")])
    inputs = [
        RewardInput(f"\\boxed{{{index}}}", answer=str(index if index % 3 else -1))
        for index in range(500)
    ]
    expected = [1.0 if index % 3 else 0.0 for index in range(500)]
    for workers in (1, 3):
        with RewardPool(["exact", "numeric"], workers=workers, log_dir=tmp_path) as opened:
            scores = opened.grade(inputs, config=config)
        assert [exact.value for exact, _ in scores] == expected
        assert [numeric.value for _, numeric in scores] == expected


def test_nothing_to_grade_gives_nothing(pool: RewardPool, misbehaving: Configure) -> None:
    assert pool.grade([], config=misbehaving()) == []


def test_calls_from_several_threads_keep_their_results(tmp_path: Path) -> None:
    config = RewardConfig(parts=[RewardPart(kind="exact", options={"whole": True})])
    results: dict[str, list[float | None]] = {}

    def call(word: str) -> None:
        inputs = [RewardInput(word, answer="x")] * 50
        results[word] = [score.value for (score,) in opened.grade(inputs, config=config)]

    with RewardPool(["exact"], workers=2, log_dir=tmp_path) as opened:
        threads = [threading.Thread(target=call, args=(word,)) for word in ("x", "y")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {"x": [1.0] * 50, "y": [0.0] * 50}


def test_alarm_of_the_caller_still_rings(pool: RewardPool, misbehaving: Configure) -> None:
    rung: list[int] = []
    former = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        pool.grade(items("a"), config=misbehaving())
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        assert rung or left > 0
        time.sleep(left)
        assert rung == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, former)


def test_no_credentials_reach_the_workers(
    misbehaving: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    with RewardPool(["exact"], workers=1, log_dir=tmp_path) as opened:
        assert "AWS_SECRET_ACCESS_KEY" not in psutil.Process(opened.pids()[0]).environ()


def test_workers_that_cannot_start_are_an_error_with_their_log(
    misbehaving: Configure, tmp_path: Path
) -> None:
    with (
        RewardPool(["no_such.reward"], workers=1, log_dir=tmp_path) as opened,
        pytest.raises(Transient, match="no_such"),
    ):
        opened.grade(items("a"), config=misbehaving())


def test_nothing_is_left_after_closing(
    pool: RewardPool, misbehaving: Configure, tmp_path: Path
) -> None:
    note = tmp_path / "child"
    config = misbehaving(wall_limit_s=1.0)
    pool.grade(items(f"leave_child {note}"), config=config)
    pids = [*pool.pids(), int(note.read_text())]
    pool.close()
    pool.close()
    assert _all_gone(pids)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """One waits, one is idle and one computes in C: that one ends by its limit at the latest."""
    code = f"""
import sys
from pathlib import Path
from rewards.contract import RewardInput
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.reward.pool import RewardPool
part = RewardPart(kind="grader_fixtures.misbehaving")
config = RewardConfig(parts=[part], cpu_limit_s=2.0)
pool = RewardPool([part.kind], workers=3, log_dir=Path({str(tmp_path)!r}))
print(*pool.pids(), flush=True)
pool.grade([RewardInput("pid {tmp_path}/note"), RewardInput("spin_in_c")], config=config)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    _wait_for(lambda: (tmp_path / "note").exists())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(pids) == 3
    assert _all_gone(pids)


def test_samples_behind_a_slow_one_are_graded_by_others(
    misbehaving: Configure, tmp_path: Path
) -> None:
    finished: list[tuple[float, int]] = []
    with RewardPool([MISBEHAVING], workers=2, log_dir=tmp_path) as opened:
        opened.grade(items("a", "b"), config=misbehaving())
        begin = time.monotonic()
        scores = opened.grade(
            items("sleep", *["a"] * 100),
            config=misbehaving(wall_limit_s=10.0),
            progress=lambda number: finished.append((time.monotonic() - begin, number)),
        )
    assert [score.value for (score,) in scores] == [None, *[1.0] * 100]
    assert finished[-1][1] == 101
    assert next(seconds for seconds, number in finished if number == 100) < 5.0


def test_large_samples_behind_one_that_computes_in_c_hold_nobody_up(
    misbehaving: Configure, tmp_path: Path
) -> None:
    """They fill the worker's pipe, which it does not read meanwhile."""
    large = [RewardInput("a " + "x" * 100_000)] * 40
    finished: list[int] = []
    with RewardPool([MISBEHAVING], workers=2, log_dir=tmp_path) as opened:
        opened.grade(items("a", "b"), config=misbehaving())
        scores = opened.grade(
            [*items("spin_in_c"), *large],
            config=misbehaving(cpu_limit_s=3.0),
            progress=finished.append,
        )
    assert [score.value for (score,) in scores] == [None, *[1.0] * 40]
    assert 40 in finished


def test_progress_ends_with_all_and_is_told_seldom(
    pool: RewardPool, misbehaving: Configure
) -> None:
    told: list[int] = []
    pool.grade(items(*["a"] * 2000), config=misbehaving(), progress=told.append)
    assert told[-1] == 2000
    assert told == sorted(told)
    assert len(told) < 100


def test_workers_are_replaced_after_their_share(misbehaving: Configure, tmp_path: Path) -> None:
    config = misbehaving(recycle_after=50)
    with RewardPool([MISBEHAVING], workers=2, log_dir=tmp_path) as opened:
        before = opened.pids()
        scores = opened.grade(items(*["a"] * 400), config=config)
        after = opened.pids()
    assert [score.value for (score,) in scores] == [1.0] * 400
    assert not set(before) & set(after)
    assert _all_gone(before)


def test_a_stopped_worker_is_not_a_timeout(
    pool: RewardPool, misbehaving: Configure, tmp_path: Path
) -> None:
    """A machine too busy to run it looks the same: it neither computes nor waits."""
    note = tmp_path / "pid"

    def wake() -> None:
        _wait_for(note.exists)
        time.sleep(2.5)
        os.kill(int(note.read_text()), signal.SIGCONT)

    with ThreadPoolExecutor(1) as threads:
        waking = threads.submit(wake)
        scores = pool.grade(items(f"stop {note}"), config=misbehaving(wall_limit_s=1.0))
        waking.result()
    assert scores[0][0].value == 1.0


def test_what_a_sample_changes_of_its_process_reaches_no_other(
    misbehaving: Configure, tmp_path: Path
) -> None:
    with RewardPool([MISBEHAVING], workers=1, log_dir=tmp_path) as opened:
        acts = items("draw", "draw", "change", "look", "draw", "spin", "look")
        scores = [score for (score,) in opened.grade(acts, config=misbehaving())]
    assert scores[0].value == scores[1].value == scores[4].value
    assert scores[3].value == 1.0
    assert scores[5].status == "grader_timeout"
    assert scores[6].value == 1.0


@pytest.mark.parametrize("act", ["ignore_limit", "fork {note}"])
def test_limit_holds_for_who_resists_it(
    pool: RewardPool, misbehaving: Configure, tmp_path: Path, act: str
) -> None:
    note = tmp_path / "note"
    scores = pool.grade(items(act.format(note=note), "a"), config=misbehaving())
    assert scores[0][0] == Score(None, "grader_timeout", "took more than 1 CPU seconds")
    assert scores[1][0].value == 1.0
    if note.exists():
        assert _all_gone([int(note.read_text())])


def test_closed_descriptors_cost_only_their_sample(
    pool: RewardPool, misbehaving: Configure
) -> None:
    scores = pool.grade(items("a", "close", "b"), config=misbehaving())
    assert [score.value for (score,) in scores] == [1, None, 1]
    assert "the worker died" in (scores[1][0].reason or "")


def test_grading_goes_on_when_the_process_that_forks_is_killed(
    misbehaving: Configure, tmp_path: Path
) -> None:
    with RewardPool([MISBEHAVING], workers=2, log_dir=tmp_path) as opened:
        former = opened.pids()
        os.kill(psutil.Process(former[0]).ppid(), signal.SIGKILL)
        scores = opened.grade(items(*["a"] * 100), config=misbehaving())
        assert [score.value for (score,) in scores] == [1.0] * 100
        scores = opened.grade(items("a", "spin", "b"), config=misbehaving())
        assert [score.value for (score,) in scores] == [1.0, None, 1.0]
        assert not set(former) & set(opened.pids())
    assert _all_gone(former)


@pytest.mark.parametrize("cpu_limit_s", [0.5, 1.5, 2.0])
def test_a_limit_of_fractions_changes_no_verdict(tmp_path: Path, cpu_limit_s: float) -> None:
    config = RewardConfig(parts=[RewardPart(kind="math")], cpu_limit_s=cpu_limit_s)
    with RewardPool(["math"], workers=1, log_dir=tmp_path) as opened:
        scores = opened.grade([RewardInput("\\boxed{5}", answer="5")], config=config)
    assert scores == [(Score(1.0),)]


def test_an_error_in_one_sample_shifts_no_other(pool: RewardPool, misbehaving: Configure) -> None:
    scores = pool.grade(items("a", "raise", "draw"), config=misbehaving())
    assert len(scores) == 3
    assert [len(parts) for parts in scores] == [1, 1, 1]
    assert scores[0][0].value == 1.0
    assert scores[1][0].status == "grader_error"
    assert (scores[2][0].value or 0.0) < 1.0


def test_closing_at_once_leaves_nothing(tmp_path: Path) -> None:
    others = set(psutil.Process().children(recursive=True))
    opened = RewardPool(["math"], workers=2, log_dir=tmp_path)
    opened.close()
    left = set(psutil.Process().children(recursive=True)) - others
    assert _all_gone([child.pid for child in left])


def _all_gone(pids: list[int]) -> bool:
    _wait_for(lambda: not any(_alive(pid) for pid in pids))
    return True


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_closing_ends_a_call_that_goes_on(pool: RewardPool, misbehaving: Configure) -> None:
    begun, ended = threading.Event(), list[BaseException]()

    def grade() -> None:
        config = misbehaving(wall_limit_s=600.0)
        try:
            pool.grade(items("sleep"), config=config, progress=lambda done: begun.set())
        except Permanent as error:
            ended.append(error)

    waiting = threading.Thread(target=grade)
    waiting.start()
    assert begun.wait(60)
    pool.close()
    waiting.join(60)
    assert not waiting.is_alive()
    assert "closed while samples were graded" in str(ended[0])
