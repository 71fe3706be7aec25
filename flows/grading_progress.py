"""How far the grading of a step is, over all its shards, for whoever watches."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flows.posting import LiveArtifact, Poster, artifact_key


@dataclass
class GradingProgress:
    """Adds up what shards say; every one of `watchers` is told samples graded and samples asked.

    Shards are graded at once and on any thread, and the next step begins with other ones: what is
    said of another scope starts the count again.
    """

    watchers: Sequence[Callable[[int, int], None]]
    _scope: str = ""
    _shards: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, about: str, done: int, total: int) -> None:
        """Takes what one shard says: `about` is its scope and its stage."""
        scope, _, shard = about.rpartition(" ")
        with self._lock:
            if scope != self._scope:
                self._scope = scope
                self._shards.clear()
            self._shards[shard] = (done, total)
            counts = list(self._shards.values())
            for watcher in self.watchers:
                watcher(sum(done for done, _ in counts), sum(total for _, total in counts))


def grading_artifact(run: str, flow_run_id: str | None) -> LiveArtifact:
    """Returns the progress artifact that shows how many samples of a step have their reward."""
    key = artifact_key(run, "grading")
    return LiveArtifact(key, "progress", "Samples graded in this step", flow_run_id)


def percent(done: int, total: int) -> float:
    """Returns what a progress artifact shows."""
    return 100.0 * done / max(total, 1)


@contextmanager
def showing_grading(run: str, flow_run_id: str | None) -> Iterator[Callable[[int, int], None]]:
    """Yields what takes the progress of a stage's own flow run, and shows it there."""
    artifact = grading_artifact(run, flow_run_id)
    with Poster(f"the grading of run {run}", artifact.flush) as poster:
        yield lambda done, total: artifact.show(lambda: percent(done, total))
        poster.put(lambda client: artifact.flush(client, now=True))
