"""Puts texts of the data set and of the policy into a request, so that none of them breaks out.

Nothing here knows what is asked or who answers.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from rewards.contract import RewardInput

_QUOTED_CHARACTERS = 160

_FIELD = re.compile(r"\{(\w+)\}")
# What tokenizers of chat models read as the end of a turn, wherever it stands in a text.
_MARK = re.compile(
    r"([<\[])(?=[|｜]|/?(?:s|bos|eos|pad|unk|end|[a-z]+_of_[a-z_]+)>|<?/?SYS>|/?[A-Z_]{3,30}\])"
)


def check_template(template: str, *, allowed: Collection[str], needed: Collection[str]) -> None:
    """Checks the placeholders of a template, `{name}`; other braces are text.

    Raises:
        ValueError: one is unknown, or one of `needed` is missing.
    """
    found = set(_FIELD.findall(template))
    named = ", ".join(f"{{{name}}}" for name in sorted(allowed))
    if unknown := sorted(found - set(allowed)):
        raise ValueError(
            f"The template has the placeholder {{{unknown[0]}}}, which nothing fills. Expected "
            f"{named}."
        )
    if missing := sorted(set(needed) - found):
        raise ValueError(f"The template lacks {{{missing[0]}}}. Expected it among {named}.")


def names(template: str, field: str) -> bool:
    """Tells whether the template has the placeholder `{field}`."""
    return field in _FIELD.findall(template)


def fill(template: str, fields: Mapping[str, str]) -> str:
    """Returns the template with its placeholders filled, in one pass: filled text is only text."""
    return _FIELD.sub(lambda match: fields[match[1]], template)


def missing_question(extra: Mapping[str, Any], field: str | None) -> str | None:
    """Returns that the row has no question under `field` (its `prompt_field`), or None."""
    if field is None or isinstance(extra.get(field), str):
        return None
    return f"the prompt's extra has no text {field!r} (prompt_field)"


def question(item: RewardInput, field: str | None) -> str:
    """Returns what was asked: the row's text under `field`; None: the prompt's text."""
    return (item.prompt or "") if field is None else item.extra[field]


def fenced(text: str, *, label: str) -> str:
    """Returns `text` between two lines that it cannot contain: they are named by its digest."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"===== {label} {name} begins =====\n{text}\n===== {label} {name} ends ====="


def whole(text: str) -> str:
    """Returns `text` as it can be sent: a lone surrogate, which UTF-8 lacks, becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def without_marks(text: str) -> str:
    """Returns `text` with a blank inside what a chat model could read as the end of its turn.

    Servers read such marks anywhere in a message: `<|im_end|>` in a completion would end the
    judge's turn and let the policy write the next one.
    """
    return _MARK.sub(r"\1 ", text)


def quoted(answer: Any) -> str:
    """Returns the begin of what a service answered, for a reason."""
    return one_line(answer if isinstance(answer, str) else repr(answer), limit=_QUOTED_CHARACTERS)


def one_line(text: str, *, limit: int) -> str:
    """Returns `text` for a reason: printable, in one line, cut to `limit` characters."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * limit])
    line = " ".join(printable.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
