"""Compares one expression, relation or matrix with another, by math-verify and sympy.

Heavy input hangs here: call it in a process that can be killed.
"""

import logging
import re
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from rewards.quantity import RELATIVE_TOLERANCE

# It warns that its own time limits are off: they need the main thread and SIGALRM, the pool
# of workers that can be killed needs neither.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_EXACT_TOLERANCE = sympy.Rational(1, 10**90)
_BRACKETS = re.compile(r"[()\[\]{}]")
_MAX_DEPTH = 30
_ASTRONOMICAL_EXPONENT = 10**6


def symbolically_equal(gold: str, answer: str) -> bool:
    """Returns whether both can be read and are equal; the gold alone allows a tolerance."""
    gold_expression, answer_expression = read_expression(gold), read_expression(answer)
    if gold_expression is None or answer_expression is None:
        return False
    numbers = _compare_numbers(gold, gold_expression, answer_expression)
    if numbers is not None:
        return numbers
    return verify(
        gold_expression, answer_expression, allow_set_relation_comp=True, timeout_seconds=None
    )


def read_expression(text: str) -> Any | None:
    """Returns what math-verify reads, or None. Its reader of plain text is never used: it evals."""
    if _depth(text) > _MAX_DEPTH:
        return None
    wrapped = f"${_mixed_numbers_joined(text)}$"
    found = parse(
        wrapped,
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # type: ignore[arg-type]
    )
    return found[0] if found else None


def _depth(text: str) -> int:
    """Returns how deep brackets are nested; the parser's time doubles with every level."""
    deepest = depth = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _mixed_numbers_joined(text: str) -> str:
    return re.sub(r"(?<![\d/.])(\d+) (\d+)/(\d+)", r"\1\\frac{\2}{\3}", text)


def _compare_numbers(gold_text: str, gold: Any, answer: Any) -> bool | None:
    """Compares two real or complex constants to 90 digits, relatively; None if either is not one.

    A library that rounds to six decimals takes 1e-20 for 1e-21.
    """
    if not (_is_constant(gold) and _is_constant(answer)):
        return None
    if gold == answer:
        return True
    if _is_astronomical(gold) != _is_astronomical(answer):
        return False
    tolerance = RELATIVE_TOLERANCE if re.search(r"\d\.\d", gold_text) else _EXACT_TOLERANCE
    difference, size = _magnitude(gold - answer), _magnitude(gold)
    if difference is None or size is None:
        return False
    return bool(difference <= sympy.N(tolerance, 100) * size)


def _magnitude(constant: Any) -> Any | None:
    """Returns |constant| to 100 digits, or None where no number comes out."""
    try:
        size = sympy.N(abs(constant), 100)
    except (ArithmeticError, NotImplementedError, TypeError, ValueError):
        return None
    return size if isinstance(size, sympy.Number) and size.is_finite else None


def _is_constant(expression: Any) -> bool:
    return (
        isinstance(expression, sympy.Expr)
        and bool(expression.is_number)
        and not expression.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
    )


def _is_astronomical(expression: Any) -> bool:
    """Returns whether a power or factorial of whole numbers has more than 300,000 digits.

    Such a number takes minutes to work out, and nothing smaller equals it.
    """
    if isinstance(expression, sympy.Pow):
        return _is_at_least(expression.base, 2) and _is_at_least(
            expression.exp, _ASTRONOMICAL_EXPONENT
        )
    if isinstance(expression, sympy.factorial):
        return _is_at_least(expression.args[0], _ASTRONOMICAL_EXPONENT)
    return False


def _is_at_least(expression: Any, bound: int) -> bool:
    """Returns whether a whole number, written out or as a power, is known to reach `bound`."""
    if isinstance(expression, sympy.Integer):
        return int(expression) >= bound
    if isinstance(expression, sympy.factorial):  # n! is at least 2**(n - 1)
        return _is_at_least(expression.args[0], bound.bit_length() + 1)
    if isinstance(expression, sympy.Pow) and _is_at_least(expression.base, 2):
        # For whole numbers >= 2, b**e is at least 2**e and at least e.
        return _is_at_least(expression.exp, bound.bit_length()) or _is_at_least(
            expression.base, bound
        )
    return False
