"""Rows as a data set's file hands them over, and what every row must satisfy.

No tokens here: templates and tokenizers come after, in `tokens`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from storage.records import canonical_json, sha256_hex

Message = dict[str, str]
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Row:
    """One prompt: its text or its turns, the reference answer, and where it was read.

    `row_id` is unique within its data set; `where` (file and line) is only for messages.
    """

    prompt: str | list[Message]
    answer: str | None
    row_id: str
    where: str
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Rows:
    """All rows of a data set, in its own order.

    `held_out` is None unless the data set brings its own; `dropped` counts rows that its file
    left out, by reason.
    """

    train: list[Row]
    held_out: list[Row] | None = None
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])


class FieldNames(BaseModel):
    """Which fields of a stored row are its prompt, its answer and its id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_field: str = "prompt"
    """Text, or a list of turns `{"role": ..., "content": ...}`."""
    answer_field: str | None = "answer"
    """The reference answer, a string; None for data without answers."""
    id_field: str | None = None
    """A string or integer, unique in the data; None takes the sha256 of the row's content."""
    extra_fields: list[str] = []
    """Further fields to store beside the prompt for graders, as JSON."""

    @property
    def wanted(self) -> list[str]:
        """All fields that are read."""
        named = [self.prompt_field, self.answer_field, self.id_field, *self.extra_fields]
        return list(dict.fromkeys(name for name in named if name is not None))

    def to_row(self, values: Mapping[str, Any], *, where: str) -> Row:
        """Returns the row that `values` hold.

        Raises:
            ValueError: a field is missing, has another type, or is empty; says where.
        """
        self._check_present(values, where=where)
        prompt = check_prompt(values[self.prompt_field], field=self.prompt_field, where=where)
        answer = None
        if self.answer_field is not None:
            answer = check_text(values[self.answer_field], field=self.answer_field, where=where)
        extra = {name: values[name] for name in self.extra_fields}
        if self.id_field is None:
            row_id = content_id(prompt, answer, extra=extra, where=where)
        else:
            row_id = _check_id(values[self.id_field], field=self.id_field, where=where)
        return Row(prompt=prompt, answer=answer, row_id=row_id, where=where, extra=extra)

    def _check_present(self, values: Mapping[str, Any], *, where: str) -> None:
        missing = [name for name in self.wanted if name not in values]
        if missing:
            raise ValueError(
                f"{where} has no field {missing[0]!r}. Found the fields {sorted(values)}. "
                "Name yours with prompt_field, answer_field (null for data without answers), "
                "id_field and extra_fields."
            )


def content_id(
    prompt: str | list[Message], answer: str | None, *, extra: Mapping[str, Any], where: str
) -> str:
    """Returns an id that follows from the content alone: 32 hex digits of its sha256.

    Raises:
        ValueError: `extra` holds something that JSON has no word for.
    """
    try:
        payload = canonical_json([prompt, answer, dict(extra)])
    except TypeError as error:
        raise ValueError(
            f"{where} has an extra field that JSON cannot hold: {error}. Expected strings, "
            "numbers, booleans, lists and objects. Leave it out of extra_fields, or convert it."
        ) from error
    return sha256_hex(payload)[:32]


def check_prompt(value: Any, *, field: str, where: str) -> str | list[Message]:
    """Returns `value` if it is a prompt text or a list of turns that end before an answer.

    Raises:
        ValueError: it is neither, or it is empty.
    """
    if isinstance(value, str):
        text = check_text(value, field=field, where=where)
        if not text.strip():
            raise ValueError(f"{where}: {field!r} is empty. Expected a prompt; remove the row.")
        return text
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise ValueError(
            f"{where}: {field!r} is {_shown(value)}. Expected a text, or a list of turns with "
            "'role' and 'content'."
        )
    turns = [_check_turn(turn, field=field, where=where) for turn in value]
    if turns[-1]["role"] not in ("user", "tool") or not turns[-1]["content"].strip():
        raise ValueError(
            f"{where}: the last turn of {field!r} is {turns[-1]!r}. Expected a user turn with "
            "text in it, for the model to answer."
        )
    return turns


def check_text(value: Any, *, field: str, where: str) -> str:
    """Returns `value` if it is a string that UTF-8 can hold.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: {field!r} is {_shown(value)}. Expected a string; numbers are written as "
            "text too, because graders compare what the model wrote."
        )
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(
            f"{where}: {field!r} holds half of a surrogate pair, which no UTF-8 text can. "
            "Write the whole character."
        )
    return value


def check_unique(rows: Iterable[Row]) -> None:
    """Checks that no two rows have one id.

    Raises:
        ValueError: two have; names both.
    """
    seen: dict[str, str] = {}
    for row in rows:
        if row.row_id in seen:
            raise ValueError(
                f"{row.where} repeats the id {row.row_id!r} of {seen[row.row_id]}. Expected each "
                "prompt once, because ids say what was consumed. Remove one of the two; equal "
                "rows without an id_field count as one prompt."
            )
        seen[row.row_id] = row.where


def _check_id(value: Any, *, field: str, where: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    text = check_text(value, field=field, where=where)
    if not text:
        raise ValueError(f"{where}: {field!r} is empty. Expected an id, unique in the data.")
    return text


def _check_turn(turn: Any, *, field: str, where: str) -> Message:
    if not isinstance(turn, Mapping) or not {"role", "content"} <= turn.keys():
        raise ValueError(
            f"{where}: a turn of {field!r} is {_shown(turn)}. Expected 'role' and 'content'."
        )
    # Parquet fills the fields that only other rows have with nulls.
    others = [name for name in turn if name not in ("role", "content") and turn[name] is not None]
    if turn["role"] not in ROLES or others:
        raise ValueError(
            f"{where}: a turn of {field!r} has role {turn['role']!r} and further fields {others}. "
            f"Expected a role of {ROLES} and nothing but 'content' beside it."
        )
    content = check_text(turn["content"], field=f"{field}.content", where=where)
    return {"role": turn["role"], "content": content}


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
