"""Compares what a program printed or returned with what was expected, outside of the sandbox."""

import math
from typing import Any, cast

from rewards.plain_values import dumps

_TOLERANCE = 1e-6
"""Absolute or relative, for tests declared as float."""

Tree = Any


def same_output(expected: str, printed: str, *, is_float: bool) -> bool:
    """Whether two texts are the same lines; trailing blanks and trailing empty lines are ignored.

    With `is_float` the words of a line that are numbers in both texts need only be close.
    """
    wanted, got = _lines(expected), _lines(printed)
    if wanted == got:
        return True
    if not is_float or len(wanted) != len(got):
        return False
    return all(_same_words(a.split(), b.split()) for a, b in zip(wanted, got, strict=True))


def same_value(expected: Tree, returned: Tree, *, from_python: bool, is_float: bool) -> bool:
    """Whether two trees of plain values are the same value.

    An int equals the float of the same size (3 is 3.0), and -0.0 equals 0.0. If the expectation
    was written in Python, the rest is as Python's `==` has it: True is 1, a tuple is no list, NaN
    equals nothing. If it was written in JSON, which has one kind of sequence and only strings for
    keys, a tuple may be returned for a list, and a key 1 for "1"; a bool is no int, and NaN equals
    NaN. What is no plain value equals nothing.

    Args:
        expected: a tree of the data set.
        returned: a tree that a hostile process wrote; one that is malformed equals nothing.
        from_python: where the expectation comes from.
        is_float: floats need only be close.
    """
    try:
        return _Comparison(from_python, is_float).same(expected, returned)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError):
        return False


class _Comparison:
    """The rules of one comparison."""

    def __init__(self, from_python: bool, is_float: bool) -> None:
        self._from_python = from_python
        self._is_float = is_float

    def same(self, expected: Tree, returned: Tree) -> bool:
        wanted, got = self._kind(expected), self._kind(returned)
        if wanted != got or wanted == "o":
            return False
        if wanted == "number":
            return self._same_number(_number(expected), _number(returned))
        if wanted in ("list", "t", "q"):
            left, right = _items(expected), _items(returned)
            return len(left) == len(right) and all(map(self.same, left, right))
        if wanted == "d":
            return self._same_dict(expected["d"], returned["d"])
        return self._canonical(expected) == self._canonical(returned)

    def _kind(self, tree: Tree) -> str:
        if type(tree) is bool and not self._from_python:
            return "bool"
        if type(tree) in (bool, int, float):
            return "number"
        if type(tree) is list:
            return "list"
        if type(tree) is not dict:
            return "scalar"
        tag = next(iter(cast(dict[str, Any], tree)), "")
        if tag == "i":
            return "number"
        if tag in ("t", "q") and not self._from_python:
            return "list"
        # A frozenset equals the set of its items.
        return "s" if tag == "z" else tag

    def _same_number(self, expected: float, returned: float) -> bool:
        if expected == returned:
            return True
        if math.isnan(expected) and math.isnan(returned):
            return not self._from_python
        return self._is_float and _close(expected, returned)

    def _same_dict(self, expected: list[Any], returned: list[Any]) -> bool:
        wanted = {self._key(key): value for key, value in expected}
        got = {self._key(key): value for key, value in returned}
        same_keys = wanted.keys() == got.keys() and len(got) == len(returned)
        return same_keys and all(self.same(value, got[key]) for key, value in wanted.items())

    def _key(self, tree: Tree) -> str:
        if not self._from_python and type(tree) in (int, float, bool, type(None)):
            return "scalar" + dumps(dumps(tree))
        return self._canonical(tree)

    def _canonical(self, tree: Tree) -> str:
        """Returns a text that equal values share; only values without tolerance have one."""
        kind = self._kind(tree)
        if kind == "number":
            number = _number(tree)
            whole = type(number) is float and number.is_integer()
            return format(int(number), "x") if whole or type(number) is not float else repr(number)
        if kind == "s":
            items: list[Any] = next(iter(tree.values()))
            return "s(" + ",".join(sorted(self._canonical(item) for item in items)) + ")"
        if kind in ("list", "t", "q"):
            return kind + "(" + ",".join(self._canonical(item) for item in _items(tree)) + ")"
        return kind + dumps(tree)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_words(expected: list[str], printed: list[str]) -> bool:
    if len(expected) != len(printed):
        return False
    return all(
        wanted == got or _close(_float(wanted), _float(got))
        for wanted, got in zip(expected, printed, strict=True)
    )


def _float(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _close(expected: float, returned: float) -> bool:
    try:
        return math.isclose(expected, returned, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # An int beyond all floats.
        return False


def _number(tree: Tree) -> Any:
    return int(tree["i"], 16) if type(tree) is dict else tree


def _items(tree: Tree) -> list[Any]:
    items: Any = tree if type(tree) is list else next(iter(tree.values()), None)
    if type(items) is not list:
        raise TypeError("no list of items")
    return cast(list[Any], items)
