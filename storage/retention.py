"""Which policies and snapshots are kept: arithmetic on step numbers, nothing of the store.

Everything else that a commit names is kept for ever (DESIGN.md section 3).
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence

from storage.records import Record

Forks = Mapping[int, Sequence[str]]
"""{step: the runs that were forked from it}."""


class Rule(Record):
    """How much is kept.

    `every` K keeps the first of each K steps: policies at multiples of K; snapshots, which not
    every step has, where the first one comes at or after a multiple.
    """

    policies_last: int
    policies_every: int
    snapshots_last: int
    snapshots_every: int
    pinned: list[int]


def kept_snapshots(
    rule: Rule, *, snapshots: Sequence[int], rebased: Collection[int], forks: Forks
) -> dict[int, str]:
    """Returns {step: why} of the snapshots that stay; every state can be replayed from one.

    A snapshot after a rebase stays, because a replay from before it gives other bits. Forks and
    pinned steps keep the nearest one before them, so that they start fast.

    Args:
        rule: the run's retention.
        snapshots: the steps that have a whole one, in order.
        rebased: those of them whose step was rebased.
        forks: where other runs began.
    """
    first_of = {step // rule.snapshots_every: step for step in reversed(snapshots)}
    kept = dict.fromkeys(first_of.values(), f"every {rule.snapshots_every}")
    kept |= dict.fromkeys(snapshots[-rule.snapshots_last :], f"the last {rule.snapshots_last}")
    kept |= dict.fromkeys(_nearest(snapshots, rule.pinned), "the nearest before a pinned step")
    kept |= dict.fromkeys(_nearest(snapshots, forks), "the nearest before a fork")
    kept |= dict.fromkeys(rebased, "follows a rebase")
    return kept | dict.fromkeys([step for step in snapshots if step == 0], "genesis")


def kept_policies(
    rule: Rule, *, first: int, head: int, snapshots: Iterable[int], forks: Forks
) -> dict[int, str]:
    """Returns {step: why} of the committed steps whose policy files stay.

    A snapshot that stays keeps its policy: a replay that is rebased is measured against it.

    Args:
        rule: the run's retention.
        first: the run's first step: genesis, or where a fork begins.
        head: its newest.
        snapshots: the steps whose snapshots stay.
        forks: where other runs began.
    """
    multiple = -(-first // rule.policies_every) * rule.policies_every
    multiples = range(multiple, head + 1, rule.policies_every)
    last = range(max(first, head + 1 - rule.policies_last), head + 1)
    kept = dict.fromkeys(snapshots, "its snapshot is kept")
    kept |= dict.fromkeys(multiples, f"every {rule.policies_every}")
    kept |= dict.fromkeys(last, f"the last {rule.policies_last}")
    kept |= dict.fromkeys([step for step in rule.pinned if first <= step <= head], "pinned")
    kept |= {step: f"forked as {', '.join(runs)}" for step, runs in forks.items()}
    return kept | {first: "the first"}


def _nearest(snapshots: Sequence[int], steps: Iterable[int]) -> list[int]:
    """Returns the last snapshot at or before each of `steps`, where there is one."""
    found = [bisect_right(snapshots, step) for step in steps]
    return [snapshots[after - 1] for after in found if after]
