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
) -> dict[int, list[str]]:
    """Returns {step: reasons} of the snapshots that stay; every state can be replayed from one.

    A snapshot after a rebase stays, because a replay from before it gives other bits. Forks and
    pinned steps keep the nearest one before them, so that they start fast.

    Args:
        rule: the run's retention.
        snapshots: the steps that have a whole one, in order.
        rebased: those of them whose step was rebased.
        forks: where other runs began.
    """
    first_of = {step // rule.snapshots_every: step for step in reversed(snapshots)}
    return _by_step(
        {
            "genesis": [step for step in snapshots if step == 0],
            f"every {rule.snapshots_every}": first_of.values(),
            f"the last {rule.snapshots_last}": snapshots[-rule.snapshots_last :],
            "pinned, or the nearest before": _nearest(snapshots, rule.pinned),
            "forked, or the nearest before": _nearest(snapshots, forks),
            "after a rebase": rebased,
        }
    )


def kept_policies(
    rule: Rule, *, first: int, head: int, snapshots: Iterable[int], forks: Forks
) -> dict[int, list[str]]:
    """Returns {step: reasons} of the committed steps whose policy files stay.

    A snapshot that stays keeps its policy: a replay that is rebased is measured against it.

    Args:
        rule: the run's retention.
        first: the run's first step: genesis, or where a fork begins.
        head: its newest.
        snapshots: the steps whose snapshots stay.
        forks: where other runs began.
    """
    multiple = -(-first // rule.policies_every) * rule.policies_every
    return _by_step(
        {
            "the first": [first],
            f"every {rule.policies_every}": range(multiple, head + 1, rule.policies_every),
            f"the last {rule.policies_last}": range(
                max(first, head + 1 - rule.policies_last), head + 1
            ),
            "pinned": [step for step in rule.pinned if first <= step <= head],
            "their snapshot stays": snapshots,
            **{f"forked as {', '.join(runs)}": [step] for step, runs in forks.items()},
        }
    )


def _by_step(reasons: Mapping[str, Iterable[int]]) -> dict[int, list[str]]:
    kept: dict[int, list[str]] = {}
    for why, steps in reasons.items():
        for step in dict.fromkeys(steps):
            kept.setdefault(step, []).append(why)
    return kept


def _nearest(snapshots: Sequence[int], steps: Iterable[int]) -> list[int]:
    """Returns the last snapshot at or before each of `steps`, where there is one."""
    found = [bisect_right(snapshots, step) for step in steps]
    return [snapshots[after - 1] for after in found if after]
