r"""Whether two answers are the same mathematics: structure first, symbols (math-verify) last.

Words, times, numbers, collections and intervals are compared by what the text says, because
there a symbolic library guesses (is `(1,2)` a point or an interval?). What is left is one
expression, relation or matrix on each side. Heavy input hangs here: call it in a process that
can be killed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from rewards.notation import plain_words, split_top_level
from rewards.quantity import parse_quantity, read_unit, same_quantity
from rewards.solutions import compare_solutions, solution_set
from rewards.symbolic import read_expression, symbolically_equal
from rewards.written import compare_written, is_written

_COMMA = re.compile(r"[,;]|\b(?:and|or)\b")
_MATRIX_ROW = re.compile(r"\\\\")
_EQUALS = re.compile(r"=")
_NAME = r"(?:\\?[A-Za-z]+(?:_(?:\{[^{}=]*\}|\w+))?(?:\([A-Za-z](?:,[A-Za-z])*\))?)"
_POINT = rf"(?:\(\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\))"
_ASSIGNMENT = re.compile(
    rf"({_NAME}|{_POINT})\s*(?:=|\\in(?![a-zA-Z])|\\to(?![a-zA-Z]))\s*(.+)", re.DOTALL
)
_LABEL = re.compile(r"[A-Z]'?_?\d?\s*(?=\([^()]*,[^()]*\)$)")
_WORDS = re.compile(r"[^\W\d_][^\W\d_]*(?:[ '\-][^\W\d_]+)*[.!]?")
_CHOICE_LEAD = re.compile(r"(?:option|choice|answer)\s+", re.IGNORECASE)
_CHOICE = re.compile(r"[(\[{]?([A-Ja-j])(?:[)\]}]?[.:]?|[).:]\s.*)", re.DOTALL)
_OTHER_CHOICE = re.compile(r"\b(?:or|and)\s+\(?[A-J]\b|[,/]\s*\(?[A-J]\)?(?:$|[\s,.])")
_UNREADABLE = re.compile(r"\\ldots|(?<![_^\d])\d+\s+\d(?!\d*/\d)|!!|\\approx|\\bmod|\?")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_TRAILING_UNIT = re.compile(
    r"(.*[^\s\\])\s*(\\text\s*\{[^{}]*\}\s*(?:\^\s*\{?-?\d\}?)?)", re.DOTALL
)
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)|(?<=[_^])\{(?=\w\})|(?<=[_^]\{\w)\}")
_INFINITY_WORDS = re.compile(r"([+-]?)\s*(?:positive |negative )?infinity", re.IGNORECASE)
_DIGIT = re.compile(r"\d")
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|sigma|omega)")
_MISSING = frozenset({"None", "nan", "NaN", "null", "NULL", "N/A", "<NA>"})
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![a-zA-Z])|[<>]")
_FLIPPED = {">": "<", "\\ge": "\\le"}
_COMMUTATIVE = {
    name: re.compile(rf"\\{name}(?![a-zA-Z])") for name in ("cup", "cap", "lor", "land")
}
_PIECES_LIMIT = 200
_MAX_DEPTH = 12


@dataclass(frozen=True)
class _Group:
    """A collection: `{}` a set, `` a bare list, `()` `[]` `(]` `[)` ordered; `|` a column.

    Also the operands of `cup`, `cap`, `lor` or `land`.
    """

    brackets: str
    items: tuple[str, ...]


def equivalent(gold: str, answer: str, *, depth: int = 0) -> bool:
    """Returns whether `answer` says the same as `gold`; both normalised.

    Not symmetric where the rules are not: only a decimal gold allows a tolerance, only a gold
    without a unit ignores one.
    """
    if _key(gold) == _key(answer):
        return True
    if depth > _MAX_DEPTH:
        return False
    gold, answer = _ungrouped(gold), _ungrouped(answer)
    for compare in (_compare_words, compare_written, _compare_numbers):
        verdict = compare(gold, answer)
        if verdict is not None:
            return verdict
    if _UNREADABLE.search(gold) or _UNREADABLE.search(answer):
        return False
    (gold, gold_unit), (answer, answer_unit) = _without_unit(gold), _without_unit(answer)
    if gold_unit or answer_unit:
        agree = not (gold_unit and answer_unit) or gold_unit == answer_unit
        return agree and equivalent(gold, answer, depth=depth + 1)
    return _compare_assigned(gold, answer, depth=depth)


def readable(gold: str) -> bool:
    """Returns whether a gold answer (normalised) is something that answers can be compared to."""
    if not gold or gold in _MISSING or not re.search(r"\w|\\emptyset|\\infty|\\\{", gold):
        return False
    if re.fullmatch(r"[^\w\\]*\\ldots[^\w\\]*", gold):
        return False
    if is_written(gold) or _WORDS.fullmatch(plain_words(gold)) or parse_quantity(gold):
        return True
    if _UNREADABLE.search(gold) or _without_unit(gold)[1] or solution_set(gold) is not None:
        return True
    group = _group(_assigned(gold)[1])
    if group is not None:
        return all(readable(item) for item in group.items)
    read = read_expression(_assigned(gold)[1])
    if read is None:
        read = read_expression(gold)
    return read is not None and not read.has(sympy.zoo, sympy.nan) and not _divides_by_zero(read)


def is_choice(text: str) -> bool:
    """Returns whether `text` (normalised) is an option letter, alone."""
    return re.fullmatch(r"\(?[A-J]\)?", plain_words(text)) is not None


def chosen(text: str) -> str | None:
    """Returns the letter of the one option that `text` (normalised) names, or None."""
    words = _CHOICE_LEAD.sub("", plain_words(text), count=1)
    match = _CHOICE.fullmatch(words)
    if match is None or _OTHER_CHOICE.search(words):
        return None
    return match[1].upper()


def _divides_by_zero(read: sympy.Basic) -> bool:
    return any(power.base == 0 and power.exp.is_negative for power in read.atoms(sympy.Pow))


def _ungrouped(text: str) -> str:
    """Takes off braces that group the whole text; those of a bare `{1,2}` are a set's."""
    while text.startswith("{") and text.endswith("}") and not _COMMA.search(text):
        pieces = split_top_level(text, re.compile(r"(?<=\})"))
        if len(pieces) > 2 or (len(pieces) == 2 and pieces[1]):
            return text
        text = text[1:-1].strip()
    return text


def _key(text: str) -> str:
    return _SPACES.sub("", plain_words(text))


def _compare_words(gold: str, answer: str) -> bool | None:
    """Compares word answers and option letters; None if the gold is mathematics."""
    gold_words, answer_words = plain_words(gold), plain_words(answer)
    if is_choice(gold):
        return chosen(answer) == gold_words.strip("()")
    for first, second in ((gold_words, answer_words), (answer_words, gold_words)):
        if match := _INFINITY_WORDS.fullmatch(first):
            negative = match[1] == "-" or "negative" in first.casefold()
            return second.strip("+ ") == ("-" if negative else "") + "\\infty"
    if not _WORDS.fullmatch(gold_words) or len(gold_words.rstrip(".!")) < 2:
        return None
    if gold_words.rstrip(".!").casefold() == answer_words.rstrip(".!").casefold():
        return True
    if re.search(r"\b(?:and|or)\b", gold_words):
        return None
    if solution_set(gold) is not None:
        return None
    is_prose = gold_words != gold or " " in gold_words or not gold_words.islower()
    return False if is_prose or len(gold_words) > 3 else None


def _compare_numbers(gold: str, answer: str) -> bool | None:
    gold_number, answer_number = parse_quantity(gold), parse_quantity(answer)
    if gold_number and answer_number:
        return same_quantity(gold_number, answer_number)
    for number, other in ((gold_number, answer), (answer_number, gold)):
        if number and number.unit == "degree" and "\\pi" in other:
            return symbolically_equal(other, f"\\frac{{{number.value}}}{{180}}\\pi")
    return None


def _without_unit(text: str) -> tuple[str, str | None]:
    r"""Splits `36\pi \text{ cm}^2`; a number with its unit was compared before."""
    match = _TRAILING_UNIT.fullmatch(text)
    if match is None or match[1][-1] in "=+-*/^_({[,<>":
        return text, None
    unit = read_unit(match[2])
    return (match[1].strip(), unit) if unit else (text, None)


def _compare_assigned(gold: str, answer: str, *, depth: int) -> bool:
    gold_name, gold_value = _assigned(gold)
    answer_name, answer_value = _assigned(answer)
    if gold_name and answer_name and gold_name != answer_name:
        return symbolically_equal(gold, answer)
    if gold_value != gold or answer_value != answer:
        same = equivalent(gold_value, answer_value, depth=depth + 1)
        return same or _relations_equal(gold, answer)
    solutions = compare_solutions(gold, answer)
    return _structures_equal(gold, answer, depth=depth) if solutions is None else solutions


def _assigned(text: str) -> tuple[str | None, str]:
    r"""Splits `x = value`, `value = x` and `x \in S`; of a chain the last side is the value.

    The left side of `a + b = 5` names a quantity too; that of `2a + b = 5` does not.
    """
    match = _ASSIGNMENT.fullmatch(text)
    if match is None or "\\begin" in match[1]:
        return _assigned_otherwise(text)
    sides = split_top_level(match[2], _EQUALS)
    if len(sides) > 1 and _COMMA.search(match[2]):
        return None, text
    return match[1].replace(" ", ""), sides[-1]


def _assigned_otherwise(text: str) -> tuple[str | None, str]:
    sides = split_top_level(text, _EQUALS)
    if len(sides) < 2 or not all(sides) or _COMMA.search(text):
        return None, text
    if len(sides) == 2 and re.fullmatch(_NAME, sides[1]) and not _LETTER.search(sides[0]):
        return sides[1], sides[0]
    is_chain = not any(_LETTER.search(side) for side in sides[:-1])
    is_named = not any(_DIGIT.search(side) for side in sides[:-1]) and bool(
        _DIGIT.search(sides[-1])
    )
    if is_chain or (is_named and sides[-1] != "0"):
        return None, sides[-1]
    return None, text


def _structures_equal(gold: str, answer: str, *, depth: int) -> bool:
    relations = _RELATION.search(gold) and _RELATION.search(answer)
    if relations and symbolically_equal(gold, answer):
        return True
    gold_group, answer_group = _group(gold), _group(answer)
    if gold_group is None and answer_group is None:
        return symbolically_equal(gold, answer)
    if gold_group is None or answer_group is None:
        group = gold_group or answer_group
        assert group is not None
        if depth == 0 and len(group.items) == 1 and group.brackets == "{}":
            single = group.items[0]
            pair = (single, answer) if gold_group else (gold, single)
            return "\\emptyset" not in pair and equivalent(*pair, depth=depth + 1)
        if group.brackets == "()":
            return _labelled_equal(gold, answer, depth=depth)
        return False
    return _groups_equal(gold_group, answer_group, depth=depth)


def _labelled_equal(gold: str, answer: str, *, depth: int) -> bool:
    """`P(3,5)` names a point."""
    bare = _LABEL.sub("", gold, count=1), _LABEL.sub("", answer, count=1)
    return bare != (gold, answer) and equivalent(*bare, depth=depth + 1)


def _groups_equal(gold: _Group, answer: _Group, *, depth: int) -> bool:
    kinds = {gold.brackets, answer.brackets}
    gold_items, answer_items = gold.items, answer.items
    if "{}" in kinds and kinds <= {"{}", ""}:
        gold_items, answer_items = (_distinct(i, depth=depth) for i in (gold_items, answer_items))
    if len(gold_items) != len(answer_items):
        return False
    if kinds <= {"{}", ""} or (len(kinds) == 1 and kinds <= _COMMUTATIVE.keys()):
        return _match_unordered(gold_items, answer_items, depth=depth)
    if len(kinds) == 1 or kinds <= {"", "()"} or kinds <= {"|", "()"}:
        return all(
            equivalent(g, a, depth=depth + 1) for g, a in zip(gold_items, answer_items, strict=True)
        )
    return False


def _distinct(items: Sequence[str], *, depth: int) -> tuple[str, ...]:
    if len({_key(item) for item in items}) == len(items) > 20:
        return tuple(items)
    kept: list[str] = []
    for item in items:
        if not any(equivalent(other, item, depth=depth + 1) for other in kept):
            kept.append(item)
    return tuple(kept)


def _match_unordered(gold: Sequence[str], answer: Sequence[str], *, depth: int) -> bool:
    """Pairs every gold item with an answer of its own; gives up at the first without one."""
    left = list(answer)
    for item in gold:
        same = [i for i, other in enumerate(left) if _key(item) == _key(other)]
        equal = (i for i, other in enumerate(left) if equivalent(item, other, depth=depth + 1))
        position = same[0] if same else next(equal, None)
        if position is None:
            return False
        left.pop(position)
    return True


def _group(text: str) -> _Group | None:
    """Reads a collection, a column or plus-minus; None if it is none of them."""
    items = _nonempty(split_top_level(text, _COMMA))
    if text[:1] == "(" and _PLUS_MINUS.search(text) and len(items) == 1:
        return _Group("", tuple(_expanded([text])))
    if 1 < len(items) <= _PIECES_LIMIT and "\\begin" not in text:
        return _Group("", tuple(_with_names_shared(_expanded(items))))
    for name, operator in _COMMUTATIVE.items():
        pieces = split_top_level(text, operator)
        if 1 < len(pieces) <= _PIECES_LIMIT:
            return _Group(name, tuple(pieces))
    return (
        _interval(text)
        or _bracketed(text)
        or (_Group("", tuple(_expanded([text]))) if _PLUS_MINUS.search(text) else None)
    )


def _interval(text: str) -> _Group | None:
    r"""Reads `a < x \le b` and its like as the interval between two expressions."""
    sides = split_top_level(text, _RELATION)
    signs = [sign.strip() for sign in _RELATION.findall(text)]
    if len(sides) != len(signs) + 1 or not all(sides):
        return None
    if signs and signs[0] in (">", "\\ge"):
        sides, signs = sides[::-1], [_FLIPPED.get(sign, "") for sign in reversed(signs)]
    if not signs or not set(signs) <= {"<", "\\le"}:
        return None
    if len(signs) == 1 and re.fullmatch(_NAME, sides[0]) and not re.fullmatch(_NAME, sides[1]):
        sides, signs = ["-\\infty", *sides], ["<", *signs]
    elif len(signs) == 1 and re.fullmatch(_NAME, sides[1]) and not re.fullmatch(_NAME, sides[0]):
        sides, signs = [*sides, "\\infty"], [*signs, "<"]
    if len(signs) != 2 or not re.fullmatch(_NAME, sides[1]):
        return None
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return _Group(brackets, (sides[0], sides[2]))


def _bracketed(text: str) -> _Group | None:
    if text in ("\\{\\}", "\\emptyset", "\\{ \\}"):
        return _Group("{}", ())
    for opening, closing in (("\\{", "\\}"), ("{", "}")):
        if text.startswith(opening) and text.endswith(closing):
            inner = split_top_level(text[len(opening) : -len(closing)], _COMMA)
            items = _expanded(_nonempty(inner))
            if opening == "{" and len(items) < 2:
                return None
            return _Group("{}", tuple(items)) if items else None
    start, end = "\\begin{pmatrix}", "\\end{pmatrix}"
    if text.startswith(start) and text.endswith(end) and text.count("\\begin") == 1:
        rows = _nonempty(split_top_level(text[len(start) : -len(end)], _MATRIX_ROW))
        return _Group("|", tuple(rows)) if len(rows) > 1 and "&" not in text else None
    if text[:1] in ("(", "[", "]") and text[-1:] in (")", "]", "["):
        items = _nonempty(split_top_level(text[1:-1], _COMMA))
        shape = {"(": "(", "[": "[", "]": "("}[text[0]] + {")": ")", "]": "]", "[": ")"}[text[-1]]
        if len(items) > 1:
            return _Group(shape, tuple(items))
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
                expanded.append(value.strip().removeprefix("+"))
        else:
            expanded.append(item)
    return expanded


def _with_names_shared(items: Sequence[str]) -> list[str]:
    """`x=1, 2` names both numbers: without the name, items of both lists compare alike.

    Values of several variables are brought into the order of their names.
    """
    assigned = [_assigned(item) for item in items]
    names = [name.split("_")[0] for name, _ in assigned if name]
    if len(set(names)) == 1:
        return [value for _, value in assigned]
    if len(set(names)) == len(items):
        return [item for _, item in sorted(zip(names, items, strict=True))]
    return list(items)


def _relations_equal(gold: str, answer: str) -> bool:
    """Compares two equations as wholes: `y=2x+1` and `2x-y+1=0`."""
    return "=" in gold and "=" in answer and symbolically_equal(gold, answer)
