"""Answers that look like mathematics but are compared as they are written.

Clock times, dates, ratios, and numbers in another base.
"""

import re
from fractions import Fraction

from rewards.notation import plain_words
from rewards.quantity import parse_quantity

_CLOCK = re.compile(
    r"(?P<hour>\d{1,2}) ?: ?(?P<minute>[0-5]\d)(?: ?: ?(?P<second>[0-5]\d))?"
    r"\s*(?P<half>[ap]\.?\s?m\b\.?)?(?:\s*(?:o'clock|hours?|hrs?))?",
    re.IGNORECASE,
)
_DATE = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})|(\d{1,2})/(\d{1,2})/(\d{2,4})")
_RATIO = re.compile(r"[^:]{1,60}(?::[^:]{1,60}){1,9}")
_RATIO_WORD = re.compile(r"(?<=\d)\s+to\s+(?=\d)")
_BASE = re.compile(r"(?P<digits>[0-9A-Za-z]{1,200}) ?_ ?\{? ?(?P<base>\d{1,2}|[a-z]+) ?\}?")
_BASE_WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
               "nine": 9, "ten": 10, "twelve": 12, "sixteen": 16}  # fmt: skip


def compare_written(gold: str, answer: str) -> bool | None:
    """Returns whether both say the same, or None if neither is written in one of these ways."""
    gold, answer = plain_words(gold), plain_words(answer)
    for compare in (_compare_clocks, _compare_dates, _compare_bases, _compare_ratios):
        verdict = compare(gold, answer)
        if verdict is not None:
            return verdict
    return None


def is_written(text: str) -> bool:
    """Returns whether `text` is one of these."""
    text = plain_words(text)
    clock_or_date = _CLOCK.fullmatch(text) or _DATE.fullmatch(text)
    return bool(clock_or_date or _based(text) or _ratio(text))


def _compare_clocks(gold: str, answer: str) -> bool | None:
    gold_clock, answer_clock = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(answer)
    if gold_clock is None or answer_clock is None:
        # A time is no number; but what looks like a time may be a ratio: 3:10 is 3/10.
        marked = (gold_clock and gold_clock["half"]) or (answer_clock and answer_clock["half"])
        return False if marked or re.search(r":\s*00$", gold + "\n" + answer, re.M) else None
    return any(
        _minutes(gold_clock, gold_half) == _minutes(answer_clock, answer_half)
        for gold_half in _halves(gold_clock, answer_clock)
        for answer_half in _halves(answer_clock, gold_clock)
    )


def _halves(clock: re.Match[str], other: re.Match[str]) -> list[str]:
    """Returns `a` or `p`, or nothing for 24 hours; where only the other one says it, either."""
    if clock["half"]:
        return [clock["half"][0].casefold()]
    return ["", other["half"][0].casefold()] if other["half"] else [""]


def _minutes(clock: re.Match[str], half: str) -> tuple[int, int, int]:
    hour = int(clock["hour"])
    if half and hour <= 12:
        hour = hour % 12 + (12 if half == "p" else 0)
    return hour, int(clock["minute"]), int(clock["second"] or 0)


def _compare_dates(gold: str, answer: str) -> bool | None:
    dates = _DATE.fullmatch(gold), _DATE.fullmatch(answer)
    if dates == (None, None):
        return None
    fields = [[int(part) for part in date.groups() if part] if date else [] for date in dates]
    is_iso = [bool(date and date[1]) for date in dates]
    return fields[0] == fields[1] and is_iso[0] == is_iso[1]


def _compare_bases(gold: str, answer: str) -> bool | None:
    gold_number, answer_number = _based(gold), _based(answer)
    if gold_number is None and answer_number is None:
        return None
    if gold_number and answer_number:
        return gold_number == answer_number
    if gold_number:  # The base may be left out, the digits may not be others.
        written = _BASE.fullmatch(gold)
        return written is not None and written["digits"] == answer.replace(" ", "")
    bare = parse_quantity(gold)
    return bare is not None and answer_number is not None and bare.value == answer_number


def _based(text: str) -> int | None:
    match = _BASE.fullmatch(text)
    if match is None or not any(character.isdigit() for character in match["digits"]):
        return None
    word = match["base"]
    base = int(word) if word.isdigit() else _BASE_WORDS.get(word, 0)
    if not 2 <= base <= 36 or (len(match["digits"]) < 2 and not match["digits"].isdigit()):
        return None
    digits = [int(digit, 36) for digit in match["digits"]]
    return int(match["digits"], base) if max(digits) < base else None


def _compare_ratios(gold: str, answer: str) -> bool | None:
    gold_ratio, answer_ratio = _ratio(gold), _ratio(answer)
    if gold_ratio is None and answer_ratio is None:
        return None
    if gold_ratio is None or answer_ratio is None:
        bare = parse_quantity(answer if gold_ratio else gold)
        ratio = gold_ratio or answer_ratio
        assert ratio is not None
        return len(ratio) == 2 and bare is not None and bare.value * ratio[1] == ratio[0]
    if len(gold_ratio) != len(answer_ratio):
        return False
    first, second = gold_ratio[0], answer_ratio[0]
    return all(g * second == a * first for g, a in zip(gold_ratio, answer_ratio, strict=True))


def _ratio(text: str) -> list[Fraction] | None:
    text = _RATIO_WORD.sub(":", text)
    if not _RATIO.fullmatch(text):
        return None
    terms = [parse_quantity(term.strip()) for term in text.split(":")]
    values = [term.value for term in terms if term is not None and term.unit is None]
    return values if len(values) == len(terms) and all(value > 0 for value in values) else None
