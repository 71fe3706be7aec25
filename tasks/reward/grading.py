"""The engine of the reward stage: asks every part of a sample where it is graded.

Scoring functions that need nothing run in worker processes, those that run code are lent a
sandbox, those that ask a service an endpoint. Each of the three has a limit of its own, and none
waits for another. Nothing here knows the store or what a reward means.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rewards import needs, scorer
from rewards.contract import EndpointScorer, Refused, RewardInput, SandboxScorer, Score
from storage.records import canonical_json
from tasks.errors import Permanent, Transient
from tasks.reward.attribution import failed, sound
from tasks.reward.contract import Mode, Progress, RewardConfig, RewardPart
from tasks.reward.endpoint import HttpEndpoint, open_endpoint
from tasks.reward.mixture import GATE_CLOSED, closed_gate, left_out
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
    batches: list[list[int]]
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

    def begin(self) -> None:
        """Takes the scores that are not known yet for those that will come."""
        self._open = sum(score is None for scores in self.scores for score in scores)
        self.done(0)

    def done(self, number: int) -> None:
        """Counts scores that came, and says how many samples they amount to."""
        with self._lock:
            self._done += number
            share = self._done / self._open if self._open else 1.0
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
        board.begin()
        if mode == "check_gold":
            self._ask_workers(items, config, board, list(range(len(config.parts))), mode)
            return _whole(board)
        outside = [i for i, part in enumerate(config.parts) if needs(part.kind) is not None]
        inside = [i for i, part in enumerate(config.parts) if needs(part.kind) is None]
        gates = [index for index in outside if config.parts[index].gate]
        others = [index for index in outside if index not in gates]
        gated = any(part.gate for part in config.parts)
        asked = [] if gated else self._ask_outside(items, config, board, outside)
        self._ask_workers(items, config, board, inside, mode)
        if gated:
            asked = self._ask_outside(items, config, board, gates)
            self._check_reached(asked, config, num_items=len(items))
            asked = self._ask_outside(items, config, board, others)
        self._check_reached(asked, config, num_items=len(items))
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
        with self._lock:
            self._closing.set()
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
        for wanted, rows in asked.items():
            some = config.model_copy(update={"parts": [config.parts[index] for index in wanted]})
            told = 0

            def tell(done: int, parts: int = len(wanted)) -> None:
                nonlocal told
                board.done((done - told) * parts)
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
        # All gates are looked at before anybody answers: what is asked hangs on no clock.
        open_rows = [_open_rows(config, board, index) for index in indices]
        asked: list[_Asked] = []
        for index, rows in zip(indices, open_rows, strict=True):
            part = config.parts[index]
            lane, ask, size = self._asker(part, config)
            batches = [rows[start : start + size] for start in range(0, len(rows), size)]
            try:
                answers = [
                    lane.threads.submit(
                        _fill, board, index, batch, [items[row] for row in batch], ask, part
                    )
                    for batch in batches
                ]
            except RuntimeError as error:
                raise self._ended(part) from error
            asked.append(_Asked(part, batches, answers))
        return asked

    def _check_reached(
        self, asked: Sequence[_Asked], config: RewardConfig, *, num_items: int
    ) -> None:
        """Waits for what was asked.

        Raises:
            Transient: a tool left more samples without an answer than a step may have, which a
                retry may find otherwise.
            Permanent: it refuses whoever asks, or this object was closed meanwhile.
        """
        for one in asked:
            try:
                causes = [answer.result() for answer in one.answers]
            except CancelledError as error:
                raise self._ended(one.part) from error
            away = [cause for cause in causes if cause is not None]
            lost = sum(
                len(batch) for batch, cause in zip(one.batches, causes, strict=True) if cause
            )
            nobody = len(away) == len(causes) and config.max_failed_share < 1
            if away and (nobody or lost > config.max_failed_share * num_items):
                share = "none" if nobody else f"all but {lost}"
                words = f"Reward {one.part.stored_name!r} graded {share} of its samples: {away[0]}"
                raise Permanent(words) if isinstance(away[0], PermissionError) else Transient(words)

    def _ended(self, part: RewardPart) -> Transient | Permanent:
        """Returns what to raise where a tool was closed while it was asked."""
        if self._closing.is_set():
            return Permanent("The graders were closed while samples were graded.")
        return Transient(
            f"What reward {part.stored_name!r} asks ended while samples were graded. The next call "
            "starts it again."
        )

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
            if self._closing.is_set():
                raise self._ended(part)
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
    """Takes the scores of some samples, or what they failed at.

    Returns:
        Why nobody answered, if it was for that.
    """
    unreached: OSError | None = None
    try:
        scores = list(ask(items))
        if len(scores) != len(items):
            raise ValueError(f"{len(items)} samples were asked for, {len(scores)} scores came")
        found = [
            sound(score, part=part.stored_name, item=item)
            for score, item in zip(scores, items, strict=True)
        ]
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, Refused):
            unreached = error
        found = [failed(error, part=part.stored_name, item=item) for item in items]
    for row, score in zip(rows, found, strict=True):
        board.scores[row][index] = score
    board.done(len(rows))
    return unreached


def _open_rows(config: RewardConfig, board: _Board, index: int) -> list[int]:
    """Returns the samples of which a part is asked; those before a closed gate have their score."""
    rows: list[int] = []
    for row, scores in enumerate(board.scores):
        if scores[index] is not None:
            continue
        gate = closed_gate(config, scores)
        if gate is None:
            rows.append(row)
        else:
            reason = GATE_CLOSED.format(gate.stored_name)
            scores[index] = Score(None, "not_applicable", reason)
            board.done(1)
    return rows


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
