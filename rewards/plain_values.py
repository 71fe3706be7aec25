"""Values of a program as plain trees: what a value is, without its methods.

Runs inside a sandbox and outside. It imports next to nothing, because starting a program is what a
test costs most. A tree is what JSON can hold: None, bool, int, float, str, a list for a list, and
an object with one tag for all else.
"""

from __future__ import annotations

import _json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_BIG = 1 << 62
# The only deque of a sandbox may be one that it was sent: hence no import at the top.
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "t": tuple,
    "s": set,
    "z": frozenset,
    "q": lambda items: __import__("collections").deque(items),
}
_MANY = {
    "builtins.tuple": "t",
    "builtins.set": "s",
    "builtins.frozenset": "z",
    "collections.deque": "q",
}
# Types of the standard library that are values: a name, and what makes an equal one.
_BY_ARGUMENTS: dict[str, Callable[[Any], list[Any]]] = {
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.datetime": lambda value: [
        *(value.year, value.month, value.day, value.hour, value.minute, value.second),
        value.microsecond,
    ],
    "datetime.time": lambda value: [value.hour, value.minute, value.second, value.microsecond],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "builtins.range": lambda value: [value.start, value.stop, value.step],
}


def encode(value: Any, opaque: Callable[[Any, Any], Any]) -> Any:
    """Returns the tree of `value`; exact for exact types, whatever methods a subclass overrides.

    Args:
        value: anything.
        opaque: what stands for all that is no plain value; its second argument is the tree of the
            plain value that it is a subclass of, or None.
    """
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is str:
        return value
    if kind is int:
        return value if -_BIG < value < _BIG else {"i": format(value, "x")}
    if kind is list:
        return [encode(each, opaque) for each in value]
    found = _tagged(value, kind, opaque)
    if found is not None:
        return found
    for base, plain in _BASES:
        if issubclass(kind, base):  # Not isinstance: an object may lie about its class.
            return opaque(value, encode(plain(value), opaque))
    return opaque(value, None)


def decode(tree: Any, opaque: Callable[[Any], Any]) -> Any:
    """Returns the value of a tree.

    Args:
        tree: what `encode` made, or what somebody says it made.
        opaque: makes a value of the trees that `encode` was given for what is not plain.

    Raises:
        ValueError, TypeError, KeyError: it is no such tree.
    """
    if type(tree) is list:
        return [decode(each, opaque) for each in tree]
    if type(tree) is not dict:
        return tree
    if len(tree) != 1:
        return opaque(tree)
    [(tag, body)] = tree.items()
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode(each, opaque) for each in body)
    if tag == "d":
        return {decode(key, opaque): decode(each, opaque) for key, each in body}
    if tag == "x":
        return _by_arguments(*body)
    if tag in _SCALARS:
        return _SCALARS[tag](body)
    return opaque(tree)


def dumps(tree: Any) -> str:
    """Returns a tree as one line of ASCII."""
    return "".join(_ENCODER(tree, 0))


def loads(line: str) -> Any:
    """Returns the tree of a line.

    Raises:
        ValueError: it is no JSON, or nests too deep.
    """
    try:
        tree, end = _SCANNER(line, 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    except RecursionError:
        raise ValueError("nests too deep") from None
    if line[end:].strip():
        raise ValueError("more than one value")
    return tree


def _tagged(value: Any, kind: type, opaque: Callable[[Any, Any], Any]) -> Any:
    """Returns the tagged tree of a value whose type is exactly one of those known, or None."""
    if kind is dict:
        pairs = value.items()
        return {"d": [[encode(key, opaque), encode(each, opaque)] for key, each in pairs]}
    name = f"{kind.__module__}.{kind.__qualname__}"
    # A class of the program may carry a known name too.
    if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind:
        return None
    if name in _MANY:
        return {_MANY[name]: [encode(each, opaque) for each in value]}
    if kind is bytes or kind is bytearray:
        return {"b" if kind is bytes else "a": value.hex()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    arguments = _BY_ARGUMENTS.get(name)
    if arguments is None or getattr(value, "tzinfo", None) is not None:
        return None
    return {"x": [name, arguments(value)]}


def _by_arguments(name: str, arguments: list[Any]) -> Any:
    if name not in _BY_ARGUMENTS:
        raise ValueError(f"{name} is no plain type")
    module, _, kind = name.rpartition(".")
    return getattr(__import__(module), kind)(*arguments)


# Subclasses travel as the plain value below: the base's own methods, not those that they override.
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, lambda value: int.__add__(value, 0)),
    (float, lambda value: float.__add__(value, 0.0) if value else 0.0),
    (str, lambda value: str.__str__(value)),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (dict, lambda value: dict(dict.items(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (bytes, lambda value: bytes(bytes.__iter__(value))),
)

_SCALARS: dict[str, Callable[[Any], Any]] = {
    "i": lambda body: int(body, 16),
    "b": lambda body: bytes.fromhex(body),
    "a": lambda body: bytearray.fromhex(body),
    "c": lambda body: complex(*body),
}


class _Scanning:
    """The settings of the standard library's JSON scanner, without importing `json`."""

    strict = False
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is no tree")


_SETTINGS: Any = _Scanning()
_SCANNER: Any = _json.make_scanner(_SETTINGS)
_ENCODER: Any = _json.make_encoder(
    None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True
)
