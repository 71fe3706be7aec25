"""The engine of the reward stage: asks every part of a sample where it is graded.

Scoring functions that need nothing run in worker processes, those that run code are lent a
sandbox, those that ask a service an endpoint. Each of the three has a limit of its own, and none
waits for another. Nothing here knows the store or what a reward means.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rewards import needs, scorer
from rewards.contract import EndpointScorer, Refused, RewardInput, SandboxScorer, Score
from storage.records import canonical_json
from tasks.errors import Transient
from tasks.reward.contract import Mode, Progress, RewardConfig, RewardPart
from tasks.reward.endpoint import HttpEndpoint, open_endpoint
from tasks.reward.mixture import checked, closed_gate, left_out
from tasks.reward.pool import RewardPool
from tasks.reward.sandbox import open_sandbox
from tasks.workspace import Workspace


class _Tool(Protocol):
    """What a scoring function is lent."""

    def close(self) -> None:
        """Ends what it started, and every wait for it."""
        ...


@dataclass(frozen=True)
class _Lane:
    """One tool, perhaps still starting, and the threads that may use it at once."""

    tool: "Future[Any]"
    threads: ThreadPoolExecutor

    @property
    def is_dead(self) -> bool:
        """Whether the tool failed to start, or ended since."""
        if not self.tool.done():
            return False
        if self.tool.exception() is not None:
            return True
        death: Callable[[], str | None] | None = getattr(self.tool.result(), "death", None)
        return death is not None and death() is not None

    def close(self) -> None:
        """Ends the tool and the threads, what they wait for included."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self.tool.cancel() or self.tool.exception() is not None:
            return
        tool: _Tool = self.tool.result()
        tool.close()
        self.threads.shutdown(wait=True)


@dataclass(frozen=True)
class _Asked:
    """What a part's tool was asked; each answer is the cause if it was out of reach."""

    part: RewardPart
    answers: "list[Future[OSError | None]]"


class _Board:
    """The scores of one call as they come in, and who is told of it."""

    def __init__(
        self, num_items: int, num_parts: int, *, about: str, progress: Progress | None
    ) -> None:
        self.scores: list[list[Score | None]] = [[None] * num_parts for _ in range(num_items)]
        self._about = about
        self._progress = progress
        self._lock = threading.Lock()
        self._open = 0
        self._done = 0

    def expect(self, number: int) -> None:
        """Counts scores that are asked for."""
        with self._lock:
            self._open += number

    def done(self, number: int) -> None:
        """Counts scores that came, and says how many samples they amount to."""
        with self._lock:
            self._done += number
            share = self._done / max(self._open, 1)
            if self._progress is not None:
                self._progress(self._about, int(share * len(self.scores)), len(self.scores))


class Grading:
    """Grades samples with everything that it takes; use from any thread.

    Workers start in the background, served models when they are first asked. What was started ends
    with `close`, and with this process however it ends.
    """

    def __init__(
        self, config: RewardConfig, *, workspace: Workspace, progress: Progress | None = None
    ) -> None:
        """Starts workers and opens what `config` needs, apart from models to be served.

        Args:
            config: what will be graded with; a call may bring another, and what that needs more.
            workspace: logs go to its scratch, a judge's answers to its cache.
            progress: told while `grade` goes on, on whatever thread.

        Raises:
            ValueError: a user's code does not load, no sandbox is possible here, or an endpoint's
                settings are unusable.
        """
        self._workspace = workspace
        self._python = config.python
        self._progress = progress
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._lanes: dict[bytes, _Lane] = {}
        for part in config.parts:
            part.check_code()
        with ExitStack() as undo:
            undo.callback(self._close_lanes)
            self._starter = undo.enter_context(ThreadPoolExecutor(thread_name_prefix="reward-open"))
            for part in _outside(config):
                if not part.options.get("path"):
                    self._lane(part, config)
            kinds = [part.kind for part in config.parts if needs(part.kind) is None]
            self._pool = RewardPool(kinds, workers=config.workers, log_dir=workspace.scratch)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def serve_ahead(self, config: RewardConfig) -> None:
        """Starts the models that `config` has served here; the first call would do it too."""
        for part in _outside(config):
            self._lane(part, config)

    def grade(
        self,
        items: Sequence[RewardInput],
        *,
        config: RewardConfig,
        mode: Mode = "score",
        about: str = "",
    ) -> list[tuple[Score, ...]]:
        """Returns the scores of every item in order, one per part; see `RewardEngine`."""
        board = _Board(len(items), len(config.parts), about=about, progress=self._progress)
        for row, item in enumerate(items):
            for index, part in enumerate(config.parts):
                board.scores[row][index] = left_out(part, item, column=config.domain_column)
        if mode == "check_gold":
            self._ask_workers(items, config, board, list(range(len(config.parts))), mode)
            return _whole(board)
        outside = [i for i, part in enumerate(config.parts) if needs(part.kind) is not None]
        inside = [i for i, part in enumerate(config.parts) if needs(part.kind) is None]
        gated = any(config.parts[index].gate for index in inside)
        asked = [] if gated else self._ask_outside(items, config, board, outside)
        self._ask_workers(items, config, board, inside, mode)
        if gated:
            asked = self._ask_outside(items, config, board, outside)
        _check_reached(asked, config)
        return _whole(board)

    def describe(self, config: RewardConfig) -> dict[str, str]:
        """Returns what beside our own code decides the rewards, for the record's environment."""
        described: dict[str, str] = {}
        for part in config.parts:
            module = scorer(part.kind)
            of_module: Callable[[Any], dict[str, str]] | None = getattr(module, "describe", None)
            if of_module is not None:
                described |= of_module(module.Config(**part.options))
            if needs(part.kind) == "endpoint":
                tool: HttpEndpoint = self._lane(part, config).tool.result()
                described |= tool.describe()
        return described

    def close(self) -> None:
        """Ends all workers, programs and models; safe to call twice."""
        self._close_lanes()
        self._starter.shutdown(wait=True, cancel_futures=True)
        self._pool.close()

    def pids(self) -> list[int]:
        """Returns the process ids of the workers."""
        return self._pool.pids()

    def _close_lanes(self) -> None:
        self._closing.set()
        with self._lock:
            lanes = list(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.close()

    def _ask_workers(
        self,
        items: Sequence[RewardInput],
        config: RewardConfig,
        board: _Board,
        indices: list[int],
        mode: Mode,
    ) -> None:
        """Lets the workers grade; samples that are asked the same parts go together."""
        asked: dict[tuple[int, ...], list[int]] = {}
        for row in range(len(items)):
            wanted = tuple(index for index in indices if board.scores[row][index] is None)
            if wanted:
                asked.setdefault(wanted, []).append(row)
        board.expect(sum(len(rows) for rows in asked.values()))
        for wanted, rows in asked.items():
            some = config.model_copy(update={"parts": [config.parts[index] for index in wanted]})
            told = 0

            def tell(done: int) -> None:
                nonlocal told
                board.done(done - told)
                told = done

            graded = self._pool.grade(
                [items[row] for row in rows], config=some, mode=mode, progress=tell
            )
            for row, scores in zip(rows, graded, strict=True):
                for index, score in zip(wanted, scores, strict=True):
                    board.scores[row][index] = score

    def _ask_outside(
        self,
        items: Sequence[RewardInput],
        config: RewardConfig,
        board: _Board,
        indices: list[int],
    ) -> list["_Asked"]:
        """Hands out what needs a tool; returns what to wait for."""
        asked: list[_Asked] = []
        for index in indices:
            part = config.parts[index]
            rows: list[int] = []
            for row, scores in enumerate(board.scores):
                gate = closed_gate(config, scores)
                if scores[index] is None and gate is not None and gate != part:
                    reason = f"gate {gate.stored_name} is closed"
                    scores[index] = Score(None, "not_applicable", reason)
                elif scores[index] is None:
                    rows.append(row)
            lane, ask, size = self._asker(part, config)
            board.expect(len(rows))
            batches = [rows[start : start + size] for start in range(0, len(rows), size)]
            answers = [
                lane.threads.submit(
                    _fill, board, index, batch, [items[row] for row in batch], ask, part
                )
                for batch in batches
            ]
            asked.append(_Asked(part, answers))
        return asked

    def _asker(
        self, part: RewardPart, config: RewardConfig
    ) -> tuple[_Lane, "Callable[[Sequence[RewardInput]], Sequence[Score]]", int]:
        """Returns where a part is graded, how, and how many samples go together."""
        lane = self._lane(part, config)
        module: Any = scorer(part.kind)
        options = module.Config(**part.options)
        if needs(part.kind) == "endpoint":
            asks: EndpointScorer = module
            return (
                lane,
                lambda items: asks.score_batch(items, options, lane.tool.result()),
                asks.batch_items(options),
            )
        runs: SandboxScorer = module
        return (
            lane,
            lambda items: [runs.score(item, options, lane.tool.result()) for item in items],
            1,
        )

    def _lane(self, part: RewardPart, config: RewardConfig) -> _Lane:
        """Returns the lane that a part goes by, opened if it is the first to ask."""
        runs_code = needs(part.kind) == "sandbox"
        settings = config.sandbox.model_dump(mode="json") if runs_code else part.options
        key = canonical_json([None if runs_code else part.kind, settings])
        with self._lock:
            lane = self._lanes.get(key)
            if lane is None or lane.is_dead:
                if lane is not None:
                    lane.close()
                lane = self._lanes[key] = self._opened(part, config)
        return lane

    def _opened(self, part: RewardPart, config: RewardConfig) -> _Lane:
        if needs(part.kind) == "sandbox":
            sandbox = open_sandbox(config.sandbox, scratch=self._workspace.scratch)
            return _Lane(_done(sandbox), _threads("sandbox", config.sandbox.concurrency))
        module: Any = scorer(part.kind)
        options = module.Config(**part.options)

        def start() -> Any:
            return open_endpoint(
                options,
                serves=module.SERVES,
                python=self._python,
                workspace=self._workspace,
                given_up=self._closing,
            )

        # A model that is served here takes a while to start; an address is looked at at once.
        tool = self._starter.submit(start) if options.path else _done(start())
        return _Lane(tool, _threads(part.stored_name, options.concurrency))


def start(
    config: dict[str, Any],
    *,
    model_dir: Path,
    workspace: Workspace,
    progress: Progress | None = None,
) -> Grading:
    """Starts grading for a RewardConfig (as plain values) and returns at once.

    Args:
        config: the fields of a RewardConfig.
        model_dir: unused; the parameter keeps the door alike in every room.
        workspace: the workers' logs go to its scratch.
        progress: told while samples are graded.

    Raises:
        ValueError: no sandbox is possible here, or an endpoint's settings are unusable.
    """
    del model_dir
    settings = RewardConfig.model_validate(config)
    grading = Grading(settings, workspace=workspace, progress=progress)
    grading.serve_ahead(settings)
    return grading


def _fill(
    board: _Board,
    index: int,
    rows: Sequence[int],
    items: Sequence[RewardInput],
    ask: Callable[[Sequence[RewardInput]], Sequence[Score]],
    part: RewardPart,
) -> OSError | None:
    """Takes the scores of some samples; the one boundary at which errors become data.

    Returns:
        Why nobody answered, if it was for that.
    """
    unreached: OSError | None = None
    try:
        scores = list(ask(items))
        if len(scores) != len(items):
            raise ValueError(f"{len(items)} samples were asked for, {len(scores)} scores came")
        found = [checked(score) for score in scores]
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, Refused):
            unreached = error
        cause = f"{type(error).__name__}: {error}"
        found = [
            Score(
                None,
                "grader_error",
                f"reward {part.stored_name!r} failed on sample {item.sample_id!r}: {cause}",
            )
            for item in items
        ]
    for row, score in zip(rows, found, strict=True):
        board.scores[row][index] = score
    board.done(len(rows))
    return unreached


def _check_reached(asked: Sequence[_Asked], config: RewardConfig) -> None:
    """Waits for what was asked.

    Raises:
        Transient: a tool answered nobody, which a retry may find otherwise.
    """
    for one in asked:
        causes = [answer.result() for answer in one.answers]
        if causes and all(causes) and config.max_failed_share < 1:
            raise Transient(
                f"Reward {one.part.stored_name!r} graded none of its samples: {causes[0]}"
            )


def _outside(config: RewardConfig) -> list[RewardPart]:
    return [part for part in config.parts if needs(part.kind) is not None]


def _whole(board: _Board) -> list[tuple[Score, ...]]:
    rows: list[tuple[Score, ...]] = []
    for scores in board.scores:
        known = tuple(score for score in scores if score is not None)
        assert len(known) == len(scores), "every part of every sample was asked"
        rows.append(known)
    return rows


def _threads(name: str, limit: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=limit, thread_name_prefix=f"reward-{name}")


def _done(tool: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(tool)
    return future
