"""From what was counted and found to a verdict on each promise."""

from collections.abc import Sequence

from flows.verify_replay import Replayed
from flows.verify_report import PromiseReport, count, megabytes
from flows.verify_shards import NOT_CHECKED
from storage.audit import ChainAudit
from storage.audit_findings import (
    CHAIN,
    CUT,
    EXACTLY_ONCE,
    NO_SILENT_ZERO,
    REPLAY,
    STALENESS,
    TOKENS,
    WEIGHT_PROOF,
    Tally,
)

NAMES = {
    EXACTLY_ONCE: "exactly once",
    CHAIN: "chain",
    REPLAY: "replay",
    WEIGHT_PROOF: "weight proof",
    NO_SILENT_ZERO: "no silent zero",
    TOKENS: "tokens, not text",
    STALENESS: "bounded staleness",
    CUT: "cut anywhere",
}

NEEDS_FACTS = "rows of shards are read with --level facts"


def promise_reports(
    chain: ChainAudit,
    facts: Tally | None,
    evals: Tally,
    replayed: Sequence[tuple[int, Replayed]] | None,
) -> list[PromiseReport]:
    """Returns the verdict on every promise, in order.

    Args:
        chain: what the chain audit found.
        facts: what was found in the rows of steps; None if nobody looked.
        evals: what was found in evaluations.
        replayed: stages that were run again, with their steps; None if nobody asked.
    """
    whole = Tally()
    for tally in (chain.tally, facts or Tally(), evals):
        whole.add(tally)
    held = {
        EXACTLY_ONCE: _exactly_once(chain.tally, facts),
        CHAIN: _chain(chain.tally),
        REPLAY: _replay(facts, replayed),
        WEIGHT_PROOF: _weight_proof(chain.tally),
        NO_SILENT_ZERO: _no_silent_zero(facts),
        TOKENS: _tokens(facts),
        STALENESS: _staleness(facts),
        CUT: _cut(facts),
    }
    left_out = facts.counts[NOT_CHECKED] if facts else 0
    if left_out:
        rest = f"; {count(left_out, 'step')} not checked, see below"
        for number in held.keys() - {CHAIN, WEIGHT_PROOF}:
            detail = f"{held[number].detail}{rest}"
            held[number] = held[number].model_copy(update={"detail": detail})
    return [_judged(held[number], whole) for number in NAMES]


def _judged(report: PromiseReport, whole: Tally) -> PromiseReport:
    """Returns the report, or what is broken instead."""
    findings = [found for found in whole.findings if found.promise == report.number]
    num_broken = whole.broken_by_promise[report.number]
    if not num_broken:
        return report
    first = findings[0].text if findings else report.detail
    more = f" (and {num_broken - 1} more)" if num_broken > 1 else ""
    changes = {
        "verdict": "broken",
        "detail": f"{first}{more}",
        "num_broken": num_broken,
        "broken": findings,
    }
    return report.model_copy(update=changes)


def _held(number: int, detail: str) -> PromiseReport:
    return PromiseReport(
        number=number, name=NAMES[number], verdict="held to the bit", detail=detail
    )


def _unchecked(number: int, detail: str) -> PromiseReport:
    return PromiseReport(number=number, name=NAMES[number], verdict="not checked", detail=detail)


def _within(number: int, detail: str, *, figure: float, tolerance: float) -> PromiseReport:
    return PromiseReport(
        number=number,
        name=NAMES[number],
        verdict="held within tolerance",
        detail=detail,
        figure=figure,
        tolerance=tolerance,
    )


def _exactly_once(chain: Tally, facts: Tally | None) -> PromiseReport:
    if facts is None:
        steps = count(chain.counts["steps"], "step")
        return _unchecked(EXACTLY_ONCE, f"cursors of {steps} join up; {NEEDS_FACTS}")
    groups = facts.counts["prompts drawn again"]
    if not groups:
        return _unchecked(EXACTLY_ONCE, "none of these steps drew a group")
    kept = facts.counts["samples kept"]
    dropped = _reasons(facts, "samples dropped ")
    skipped = facts.counts["groups skipped"]
    ends = [
        f"{count(kept, 'sample')} trained",
        *([f"dropped: {dropped}"] if dropped else []),
        *([f"{count(skipped, 'group')} skipped"] if skipped else []),
    ]
    return _held(
        EXACTLY_ONCE, f"{count(groups, 'group')} drawn, each once and in order: {', '.join(ends)}"
    )


def _reasons(tally: Tally, prefix: str) -> str:
    found = {name: number for name, number in tally.counts.items() if name.startswith(prefix)}
    return ", ".join(f"{number} {name[len(prefix) :]}" for name, number in sorted(found.items()))


def _chain(chain: Tally) -> PromiseReport:
    counts = chain.counts
    return _held(
        CHAIN,
        f"{count(counts['steps'], 'step')}, {count(counts['records'], 'record')} and "
        f"{count(counts['objects'] - counts['records'], 'other object')} are what their commits "
        f"seal ({megabytes(counts['bytes'])})",
    )


def _weight_proof(chain: Tally) -> PromiseReport:
    counts, maxima = chain.counts, chain.maxima
    exact, swap = counts["proof exact"], counts["proof swap-only"]
    if not exact + swap:
        return _unchecked(WEIGHT_PROOF, "nothing was sampled in these steps")
    kinds = [f"{exact} exact"] * bool(exact) + [f"{swap} swap-only"] * bool(swap)
    which = "proof" if "proof difference" in maxima else "proof mean"
    on_average = "" if which == "proof" else " on average"
    figure, tolerance = maxima[f"{which} difference"], maxima[f"{which} tolerance"]
    detail = (
        f"{count(exact + swap, 'shard')} sampled from proven weights ({', '.join(kinds)}): sampler "
        f"and learner differ by at most {figure:.2g}{on_average}, allowed {tolerance:.2g}"
    )
    return _within(WEIGHT_PROOF, detail, figure=figure, tolerance=tolerance)


def _no_silent_zero(facts: Tally | None) -> PromiseReport:
    if facts is None:
        return _unchecked(NO_SILENT_ZERO, NEEDS_FACTS)
    graded = facts.counts["rewards graded"]
    others = {
        name.removeprefix("rewards "): facts.counts[name]
        for name in ("rewards grader_error", "rewards grader_timeout", "rewards not_applicable")
        if facts.counts[name]
    }
    if not graded and not others:
        return _unchecked(NO_SILENT_ZERO, "nothing was graded in these steps")
    without = ", ".join(f"{number} {name}" for name, number in others.items())
    rest = f"; without: {without}, in neither baseline nor loss" if without else "; none without"
    return _held(NO_SILENT_ZERO, f"{count(graded, 'sample')} with a reward{rest}")


def _tokens(facts: Tally | None) -> PromiseReport:
    if facts is None:
        return _unchecked(TOKENS, NEEDS_FACTS)
    if not facts.counts["samples"]:
        return _unchecked(TOKENS, "nothing was sampled in these steps")
    return _held(
        TOKENS,
        f"{count(facts.counts['completion_token_ids'], 'token')} of "
        f"{count(facts.counts['samples'], 'sample')}: ids of the model, one mask and logprob each, "
        "stop tokens stored, sampling fields as planned",
    )


def _staleness(facts: Tally | None) -> PromiseReport:
    if facts is None:
        return _unchecked(STALENESS, NEEDS_FACTS)
    oldest = facts.maxima.get("staleness")
    if oldest is None:
        return _unchecked(STALENESS, "nothing was sampled in these steps")
    return _held(
        STALENESS,
        f"{count(facts.counts['samples'], 'sample')} at most {oldest:.0f} versions older than the "
        "policy that learnt from them (bound 0)",
    )


def _cut(facts: Tally | None) -> PromiseReport:
    if facts is None:
        return _unchecked(CUT, "update indices and rates are compared with --level facts")
    steps = facts.counts["schedules"]
    if not steps:
        return _unchecked(CUT, "nothing was trained in these steps")
    return _held(
        CUT,
        f"update index and learning rate of {count(steps, 'step')} follow from config and history",
    )


def _replay(facts: Tally | None, replayed: Sequence[tuple[int, Replayed]] | None) -> PromiseReport:
    if facts is None:
        return _unchecked(REPLAY, "prompts and rewards: --level facts; engines: --level replay")
    again = _recomputed(facts)
    if replayed is None:
        return _unchecked(REPLAY, f"{again}; rollouts and updates: --level replay")
    compared = [
        found for _, found in replayed if found.outcome in ("to the bit", "within tolerance")
    ]
    left = "".join(_left(replayed, outcome) for outcome in ("not comparable", "not checked"))
    if not compared:
        return _unchecked(REPLAY, f"{again}{left}")
    close = [found for found in compared if found.outcome == "within tolerance"]
    detail = f"{again}; {count(len(compared) - len(close), 'stage')} replayed to the bit"
    if not close:
        return _held(REPLAY, f"{detail}{left}")
    used = max(found.used or 0.0 for found in close)
    detail += f", {len(close)} within tolerance (at most {used:.1%} of what is allowed)"
    return _within(REPLAY, f"{detail}{left}", figure=used, tolerance=1.0)


def _left(replayed: Sequence[tuple[int, Replayed]], outcome: str) -> str:
    found = [one for _, one in replayed if one.outcome == outcome]
    return f"; {count(len(found), 'stage')} {outcome} ({found[0].detail})" if found else ""


def _recomputed(facts: Tally) -> str:
    another_way = facts.counts["rewards graded another way"]
    if another_way:
        return f"{count(another_way, 'reward')} graded another way, see below"
    left_out = facts.counts["rewards left out"]
    rest = f" ({left_out} left out)" if left_out else ""
    difference = facts.maxima.get("advantage difference") or 0.0
    advantages = f"{count(facts.counts['advantages'], 'advantage')}"
    close = f" within {difference:.1g}" if difference else ""
    return (
        f"{count(facts.counts['prompts drawn again'], 'prompt')}, "
        f"{count(facts.counts['rewards graded again'], 'reward')}{rest} and {advantages}{close} "
        "came out the same"
    )


def replay_findings(replayed: Sequence[tuple[int, Replayed]], tally: Tally) -> None:
    """Says of every stage that came out otherwise that replay is broken."""
    for step, found in replayed:
        if found.outcome == "differs":
            expected = f"{found.stage} of step {step} to come out as recorded"
            tally.broken(found.key, expected=expected, found=found.detail, promise=REPLAY)
