"""What an audit found: what is broken, what is odd, and how much was looked at. Knows no store."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from storage.records import Record

EXACTLY_ONCE, CHAIN, REPLAY, WEIGHT_PROOF, NO_SILENT_ZERO, TOKENS, STALENESS, CUT = range(1, 9)
"""The promises, by their numbers."""

MAX_LISTED = 200
"""Findings and notes that are kept word for word; beyond, they are counted."""

MAX_VALUE = 240
"""Characters of a value that a finding shows."""


class Finding(Record):
    """One thing that does not hold: where, what was expected there, and what was found."""

    promise: int
    key: str
    expected: str
    found: str

    @property
    def text(self) -> str:
        """The finding in one line."""
        return f"{self.key}: expected {self.expected}; found {self.found}"


@dataclass
class Tally:
    """The result of looking at some part of a run. One thread fills it; `add` joins two.

    `counts` are of what was looked at; `maxima` the largest of each figure; `notes` what is odd
    and breaks nothing; `given_up` how many objects retention deleted, by kind.
    """

    findings: list[Finding] = field(default_factory=list[Finding])
    broken_by_promise: Counter[int] = field(default_factory=Counter[int])
    notes: list[str] = field(default_factory=list[str])
    num_notes: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    maxima: dict[str, float] = field(default_factory=dict[str, float])
    given_up: Counter[str] = field(default_factory=Counter[str])

    @property
    def num_findings(self) -> int:
        """How much is broken, listed or not."""
        return sum(self.broken_by_promise.values())

    def broken(self, key: str, *, expected: str, found: str, promise: int = CHAIN) -> None:
        """Says that something does not hold."""
        self.broken_by_promise[promise] += 1
        if len(self.findings) < MAX_LISTED:
            self.findings.append(
                Finding(promise=promise, key=key, expected=shown(expected), found=shown(found))
            )

    def expect(
        self, key: str, name: str, found: object, expected: object, *, promise: int = CHAIN
    ) -> bool:
        """Says that `name` in `key` does not hold unless the two are equal; returns if they are."""
        holds = found == expected
        if not holds:
            self.broken(
                key, expected=f"{name} {_value(expected)}", found=_value(found), promise=promise
            )
        return holds

    def note(self, text: str) -> None:
        """Says something odd that breaks nothing."""
        self.num_notes += 1
        if len(self.notes) < MAX_LISTED:
            self.notes.append(text)

    def largest(self, name: str, value: float) -> None:
        """Keeps the largest value of a figure."""
        self.maxima[name] = max(value, self.maxima.get(name, value))

    def add(self, other: "Tally") -> None:
        """Takes over what another one found."""
        self.findings += other.findings[: MAX_LISTED - len(self.findings)]
        self.broken_by_promise.update(other.broken_by_promise)
        self.notes += other.notes[: MAX_LISTED - len(self.notes)]
        self.num_notes += other.num_notes
        self.counts.update(other.counts)
        self.given_up.update(other.given_up)
        for name, value in other.maxima.items():
            self.largest(name, value)


def shown(text: str) -> str:
    """Returns `text` as long as a line of a report may be."""
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def _value(value: Any) -> str:
    if value is None:
        return "nothing"
    return value if isinstance(value, str) else repr(value)
