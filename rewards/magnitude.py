"""How large a number is, without working it out: bounds of its binary logarithm.

So that a tower of powers or a giant factorial is told from an ordinary answer in microseconds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import sympy

WORKABLE_BITS = 1 << 17
"""Numbers of more binary digits, or that much smaller than 1, are never worked out."""

_CAP = 1e300
_INFINITY = math.inf
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Magnitude:
    """A real or complex number x with `low <= log2|x| <= high`; `sign` is None if unknown.

    Zero has both bounds at minus infinity.
    """

    low: float
    high: float
    sign: int | None = None

    @property
    def is_zero(self) -> bool:
        """Whether the number is known to be zero."""
        return self.high == -_INFINITY


_ZERO = Magnitude(-_INFINITY, -_INFINITY, 0)
_ONE = Magnitude(0.0, 0.0, 1)
_ANY = Magnitude(-_INFINITY, _INFINITY)
_NOTHING: Mapping[Any, Magnitude] = {}


def magnitude(expression: Any, known: Mapping[Any, Magnitude] = _NOTHING) -> Magnitude:
    """Returns bounds that hold for certain, wide ones where nothing is `known` of a variable."""
    if expression in known:
        return known[expression]
    if isinstance(expression, sympy.Number):
        return _of_number(expression)
    if expression in (sympy.pi, sympy.E, sympy.I):
        size = {sympy.pi: math.log2(math.pi), sympy.E: math.log2(math.e)}.get(expression, 0.0)
        return Magnitude(size, size, None if expression is sympy.I else 1)
    reader = _READERS.get(type(expression))
    return _ANY if reader is None else reader([magnitude(part, known) for part in expression.args])


def has_unworkable_number(expression: Any) -> bool:
    """Returns whether any constant inside `expression` is too large to be worked out."""
    return any(
        not _is_workable(part)
        for part in sympy.preorder_traversal(expression)
        if isinstance(part, sympy.Expr) and type(part) in _READERS
    )


def has_workable_values(function: Any, variable: Any, low: Any, high: Any) -> bool:
    """Returns whether all that `function` computes from `low <= variable <= high` is workable.

    `low` is not negative. What other variables take part in is not looked at.
    """
    largest = magnitude(high)
    smallest = magnitude(low).low if low > 0 else -_INFINITY
    known = {variable: Magnitude(smallest, largest.high, 1)}
    return all(
        magnitude(part, known).high <= WORKABLE_BITS
        for part in sympy.preorder_traversal(function)
        if isinstance(part, sympy.Expr) and part.free_symbols <= {variable}
    )


def certainly_differ(first: Magnitude, second: Magnitude) -> bool:
    """Returns whether two numbers of these sizes cannot be equal."""
    if first.is_zero or second.is_zero:
        other = second if first.is_zero else first
        return other.low > -_INFINITY
    apart = first.low > second.high + 1.0 or second.low > first.high + 1.0
    signs = first.sign is not None and second.sign is not None and first.sign != second.sign
    return apart or (signs and first.low > -_INFINITY and second.low > -_INFINITY)


def _is_workable(expression: Any) -> bool:
    size = magnitude(expression)
    if size.low > WORKABLE_BITS or (size.high < -WORKABLE_BITS and not size.is_zero):
        return False
    exponent = expression.exp if isinstance(expression, sympy.Pow) else sympy.S.One
    return magnitude(exponent).low <= math.log2(WORKABLE_BITS)


def _of_number(number: Any) -> Magnitude:
    if number.is_zero:
        return _ZERO
    if not number.is_finite:
        return _ANY
    sign = 1 if number.is_positive else -1
    if isinstance(number, sympy.Rational):
        return _widened(math.log2(abs(int(number.p))) - math.log2(int(number.q)), sign=sign)
    high = float(mpmath.mag(mpmath.mpf(number)))
    return Magnitude(high - 3.0, high, sign)


def _product(factors: Sequence[Magnitude]) -> Magnitude:
    low = high = 0.0
    sign: int | None = 1
    for factor in factors:
        if factor.is_zero:
            return _ZERO
        low, high = low + factor.low, high + factor.high
        sign = None if sign is None or factor.sign is None else sign * factor.sign
    return _widened(low, high, sign=sign)


def _sum(terms: Sequence[Magnitude]) -> Magnitude:
    terms = [term for term in terms if not term.is_zero]
    if not terms:
        return _ZERO
    high = max(term.high for term in terms) + math.log2(len(terms))
    signs = {term.sign for term in terms}
    if len(signs) == 1 and None not in signs:
        return _widened(max(term.low for term in terms), high, sign=terms[0].sign)
    largest = max(terms, key=lambda term: term.low)
    others = max((term.high for term in terms if term is not largest), default=-_INFINITY)
    if largest.low > others + math.log2(len(terms)) + 1.0:
        sign = None if None in signs else largest.sign
        return _widened(largest.low - 1.0, high, sign=sign)
    return Magnitude(-_INFINITY, high)


def _power(parts: Sequence[Magnitude]) -> Magnitude:
    base, exponent = parts
    if base.is_zero or exponent.sign is None:
        return _ONE if exponent.is_zero else _ANY
    # log2|b**e| is e * log2|b|; an unknown sign of the base may turn it complex, not larger.
    value = _value(exponent)
    products = [_times(v, size) for v in value for size in (base.low, base.high)]
    sign = 1 if base.sign == 1 else None
    return _widened(min(products), max(products), sign=sign)


def _exponential(parts: Sequence[Magnitude]) -> Magnitude:
    size = math.log2(math.e)
    return _power([Magnitude(size, size, 1), parts[0]])


def _factorial(parts: Sequence[Magnitude]) -> Magnitude:
    (n,) = parts
    if n.sign != 1:
        return _ONE if n.is_zero else _ANY
    low, high = _value(n)
    return _widened(_log2_factorial(low) - 1.0, _log2_factorial(high) + 1.0, sign=1)


def _gamma(parts: Sequence[Magnitude]) -> Magnitude:
    size = _factorial(parts)
    return size if size is _ANY else Magnitude(size.low / 2 - 1.0, size.high + 1.0, 1)


def _bounded(parts: Sequence[Magnitude]) -> Magnitude:
    """Sine and cosine of a real number."""
    (part,) = parts
    return Magnitude(-_INFINITY, 0.0) if part.sign is not None else _ANY


def _absolute(parts: Sequence[Magnitude]) -> Magnitude:
    return Magnitude(parts[0].low, parts[0].high, 0 if parts[0].is_zero else 1)


def _logarithm(parts: Sequence[Magnitude]) -> Magnitude:
    """The natural one; of base 2 or more it is no larger."""
    size = max(abs(parts[0].low), abs(parts[0].high))
    base_is_large = len(parts) == 1 or parts[1].low >= 1.0
    if parts[0].sign != 1 or size in (0.0, _INFINITY) or not base_is_large:
        return _ANY
    return Magnitude(-_INFINITY, math.log2(size) + 1.0)


def _rounded(parts: Sequence[Magnitude]) -> Magnitude:
    return Magnitude(-_INFINITY, max(parts[0].high, 0.0) + 1.0)


def _binomial(parts: Sequence[Magnitude]) -> Magnitude:
    """At most 2**n for whole numbers."""
    n = parts[0]
    return Magnitude(-_INFINITY, _value(n)[1]) if n.sign == 1 else _ANY


_READERS = {
    sympy.Mul: _product,
    sympy.Add: _sum,
    sympy.Pow: _power,
    sympy.exp: _exponential,
    sympy.factorial: _factorial,
    sympy.gamma: _gamma,
    sympy.sin: _bounded,
    sympy.cos: _bounded,
    sympy.Abs: _absolute,
    sympy.log: _logarithm,
    sympy.floor: _rounded,
    sympy.ceiling: _rounded,
    sympy.binomial: _binomial,
}


def _value(size: Magnitude) -> tuple[float, float]:
    """Returns bounds of the number itself, whose sign is known."""
    if size.is_zero:
        return 0.0, 0.0
    low, high = (2.0**bound if bound < 996 else _CAP for bound in (size.low, size.high))
    high = _INFINITY if size.high >= 996 else high
    return (low, high) if size.sign == 1 else (-high, -low)


def _times(factor: float, size: float) -> float:
    return 0.0 if factor == 0.0 or size == 0.0 else factor * size


def _log2_factorial(n: float) -> float:
    return math.lgamma(n + 1.0) / math.log(2.0)


def _widened(low: float, high: float | None = None, *, sign: int | None) -> Magnitude:
    """Makes room for rounding."""
    high = low if high is None else high
    if math.isnan(low) or math.isnan(high):
        return _ANY
    return Magnitude(low - abs(low) * _SLACK - _SLACK, high + abs(high) * _SLACK + _SLACK, sign)
