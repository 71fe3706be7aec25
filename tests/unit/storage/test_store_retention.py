"""The rule of retention, worked out by hand."""

from storage.retention import Rule, kept_policies, kept_snapshots

RULE = Rule(policies_last=2, policies_every=10, snapshots_last=2, snapshots_every=20, pinned=[])


def test_policies_that_stay_are_the_first_the_last_and_every_tenth() -> None:
    kept = kept_policies(RULE, first=0, head=35, snapshots=[], forks={})
    assert sorted(kept) == [0, 10, 20, 30, 34, 35]
    assert kept[0] == ["the first", "every 10"]
    assert kept[34] == ["the last 2"]


def test_pinned_steps_and_the_starts_of_forks_keep_their_policies() -> None:
    rule = RULE.model_copy(update={"pinned": [7, 99]})
    kept = kept_policies(rule, first=0, head=12, snapshots=[4], forks={3: ["a", "b"]})
    assert sorted(kept) == [0, 3, 4, 7, 10, 11, 12]
    assert (kept[3], kept[4]) == (["forked as a, b"], ["their snapshot stays"])


def test_a_fork_counts_from_its_first_step() -> None:
    kept = kept_policies(RULE, first=13, head=31, snapshots=[], forks={})
    assert sorted(kept) == [13, 20, 30, 31]
    assert sorted(kept_policies(RULE, first=13, head=13, snapshots=[], forks={})) == [13]


def test_of_the_snapshots_within_twenty_steps_the_first_stays() -> None:
    snapshots = [0, 5, 17, 23, 39, 41, 44, 48, 49]
    kept = kept_snapshots(RULE, snapshots=snapshots, rebased=[], forks={})
    assert sorted(kept) == [0, 23, 41, 48, 49]
    assert (kept[0], kept[23]) == (["genesis", "every 20"], ["every 20"])
    assert kept[48] == ["the last 2"]


def test_forks_and_pinned_steps_keep_the_nearest_snapshot_before_them() -> None:
    rule = RULE.model_copy(update={"pinned": [16, 17]})
    kept = kept_snapshots(
        rule, snapshots=[0, 5, 10, 17, 18, 19], rebased=[], forks={9: ["a"], 3: ["b"]}
    )
    assert sorted(kept) == [0, 5, 10, 17, 18, 19]
    assert kept[5] == ["forked, or the nearest before"]


def test_a_snapshot_after_a_rebase_stays() -> None:
    kept = kept_snapshots(RULE, snapshots=[0, 5, 10, 30, 35, 36], rebased=[10], forks={})
    assert sorted(kept) == [0, 10, 30, 35, 36]


def test_a_snapshot_that_stays_goes_on_staying_while_the_run_goes_on() -> None:
    snapshots = [0, 3, 8, 21, 22, 40, 45, 46, 61, 80]
    before: set[int] = set()
    for count in range(1, len(snapshots) + 1):
        kept = set(kept_snapshots(RULE, snapshots=snapshots[:count], rebased=[], forks={}))
        assert before - kept <= set(snapshots[max(count - 3, 0) : count])
        before = kept


def test_a_run_without_any_snapshot_keeps_none() -> None:
    rule = RULE.model_copy(update={"pinned": [1]})
    assert kept_snapshots(rule, snapshots=[], rebased=[], forks={1: ["a"]}) == {}
