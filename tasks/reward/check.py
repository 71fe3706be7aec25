"""Tries a reward on a data set before a run: golds must have the maximum, junk must not."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, computed_field

from rewards import needs, scorer
from rewards.contract import RewardInput, Score
from rewards.gold import JUNK, asked_for, finds_answers, gold_completions
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.reward.grading import Grading
from tasks.reward.mixture import left_out

MAX_JUNK_ROWS = 200
"""Rows on which junk is tried; golds are tried on all."""
MAX_ASKED_ROWS = 8
"""Rows on which a part is tried that asks a service, which costs time or money."""
MAX_EXAMPLES = 5


class Row(BaseModel):
    """One row of the data set as a grader is shown it."""

    model_config = ConfigDict(frozen=True)

    row_id: str
    domain: str
    prompt: str
    answer: str | None
    extra: dict[str, object]

    def item(self, completion: str) -> RewardInput:
        """Returns the sample that has this completion."""
        return RewardInput(
            completion,
            answer=self.answer,
            sample_id=self.row_id,
            prompt=self.prompt,
            extra=self.extra,
            domain=self.domain,
        )


class Example(BaseModel):
    """One row that shows a problem: what was graded, and what came out."""

    row_id: str
    answer: str | None
    completion: str | None
    value: float | None
    reason: str | None


class Problem(BaseModel):
    """Rows of one part with one problem."""

    what: str
    num_rows: int
    examples: list[Example]


class PartCheck(BaseModel):
    """What became of one part: `best` is the value that counts as its maximum.

    `num_rows` are those of its domains.
    """

    name: str
    kind: str
    num_rows: int
    num_golds: int
    num_at_maximum: int
    best: float | None
    gold_mean: float | None
    junk_mean: float | None
    samples_per_s: float | None
    problems: list[Problem]
    notes: list[str]


class CheckReport(BaseModel):
    """What a reward makes of a data set; `usable` if there is no problem."""

    num_rows: int
    num_answers: int
    majority_answer: str | None
    majority_share: float | None
    parts: list[PartCheck]
    problems: list[Problem]
    """Of all parts together."""

    @computed_field
    @property
    def usable(self) -> bool:
        """Whether there is no problem."""
        return not self.problems and not any(part.problems for part in self.parts)


@dataclass(frozen=True)
class _Tried:
    """One completion of one row with its score."""

    row: Row
    completion: str | None
    score: Score


def check_rewards(config: RewardConfig, rows: Sequence[Row], *, grading: Grading) -> CheckReport:
    """Returns what the reward of a run makes of its data set's golds and of junk.

    Args:
        config: the reward.
        rows: of all data sets.
        grading: grades; told progress as it was made to.

    Raises:
        Transient: the grading processes do not start.
        ValueError: there is no row.
    """
    if not rows:
        raise ValueError("The data sets have no rows. Expected some to try the reward on.")
    answers = Counter(row.answer for row in rows if row.answer is not None)
    majority, count = answers.most_common(1)[0] if answers else (None, 0)
    nobodys = _problem("rows that no part of the reward is for", _left_out_by_all(config, rows))
    return CheckReport(
        num_rows=len(rows),
        num_answers=len(answers),
        majority_answer=majority,
        majority_share=count / answers.total() if answers else None,
        parts=[_check_part(config, part, rows, grading) for part in config.parts],
        problems=[nobodys] if nobodys else [],
    )


def _left_out_by_all(config: RewardConfig, rows: Sequence[Row]) -> list[_Tried]:
    return [
        _Tried(row, None, parts[0])
        for row in rows
        for parts in [[_left_out(config, part, row) for part in config.parts]]
        if parts[0] is not None and None not in parts
    ]


def _left_out(config: RewardConfig, part: RewardPart, row: Row) -> Score | None:
    """Returns that a row is of none of the part's domains; None: it is for the part, or unclear."""
    score = left_out(part, row.item(""), column=config.domain_column)
    return score if score is not None and score.status == "not_applicable" else None


def _check_part(
    config: RewardConfig, part: RewardPart, all_rows: Sequence[Row], grading: Grading
) -> PartCheck:
    rows = [row for row in all_rows if _left_out(config, part, row) is None]
    alone = config.model_copy(update={"parts": [part]})
    unreadable = _problem(
        "gold answers that the grader cannot read",
        [
            tried
            for tried in _graded([(row, "") for row in rows], alone, grading, about="check_gold")
            if tried.score.status in ("grader_error", "grader_timeout")
        ],
    )
    asked = rows[:MAX_ASKED_ROWS] if needs(part.kind) == "endpoint" else rows
    began = time.monotonic()
    right = _graded(_gold_samples(part, asked), alone, grading, about="golds")
    seconds = time.monotonic() - began
    golds = _best_of_each(right)
    junk = _graded(
        [(row, text) for row in asked[:MAX_JUNK_ROWS] for text in JUNK],
        alone,
        grading,
        about="junk",
    )
    best = _best(part, golds)
    return PartCheck(
        name=part.stored_name,
        kind=part.kind,
        num_rows=len(rows),
        num_golds=len(golds),
        num_at_maximum=sum(one.score.value == best for one in golds),
        best=best,
        gold_mean=_mean(golds),
        junk_mean=_mean(junk),
        samples_per_s=len(right) / seconds if right and seconds else None,
        problems=[
            problem
            for problem in (
                _no_rows(part) if not rows else None,
                unreadable,
                *_verdicts(part, golds, junk, best),
                _not_as_asked(part, golds, best, alone, grading),
            )
            if problem
        ],
        notes=_notes(golds, asked, rows),
    )


def _not_as_asked(
    part: RewardPart,
    golds: Sequence[_Tried],
    best: float | None,
    alone: RewardConfig,
    grading: Grading,
) -> Problem | None:
    """Returns rows whose prompt asks for answers in a form that the grader does not look for."""
    if best is None or not finds_answers(part.kind):
        return None
    right = [one.row for one in golds if one.score.value == best][:MAX_JUNK_ROWS]
    asked = [(row, asked_for(row.prompt, row.answer)) for row in right if row.answer is not None]
    written = [(row, completion) for row, completion in asked if completion is not None]
    tried = _graded(written, alone, grading, about="asked forms")
    return _problem(
        "right answers that are below the maximum in the form that their prompt asks for",
        [one for one in tried if one.score.value is None or one.score.value < best],
    )


def _no_rows(part: RewardPart) -> Problem:
    what = f"rows that it is for (domains {', '.join(part.domains)})"
    return Problem(what=what, num_rows=0, examples=[])


def _gold_samples(part: RewardPart, rows: Sequence[Row]) -> list[tuple[Row, str]]:
    return [
        (row, completion)
        for row in rows
        for completion in gold_completions(part.kind, part.options, row.answer, row.extra)
    ]


def _graded(
    samples: Sequence[tuple[Row, str]], config: RewardConfig, grading: Grading, *, about: str
) -> list[_Tried]:
    """Returns what became of samples; those on which the part has no say are left out."""
    items = [row.item(completion) for row, completion in samples]
    mode = "check_gold" if about == "check_gold" else "score"
    name = f"{config.parts[0].stored_name} {about}"
    scores = grading.grade(items, config=config, mode=mode, about=name)
    return [
        _Tried(row, None if mode == "check_gold" else completion, score)
        for (row, completion), (score,) in zip(samples, scores, strict=True)
        if score.status != "not_applicable"
    ]


def _best_of_each(tried: Sequence[_Tried]) -> list[_Tried]:
    """Returns each row's best completion: only one of the forms need be the one that counts."""
    best: dict[str, _Tried] = {}
    for one in tried:
        known = best.get(one.row.row_id)
        if known is None or _value(one) > _value(known):
            best[one.row.row_id] = one
    return list(best.values())


def _best(part: RewardPart, golds: Sequence[_Tried]) -> float | None:
    """Returns the maximum: what the grader's own examples have, or the best that was seen."""
    examples = [example.value for example in scorer(part.kind).GOLD]
    if examples and part.kind != "python":
        return max(examples)
    values = [one.score.value for one in golds if one.score.value is not None]
    return max(values, default=None)


def _verdicts(
    part: RewardPart, golds: Sequence[_Tried], junk: Sequence[_Tried], best: float | None
) -> list[Problem | None]:
    failed = [one for one in [*golds, *junk] if one.score.value is None]
    found = [_problem("completions that could not be graded", failed)]
    if best is None or needs(part.kind) == "endpoint":
        return found
    below = [one for one in golds if one.score.value is not None and one.score.value < best]
    reached = [one for one in junk if one.score.value is not None and one.score.value >= best]
    if golds:
        found.append(_problem("gold answers below the maximum", below))
        found.append(_problem("junk with the maximum", reached))
    return found


def _notes(golds: Sequence[_Tried], asked: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    notes: list[str] = []
    if not golds:
        notes.append("no right completion is known here: only failures were looked for")
    if len(asked) < len(rows):
        notes.append(f"asks a service: tried on {len(asked)} rows")
    return notes


def _problem(what: str, tried: Sequence[_Tried]) -> Problem | None:
    rows = {one.row.row_id: one for one in tried}
    if not rows:
        return None
    return Problem(
        what=what,
        num_rows=len(rows),
        examples=[
            Example(
                row_id=one.row.row_id,
                answer=one.row.answer,
                completion=one.completion,
                value=one.score.value,
                reason=one.score.reason,
            )
            for one in list(rows.values())[:MAX_EXAMPLES]
        ],
    )


def _value(one: _Tried) -> float:
    return one.score.value if one.score.value is not None else float("-inf")


def _mean(tried: Sequence[_Tried]) -> float | None:
    values = [one.score.value for one in tried if one.score.value is not None]
    return sum(values) / len(values) if values else None
