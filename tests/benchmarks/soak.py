"""Exactly once under anything: `python tests/benchmarks/soak.py --steps 20 --kills 50`.

Makes a run of `addition` without interruption, then the same run while controller, rollout
process, both trainer ranks and the S3 server are ended by SIGKILL at seeded random moments, and
compares. All services are its own. Prints tables; the last line is JSON; exit 1 if a promise broke.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from storage.opening import open_store
from tests.benchmarks.soak_checks import exactly_once, leftovers, policy_digests
from tests.benchmarks.soak_world import (
    STAGES,
    Controller,
    Progress,
    Services,
    environment,
    running_services,
    share_cache,
)

VICTIMS = ("controller", "rollout", "rank 0", "rank 1", "S3 server")
MOMENTS = ("any", *STAGES)
"""What a kill waits for: the first sight of that object of a step, or only time."""
AFTER_S = 1.5
"""A kill comes up to so long after what it waited for."""
ANY_S = (1.0, 25.0)
"""Or, with nothing to wait for, so long after the kill before it: an engine's start takes 8 s."""
OUTAGE_S = (0.5, 6.0)
"""How long the S3 server stays down, its start not counted."""
POLL_S = 0.05
NUM_FUTILE = 8
"""So many resumes in a row that end without a commit, with nobody killed, are given up."""
OVERRIDES = {
    "evaluate.suites.held_out.max_prompts": "64",
    "train.snapshot_every": "5",
    "train.ranks": "2",
}


@dataclass(frozen=True)
class Kill:
    """One that is planned: whom, in which step, and what it waits for."""

    victim: str
    step: int
    moment: str
    after_s: float


@dataclass
class Struck:
    """One that happened."""

    victim: str
    step: int
    stage: str
    """The last thing of that step that the store held."""
    at: float
    moved_on: float | None = None
    """When the run wrote its next plan, record or commit, or the next kill came."""


def plan_kills(num_kills: int, *, steps: int, chance: random.Random) -> list[Kill]:
    """Returns kills in order, spread over the steps, each victim and moment equally often."""
    victims, moments = (_deck(names, num_kills, chance) for names in (VICTIMS, MOMENTS))
    return [
        Kill(victim, index * steps // num_kills, moment, chance.random())
        for index, (victim, moment) in enumerate(zip(victims, moments, strict=True))
    ]


def _deck(names: Sequence[str], size: int, chance: random.Random) -> list[str]:
    """Returns `size` names, shuffled within every round of them: equally often, at any time."""
    rounds = [chance.sample(names, len(names)) for _ in range(-(-size // len(names)))]
    return [name for cards in rounds for name in cards][:size]


class Soak:
    """Ends processes as planned while it keeps the run going."""

    def __init__(
        self,
        controller: Controller,
        services: Services,
        *,
        progress: Progress,
        chance: random.Random,
    ) -> None:
        self._controller = controller
        self._services = services
        self._progress = progress
        self._chance = chance
        self._futile = 0
        self.struck: list[Struck] = []
        self.done = False

    def run(self, kills: Sequence[Kill]) -> None:
        """Starts the run, carries out `kills` in order, and lets it come to its end."""
        self._controller.start(exists=False)
        self._until(lambda _: self._progress.exists() is True)
        for kill in kills:
            self._await_moment(kill)
            if self.done:
                return
            self._strike(kill.victim)
        self._until(lambda _: False)

    def _await_moment(self, kill: Kill) -> None:
        # A step that was waited for may be gone by already: then time alone decides.
        late = self._progress.step > kill.step
        if kill.moment == "any" or late:
            low, high = ANY_S
            self._sleep(low + (high - low) * kill.after_s)
            return
        self._until(
            lambda new: (
                (self._progress.step >= kill.step and kill.moment in new)
                or self._progress.step > kill.step + 1
            )
        )
        self._sleep(AFTER_S * kill.after_s)

    def _strike(self, victim: str) -> None:
        if victim == "S3 server":
            self._note(victim)
            self._services.kill_s3()
            low, high = OUTAGE_S
            self._sleep(self._chance.uniform(low, high))
            up = self._services.command("up")
            self._until(lambda _: up.poll() is not None)
            output, _ = up.communicate()
            if up.returncode:
                raise SystemExit(f"The services did not come back:\n{output}")
            return
        self._until(lambda _: self._controller.strike(victim))
        if not self.done:
            self._note(victim)

    def _note(self, victim: str) -> None:
        self._settle()
        progress = self._progress
        self.struck.append(Struck(victim, progress.step, progress.stage, time.monotonic()))
        self._futile = 0
        print(
            f"{len(self.struck):4} {victim:12} step {progress.step:3} after {progress.stage}",
            flush=True,
        )

    def _settle(self) -> None:
        """Books for the last kill that the run moved on now, unless it did before."""
        if self.struck and self.struck[-1].moved_on is None:
            self.struck[-1].moved_on = time.monotonic()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._until(lambda _: time.monotonic() >= deadline)

    def _until(self, holds: Callable[[set[str]], bool]) -> None:
        """Keeps the run going until `holds(what is new)`, or until it is complete."""
        while not self.done:
            new = self._progress.look()
            if new:
                self._settle()
            if holds(new):
                return
            self._tend("commit" in new)
            time.sleep(POLL_S)
        self._settle()

    def _tend(self, committed: bool) -> None:
        if committed:
            self._futile = 0
        code = self._controller.ended()
        if code is None:
            return
        if code == 0:
            self.done = True
            return
        self._futile += code > 0
        if self._futile > NUM_FUTILE:
            raise SystemExit(
                f"{NUM_FUTILE} resumes in a row made no step. The last one said:\n"
                f"{self._controller.own_exits[-1]}\nLog: {self._controller.log}"
            )
        time.sleep(1.0)
        exists = self._progress.exists()
        # While the store is down a person would resume, too: the run was there a moment ago.
        self._controller.start(exists=exists is not False)


@contextmanager
def no_survivors(controller: Controller) -> Iterator[None]:
    """Ends all of a run's processes if the block is cut short."""
    try:
        yield
    except BaseException:
        for process in controller.processes():
            process.kill()
        raise


def straight_run(controller: Controller) -> float:
    """Makes the run without interruption; returns its seconds."""
    began = time.monotonic()
    controller.start(exists=False)
    assert controller.process is not None
    if controller.process.wait():
        raise SystemExit(f"The uninterrupted run failed; see {controller.log}")
    return time.monotonic() - began


def main() -> None:
    """Runs the soak and prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--home", type=Path, help="kept afterwards; default: a temporary one")
    asked = parser.parse_args()
    root = (asked.home or Path(tempfile.mkdtemp(prefix="soak-"))).resolve()
    for part in ("tmp", "straight", "killed"):
        (root / part).mkdir(parents=True, exist_ok=True)
    # Ends as after Ctrl-C: with all that was started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with running_services(root) as services:
        held = soak(services, root, asked)
    if held and not asked.home:
        shutil.rmtree(root)
    else:
        print(f"kept: {root}", file=sys.stderr)
    sys.exit(0 if held else 1)


def soak(services: Services, root: Path, asked: argparse.Namespace) -> bool:
    """Makes both runs, prints what came of them, and returns whether every promise held."""
    os.environ.update(services.variables())
    straight, killed = (
        Controller(
            run=name,
            steps=asked.steps,
            home=root / name,
            log=root / f"{name}.log",
            environment=environment(root, root / name) | services.variables(),
            overrides=OVERRIDES,
        )
        for name in ("straight", "killed")
    )
    for controller in (straight, killed):
        share_cache(controller.home)
    with no_survivors(straight):
        straight_s = straight_run(straight)
    print(f"the uninterrupted run took {straight_s:.0f} s", flush=True)
    chance = random.Random(asked.seed)
    store = open_store(services.store(), writing=False)
    work = Soak(killed, services, progress=Progress(store, "killed"), chance=chance)
    kills = plan_kills(asked.kills, steps=asked.steps, chance=chance)
    began = time.monotonic()
    with no_survivors(killed):
        work.run(kills)
    killed_s = time.monotonic() - began
    ours, theirs = (policy_digests(store, name) for name in ("killed", "straight"))
    counts = exactly_once(store, "killed")
    left = leftovers(killed, root=root)
    line = {
        "benchmark": "soak",
        "steps": asked.steps,
        "kills": len(work.struck),
        "seed": asked.seed,
        "controller_starts": killed.starts,
        "controller_own_exits": len(killed.own_exits),
        "straight_s": round(straight_s, 1),
        "killed_s": round(killed_s, 1),
        "equal_digests": ours == theirs,
        "final_digest": ours[-1],
        "exactly_once": counts,
        "leftovers": left,
        "victims": by_victim(work.struck),
    }
    report(line, work.struck, killed)
    print(json.dumps(line))
    broken = sum(counts.values()) - counts["planned"]
    return ours == theirs and counts["planned"] > 0 and not broken and not left


def by_victim(struck: Sequence[Struck]) -> dict[str, dict[str, float]]:
    """Returns per victim how often it was killed and how long the run then stood still."""
    found: dict[str, dict[str, float]] = {}
    for victim in VICTIMS:
        lost = [(each.moved_on or each.at) - each.at for each in struck if each.victim == victim]
        found[victim] = {
            "kills": len(lost),
            "median_s": round(statistics.median(lost), 1) if lost else 0.0,
            "lost_s": round(sum(lost), 1),
        }
    return found


def report(line: dict, struck: Sequence[Struck], killed: Controller) -> None:
    """Prints the tables: by victim, and where in a step the kills fell."""
    print(f"{'victim':12}{'kills':>7}{'median s':>10}{'lost s':>8}   killed after")
    for victim, row in line["victims"].items():
        stages = Counter(each.stage for each in struck if each.victim == victim)
        where = ", ".join(
            f"{stage} {stages[stage]}" for stage in ("begin", *STAGES) if stages[stage]
        )
        print(f"{victim:12}{row['kills']:7}{row['median_s']:10.1f}{row['lost_s']:8.1f}   {where}")
    print(
        f"controller started {killed.starts} times; it ended by itself {len(killed.own_exits)} "
        f"times; {line['killed_s']:.0f} s instead of {line['straight_s']:.0f} s"
    )
    for words, count in Counter(_cut(text) for text in killed.own_exits).most_common():
        print(f"  {count} x {words}")
    print(f"policy digests equal: {line['equal_digests']}; exactly once: {line['exactly_once']}")
    print(f"left behind: {line['leftovers'] or 'nothing'}")


def _cut(text: str) -> str:
    return text if len(text) <= 150 else f"{text[:150]}..."


if __name__ == "__main__":
    main()
