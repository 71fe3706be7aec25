"""The value of an expression at a point: one pass over its tree, in time linear in its size.

sympy's own evaluation repeats itself to gain digits, which nested fractions turn into minutes.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import mpmath
import sympy

_GUARD_DIGITS = 30
"""Digits worked with beyond those asked for: what differences of equal terms may eat."""
_MAX_EXPONENT = 10**9
_FUNCTIONS = {
    sympy.exp: "exp", sympy.sin: "sin", sympy.cos: "cos", sympy.tan: "tan", sympy.cot: "cot",
    sympy.sec: "sec", sympy.csc: "csc", sympy.asin: "asin", sympy.acos: "acos",
    sympy.atan: "atan", sympy.acot: "acot", sympy.asec: "asec", sympy.acsc: "acsc",
    sympy.sinh: "sinh", sympy.cosh: "cosh", sympy.tanh: "tanh", sympy.coth: "coth",
    sympy.asinh: "asinh", sympy.acosh: "acosh", sympy.atanh: "atanh", sympy.Abs: "fabs",
    sympy.factorial: "factorial", sympy.gamma: "gamma", sympy.binomial: "binomial",
    sympy.floor: "floor", sympy.ceiling: "ceil", sympy.re: "re", sympy.im: "im",
    sympy.arg: "arg", sympy.conjugate: "conj", sympy.sign: "sign", sympy.zeta: "zeta",
    sympy.erf: "erf", sympy.log: "log",
}  # fmt: skip
_LARGE_ARGUMENTS = {"factorial", "gamma", "binomial", "zeta"}
_MAX_ARGUMENT = 10**5
_local = threading.local()


class _Undefined(ValueError):
    """Division by zero, or a function that is not known here."""


def value_at(expression: Any, point: Mapping[Any, Any], digits: int) -> Any | None:
    """Returns the finite number (mpf, or mpc if not real) that `expression` is, or None.

    `point` gives every variable a rational number.
    """
    numbers = _context(digits + _GUARD_DIGITS)
    known = {symbol: numbers.mpf(int(v.p)) / int(v.q) for symbol, v in point.items()}
    try:
        value = _value(expression, known, numbers)
    except (ArithmeticError, TypeError, ValueError, NotImplementedError):
        return None
    value = numbers.mpmathify(value)
    if not numbers.isfinite(value):
        return None
    imaginary = numbers.im(value)
    is_real = abs(imaginary) <= numbers.mpf(10) ** (-digits) * (1 + abs(numbers.re(value)))
    return numbers.re(value) if is_real else value


def is_real(value: Any) -> bool:
    """Returns whether a number of `value_at` is real."""
    return isinstance(value, value.context.mpf)


def _context(digits: int) -> Any:
    """Returns this thread's own arithmetic: precision is a setting of it, not of a number."""
    if not hasattr(_local, "numbers"):
        _local.numbers = mpmath.MPContext()
    _local.numbers.dps = digits
    return _local.numbers


def _value(expression: Any, point: Mapping[Any, Any], numbers: Any) -> Any:
    if expression in point:
        return point[expression]
    if isinstance(expression, sympy.Rational):
        return numbers.mpf(int(expression.p)) / int(expression.q)
    constant = _CONSTANTS.get(expression)
    if constant is not None:
        return constant(numbers)
    arguments = [_value(part, point, numbers) for part in expression.args]
    if isinstance(expression, sympy.Add):
        return numbers.fsum(arguments)
    if isinstance(expression, sympy.Mul):
        return numbers.fprod(arguments)
    if isinstance(expression, sympy.Pow):
        return _power(*arguments, numbers=numbers)
    if isinstance(expression, sympy.Max | sympy.Min):
        return (max if isinstance(expression, sympy.Max) else min)(arguments)
    name = _FUNCTIONS.get(expression.func)
    if name is None:
        raise _Undefined(f"{expression.func} is unknown")
    if name in _LARGE_ARGUMENTS and any(abs(argument) > _MAX_ARGUMENT for argument in arguments):
        raise _Undefined("too large an argument")
    return getattr(numbers, name)(*arguments)


def _power(base: Any, exponent: Any, *, numbers: Any) -> Any:
    if abs(exponent) > _MAX_EXPONENT:
        raise _Undefined("too large an exponent")
    if exponent == -1:
        return 1 / base
    whole = numbers.isint(exponent) and abs(exponent) < 10**6
    return base ** int(numbers.re(exponent)) if whole else numbers.power(base, exponent)


_CONSTANTS: dict[Any, Callable[[Any], Any]] = {
    sympy.pi: lambda numbers: +numbers.pi,
    sympy.E: lambda numbers: +numbers.e,
    sympy.I: lambda numbers: numbers.mpc(0, 1),
    sympy.EulerGamma: lambda numbers: +numbers.euler,
    sympy.GoldenRatio: lambda numbers: +numbers.phi,
}
