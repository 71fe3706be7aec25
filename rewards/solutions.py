r"""Solution sets of one real variable: intervals, unions, inequalities, `\{x \mid x > 2\}`.

All ways to write one become a sympy set, so that they compare by what they describe.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from rewards.magnitude import has_unworkable_number
from rewards.notation import plain_words, split_top_level
from rewards.symbolic import read_expression, real_number

_OR = re.compile(r"\\cup(?![a-zA-Z])|\bU\b|\\lor(?![a-zA-Z])|\bor\b")
_AND = re.compile(r"\\cap(?![a-zA-Z])|\\land(?![a-zA-Z])|\band\b")
_MINUS = re.compile(r"\\(?:setminus|backslash)(?![a-zA-Z])|(?<=\})\s*-\s*(?=\\\{)")
_COMMA = re.compile(r"[,;]")
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![a-zA-Z])|[<>]")
_MARKS = re.compile(
    r"\\(?:cup|cap|lor|le|ge|ne|setminus|infty|mathbb|in|mid)(?![a-zA-Z])|[<>]|\bU\b|real numbers"
)
_BUILDER = re.compile(
    r"\\\{\s*(?P<name>\\?[A-Za-z]+)\s*(?:\\in\s*\\mathbb\s*\{R\}\s*)?(?:\||:|\\mid(?![a-zA-Z]))"
    r"(?P<condition>.+)\\\}",
    re.DOTALL,
)
_MEMBERSHIP = re.compile(
    r"(?P<name>\\?[A-Za-z]+(?:_\{?\w\}?)?)\s*\\in(?![a-zA-Z])(?P<set>.+)", re.DOTALL
)
_REALS = re.compile(r"\\mathbb\s*\{R\}|(?:all )?real numbers|all reals", re.IGNORECASE)
_MAX_PIECES = 30
_MAX_DEGREE = 2


@dataclass(frozen=True)
class SolutionSet:
    """A set of real numbers; `name` is the variable's where it was named."""

    numbers: Any
    name: str | None


def compare_solutions(gold: str, answer: str) -> bool | None:
    """Returns whether both describe the same set, or None if one of them describes none.

    A pair in brackets is read as an interval only if the other side is one beyond doubt.
    """
    if not (_MARKS.search(gold) or _MARKS.search(answer)):
        return None
    first, second = solution_set(gold), solution_set(answer)
    if first is None or second is None:
        return None
    if first.name and second.name and first.name != second.name:
        return False
    return first.numbers == second.numbers


@lru_cache(maxsize=512)
def solution_set(text: str) -> SolutionSet | None:
    """Returns the set that `text` (normalised) describes, or None. Bounds must be numbers."""
    text = plain_words(text)
    if len(text) > 1000:
        return None
    return _read(text, depth=0)


def _read(text: str, *, depth: int) -> SolutionSet | None:
    if depth > 6:
        return None
    for separator, join in ((_OR, sympy.Union), (_AND, sympy.Intersection)):
        pieces = split_top_level(text, separator)
        if 1 < len(pieces) <= _MAX_PIECES:
            return _joined(pieces, join, depth=depth)
    pieces = split_top_level(text, _MINUS)
    if len(pieces) == 2:
        return _without(*pieces, depth=depth)
    pieces = [piece for piece in split_top_level(text, _COMMA) if piece]
    if 1 < len(pieces) <= _MAX_PIECES and all(_RELATION.search(piece) for piece in pieces):
        # "x > 1, x < 2" is both at once, "x < 1, x > 2" is one or the other.
        both = _joined(pieces, sympy.Intersection, depth=depth)
        empty = both is not None and both.numbers is sympy.S.EmptySet
        return _joined(pieces, sympy.Union, depth=depth) if empty else both
    return _single(text, depth=depth)


def _joined(pieces: list[str], join: Any, *, depth: int) -> SolutionSet | None:
    sets = [_read(piece, depth=depth + 1) for piece in pieces]
    known = [one for one in sets if one is not None]
    names = {one.name for one in known if one.name}
    if len(known) < len(sets) or len(names) > 1:
        return None
    return SolutionSet(join(*(one.numbers for one in known)), next(iter(names), None))


def _without(whole: str, excluded: str, *, depth: int) -> SolutionSet | None:
    first, second = _read(whole, depth=depth + 1), _read(excluded, depth=depth + 1)
    if first is None or second is None:
        return None
    return SolutionSet(sympy.Complement(first.numbers, second.numbers), first.name)


def _single(text: str, *, depth: int) -> SolutionSet | None:
    if _REALS.fullmatch(text):
        return SolutionSet(sympy.S.Reals, None)
    if match := _BUILDER.fullmatch(text):
        return _read(match["condition"].strip(), depth=depth + 1)
    if match := _MEMBERSHIP.fullmatch(text):
        inner = _read(match["set"].strip(), depth=depth + 1)
        return None if inner is None else SolutionSet(inner.numbers, match["name"])
    if _RELATION.search(text):
        return _of_relation(text)
    return _bracketed(text)


def _bracketed(text: str) -> SolutionSet | None:
    if text.startswith("\\{") and text.endswith("\\}"):
        items = [item for item in split_top_level(text[2:-2], _COMMA) if item]
        numbers = [real_number(item) for item in items]
        known = all(number is not None and number.is_finite for number in numbers)
        return SolutionSet(sympy.FiniteSet(*numbers), None) if known else None
    if text[:1] not in ("(", "[", "]") or text[-1:] not in (")", "]", "["):
        return None
    ends = split_top_level(text[1:-1], _COMMA)
    if len(ends) == 2:
        return _between(*ends, open_low=text[0] != "[", open_high=text[-1] != "]")
    return _read(text[1:-1], depth=3) if text[0] == "(" and text[-1] == ")" else None


def _between(low: str, high: str, *, open_low: bool, open_high: bool) -> SolutionSet | None:
    first, last = real_number(low), real_number(high)
    if first is None or last is None or first > last:
        return None
    infinite = (first.is_infinite and not open_low) or (last.is_infinite and not open_high)
    return None if infinite else SolutionSet(sympy.Interval(first, last, open_low, open_high), None)


def _of_relation(text: str) -> SolutionSet | None:
    sides = split_top_level(text, _RELATION)
    signs = [sign.strip() for sign in _RELATION.findall(text)]
    if len(sides) != len(signs) + 1 or not 1 <= len(signs) <= 2 or not all(sides):
        return None
    read = [read_expression(side) for side in sides]
    known = [
        side for side in read if isinstance(side, sympy.Expr) and not has_unworkable_number(side)
    ]
    symbols = set[Any]().union(*(side.free_symbols for side in known))
    if len(known) < len(read) or len(symbols) != 1:
        return None
    (symbol,) = symbols
    conditions = [
        _solved(known[index], sign, known[index + 1], symbol) for index, sign in enumerate(signs)
    ]
    if None in conditions:
        return None
    return SolutionSet(sympy.Intersection(*conditions), str(symbol))


def _solved(left: Any, sign: str, right: Any, symbol: Any) -> Any | None:
    """Solves what is linear or quadratic in the variable or in its absolute value."""
    relation = {"<": sympy.Lt, ">": sympy.Gt, "\\le": sympy.Le, "\\ge": sympy.Ge, "\\ne": sympy.Ne}
    size = sympy.Dummy("size", real=True)
    difference = left - right
    inner = difference.xreplace({sympy.Abs(symbol): size})
    if inner.free_symbols == {size}:
        found = _solved(inner, sign, sympy.S.Zero, size)
        return None if found is None else _mirrored(found)
    if not difference.is_polynomial(symbol) or sympy.degree(difference, symbol) > _MAX_DEGREE:
        return None
    if difference.free_symbols != {symbol}:
        return None
    condition = relation[sign](difference, 0)
    return sympy.solveset(condition, symbol, sympy.S.Reals)


def _mirrored(sizes: Any) -> Any:
    """Returns the numbers whose absolute value lies in `sizes`."""
    positive = sympy.Intersection(sizes, sympy.Interval(0, sympy.oo))
    value = sympy.Dummy("value", real=True)
    return sympy.Union(positive, sympy.imageset(value, -value, positive))
