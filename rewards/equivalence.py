r"""Whether two answers are the same mathematics: structure first, symbols (math-verify) last.

Collections, intervals, assignments and numbers are compared by what the text says, because
there a symbolic library guesses (is `(1,2)` a point or an interval?). What is left is one
expression, relation or matrix on each side. Heavy input hangs here: call it in a process that
can be killed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rewards.notation import plain_words, split_top_level
from rewards.quantity import parse_quantity, same_quantity
from rewards.symbolic import read_expression, symbolically_equal

_COMMA = re.compile(r"[,;]|\b(?:and|or)\b")
_CUP = re.compile(r"\\cup(?![a-zA-Z])|\bU\b")
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![a-zA-Z])|[<>]")
_EQUALS = re.compile(r"=")
_NAME = r"(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z](?:,[A-Za-z])*\))?)"
_ASSIGNMENT = re.compile(rf"({_NAME})\s*(?:=|\\in(?![a-zA-Z])|\\to(?![a-zA-Z]))\s*(.+)", re.DOTALL)
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?")
_WORDS = re.compile(r"[^\W\d_][^\W\d_]*(?:[ '\-][^\W\d_]+)*[.!]?")
_CHOICE = re.compile(r"\(?([A-J])(?:\)?[.:]?|[).:]\s.*)", re.DOTALL)
_UNREADABLE = re.compile(r"\\[lc]?dots|\.\.\.|\d\s*:\s*\d|(?<![_^\d])\d+\s+\d(?!\d*/\d)")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_INSIGNIFICANT = re.compile(r"(?<!\d)\s+|\s+(?!\d)|(?<=[_^])\{(?=\w\})|(?<=[_^]\{\w)\}")
_PIECES_LIMIT = 200


@dataclass(frozen=True)
class _Group:
    """A collection: `{}` a set, `` a bare list, `()` `[]` `(]` `[)` ordered; `U` a union."""

    brackets: str
    items: tuple[str, ...]


def equivalent(gold: str, answer: str) -> bool:
    """Returns whether `answer` says the same as `gold`; both normalised.

    Not symmetric where the rules are not: only a decimal gold allows a tolerance, only a gold
    without a unit ignores one.
    """
    if _key(gold) == _key(answer):
        return True
    words = _compare_words(gold, answer)
    if words is not None:
        return words
    gold_number, answer_number = parse_quantity(gold), parse_quantity(answer)
    if gold_number and answer_number:
        return same_quantity(gold_number, answer_number)
    if _UNREADABLE.search(gold) or _UNREADABLE.search(answer):
        return False
    gold_name, gold_value = _assigned(gold)
    answer_name, answer_value = _assigned(answer)
    if gold_name and answer_name and gold_name != answer_name:
        return symbolically_equal(gold, answer)
    if gold_value != gold or answer_value != answer:
        return equivalent(gold_value, answer_value) or _relations_equal(gold, answer)
    return _structures_equal(gold, answer)


def readable(gold: str) -> bool:
    """Returns whether a gold answer (normalised) is something that answers can be compared to."""
    if not gold:
        return False
    if _UNREADABLE.search(gold) or _WORDS.fullmatch(plain_words(gold)) or parse_quantity(gold):
        return True
    group = _group(_assigned(gold)[1])
    if group is not None:
        return all(readable(item) for item in group.items)
    return read_expression(gold) is not None


def _key(text: str) -> str:
    return re.sub(
        r"(?<!\d)\s+|\s+(?!\d)|(?<=[_^])\{(?=\w\})|(?<=[_^]\{\w)\}", "", plain_words(text)
    )


def _compare_words(gold: str, answer: str) -> bool | None:
    """Compares word answers and option letters; None if the gold is mathematics."""
    gold_words, answer_words = plain_words(gold), plain_words(answer)
    choice = _CHOICE.fullmatch(gold_words)
    if choice:
        found = _CHOICE.fullmatch(answer_words)
        return found[1] == choice[1] if found else None
    if not _WORDS.fullmatch(gold_words) or len(gold_words.rstrip(".!")) < 2:
        return None
    if gold_words.rstrip(".!").casefold() == answer_words.rstrip(".!").casefold():
        return True
    is_prose = gold_words != gold or " " in gold_words or not gold_words.islower()
    return False if is_prose else None


def _assigned(text: str) -> tuple[str | None, str]:
    r"""Splits `x = value` and `x \in S`; of a chain of equalities the last side is the value."""
    match = _ASSIGNMENT.fullmatch(text)
    if match is None or "\\begin" in match[1]:
        return None, text
    sides = split_top_level(match[2], _EQUALS)
    if len(sides) > 1 and _COMMA.search(match[2]):
        return None, text
    return match[1].replace(" ", ""), sides[-1]


def _structures_equal(gold: str, answer: str) -> bool:
    gold_group, answer_group = _group(gold), _group(answer)
    if gold_group is None and answer_group is None:
        return symbolically_equal(gold, answer)
    if gold_group is None or answer_group is None:
        group = gold_group or answer_group
        assert group is not None
        if len(group.items) == 1 and group.brackets == "{}":
            single = group.items[0]
            return equivalent(single, answer) if gold_group else equivalent(gold, single)
        return group.brackets != "" and symbolically_equal(gold, answer)
    return _groups_equal(gold_group, answer_group) or (
        "U" in (gold_group.brackets, answer_group.brackets) and symbolically_equal(gold, answer)
    )


def _groups_equal(gold: _Group, answer: _Group) -> bool:
    if len(gold.items) != len(answer.items):
        return False
    kinds = {gold.brackets, answer.brackets}
    if kinds <= {"{}", ""} or kinds == {"U"}:
        return _match_unordered(gold.items, answer.items)
    if len(kinds) == 1 or kinds == {"", "()"}:
        return all(equivalent(g, a) for g, a in zip(gold.items, answer.items, strict=True))
    return False


def _match_unordered(gold: Sequence[str], answer: Sequence[str]) -> bool:
    """Pairs every gold item with an answer of its own."""
    left = list(answer)
    for item in gold:
        position = next((i for i, other in enumerate(left) if equivalent(item, other)), None)
        if position is None:
            return False
        left.pop(position)
    return True


def _group(text: str) -> _Group | None:
    """Reads a collection, an interval (also from an inequality) or plus-minus; None if neither."""
    pieces = split_top_level(text, _CUP)
    if 1 < len(pieces) <= _PIECES_LIMIT:
        return _Group("U", tuple(pieces))
    items = split_top_level(text, _COMMA)
    items = [item for item in items if item]
    if 1 < len(items) <= _PIECES_LIMIT:
        return _Group("", tuple(_with_names_shared(_expanded(items))))
    interval = _interval(text)
    if interval is not None:
        return interval
    if _PLUS_MINUS.search(text):
        return _Group("", tuple(_expanded([text])))
    return _bracketed(text)


def _bracketed(text: str) -> _Group | None:
    for opening, closing, kind in (("\\{", "\\}", "{}"), ("{", "}", "{}")):
        if text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            return _Group(kind, tuple(_expanded(_nonempty(split_top_level(inner, _COMMA)))))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        items = _nonempty(split_top_level(text[1:-1], _COMMA))
        if len(items) > 1:
            return _Group(text[0] + text[-1], tuple(items))
    return None


def _nonempty(items: Sequence[str]) -> list[str]:
    return [item for item in items if item]


def _expanded(items: Sequence[str]) -> list[str]:
    """Writes every plus-minus item as its two values."""
    expanded: list[str] = []
    for item in items:
        if _PLUS_MINUS.search(item):
            for signs in ({"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"}):
                value = _PLUS_MINUS.sub(lambda match, signs=signs: signs[match[1]], item)
                expanded.append(value.strip())
        else:
            expanded.append(item)
    return expanded


def _with_names_shared(items: Sequence[str]) -> list[str]:
    """`x=1, 2` names both numbers: without the name, items of both lists compare alike."""
    assigned = [_assigned(item) for item in items]
    names = {name for name, _ in assigned if name}
    return [value for _, value in assigned] if len(names) == 1 else list(items)


def _interval(text: str) -> _Group | None:
    r"""Reads `a < x \le b` and its like as the interval that it describes."""
    sides = split_top_level(text, _RELATION)
    signs = [sign.strip() for sign in _RELATION.findall(text)]
    if len(sides) != len(signs) + 1 or not all(sides) or "\\ne" in signs:
        return None
    variables = [bool(_VARIABLE.fullmatch(side)) and side != "\\infty" for side in sides]
    if len(signs) == 1 and variables.count(True) == 1:
        flipped = variables[0]
        bound = sides[1] if flipped else sides[0]
        below = (signs[0] in ("<", "\\le")) != flipped
        closed = signs[0] in ("\\le", "\\ge")
        return _half_line(bound, below=below, closed=closed)
    if len(signs) == 2 and variables == [False, True, False]:
        return _between(sides, signs)
    return None


def _half_line(bound: str, *, below: bool, closed: bool) -> _Group:
    if below:
        return _Group(("[" if closed else "(") + ")", (bound, "\\infty"))
    return _Group("(" + ("]" if closed else ")"), ("-\\infty", bound))


def _between(sides: Sequence[str], signs: Sequence[str]) -> _Group | None:
    rising = [sign in ("<", "\\le") for sign in signs]
    if rising[0] != rising[1]:
        return None
    low, high = (sides[0], sides[2]) if rising[0] else (sides[2], sides[0])
    left, right = (signs[0], signs[1]) if rising[0] else (signs[1], signs[0])
    opening = "[" if left in ("\\le", "\\ge") else "("
    closing = "]" if right in ("\\le", "\\ge") else ")"
    return _Group(opening + closing, (low, high))


def _relations_equal(gold: str, answer: str) -> bool:
    """Compares two equations as wholes: `y=2x+1` and `2x-y+1=0`."""
    return "=" in gold and "=" in answer and symbolically_equal(gold, answer)
