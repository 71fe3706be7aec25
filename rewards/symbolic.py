"""Compares one expression, relation, matrix or set with another: math-verify and sympy.

Its reader of LaTeX gives an expression that is not worked out yet. Values at a few points tell
different expressions apart long before algebra would. Heavy input may still hang here: call it
in a process that can be killed.
"""

import logging
import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from rewards.evaluation import is_real, value_at
from rewards.magnitude import (
    certainly_differ,
    has_unworkable_number,
    has_workable_values,
    magnitude,
)
from rewards.quantity import RELATIVE_TOLERANCE

# It warns that its own time limits are off: they need the main thread and SIGALRM, the pool
# of workers that can be killed needs neither.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_DIGITS = 50
"""To which expressions with variables are worked out at a point."""
_CONSTANT_DIGITS = 120
"""To which constants are, beside the digits before the point: `sqrt(10**40 + 1)` is not 10**20."""
_NUM_POINTS = 6
_MAX_SUMMANDS = 1000
_MAX_SYMBOLIC_SUMMANDS = 50
_MAX_SUMMED_DEGREE = 20
_MAX_LENGTH = 4000
_BRACKETS = re.compile(r"[()\[\]{}]")
_MAX_DEPTH = 30
# What the parser takes exponential time over, and how much of it an answer may have.
_COSTLY = (
    (re.compile(r"\||\\[lr]?vert"), 10),
    (re.compile(r"[<>=]|\\(?:le|ge|ne)(?![a-zA-Z])"), 8),
    (re.compile(r"\\(?:int|lim|sum|prod)(?![a-zA-Z])"), 4),
    (re.compile(r"(?:[\^_]\s*\w\s*){8}"), 0),
    (re.compile(r"(?:[-+]\s*){6}|!\s*(?:!\s*){3}"), 0),
)
_DETERMINANT = re.compile(r"\\det|vmatrix", re.IGNORECASE)
_MAX_DETERMINANT_SEPARATORS = 12
# Worked out while they are read: only small numbers and names may stand in them.
_WORKED_OUT = re.compile(
    r"\\(?:binom|choose|gcd|lcm|Gamma|lfloor|lceil|max|min|operatorname|text|mod|bmod|pmod|det)"
    r"(?![a-zA-Z])|vmatrix|\\sqrt\s*\[|\\(?:cup|cap|setminus)(?![a-zA-Z])|[(\[][^()\[\]]*,"
)
_LARGE = re.compile(
    r"\d{6}|\d{2}\s*\^|\^\s*\{?\s*\d{3}|\^\s*\{[^{}]*[\^!]|\^\s*\w\s*\^|\d{3}\s*[)}\s]*!|!\s*[)}\s]*!"
)
_NORMALISATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*\{?\d\}?)?\s*\(?\s*\{?\s*\d+(?:\.\d+)?)\s*\^\\circ"
)
_BASE = re.compile(r"\d\s*_")


def symbolically_equal(gold: str, answer: str) -> bool:
    """Returns whether both can be read and are equal; the gold alone allows a tolerance."""
    gold_expression = read_expression(gold)
    answer_expression = read_expression(answer)
    if gold_expression is None or answer_expression is None:
        return False
    is_decimal = re.search(r"\d\.\d", gold) is not None
    return _equal(gold_expression, answer_expression, is_decimal=is_decimal)


@lru_cache(maxsize=1024)
def read_expression(text: str) -> Any | None:
    """Returns what `text` (LaTeX) says, not worked out, or None if that cannot be read.

    `i` and `e` are the constants unless something sums over them. No plain-text reader is used:
    those evaluate.
    """
    if not text or len(text) > _MAX_LENGTH or _is_costly(text):
        return None
    text = _DEGREES.sub(r"\1\\cdot\\frac{\\pi}{180}", _mixed_numbers_joined(text))
    try:
        latex = normalize_latex(text, _NORMALISATION)
        read = latex2sympy(
            latex, is_real=True, normalization_config=None, conversion_config=_CONVERSION
        )
    except RecursionError:
        raise
    except Exception:  # Every kind of them: the parser has no error class of its own.
        return None
    return _with_constants(read) if isinstance(read, sympy.Basic | sympy.MatrixBase) else None


def real_number(text: str) -> Any | None:
    """Returns the real number (or infinity) that `text` says, worked out, or None."""
    read = read_expression(text)
    if not isinstance(read, sympy.Expr) or read.free_symbols or has_unworkable_number(read):
        return None
    value = _worked_out(read)
    return value if value.is_extended_real else None


def _is_costly(text: str) -> bool:
    if _depth(text) > _MAX_DEPTH or _BASE.search(text):
        return True
    if any(len(pattern.findall(text)) > most for pattern, most in _COSTLY):
        return True
    if _WORKED_OUT.search(text) and _LARGE.search(text):
        return True
    separators = text.count("&") + text.count("\\\\")
    return bool(_DETERMINANT.search(text)) and separators > _MAX_DETERMINANT_SEPARATORS


def _depth(text: str) -> int:
    """Returns how deep brackets are nested; the parser's time doubles with every level."""
    deepest = depth = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _mixed_numbers_joined(text: str) -> str:
    return re.sub(r"(?<![\d/.])(\d+) (\d+)/(\d+)", r"\1\\frac{\2}{\3}", text)


def _with_constants(read: Any) -> Any:
    if isinstance(read, sympy.MatrixBase):
        return sympy.ImmutableDenseMatrix(read.applyfunc(_with_constants))
    if has_unworkable_number(read):
        return read
    bound = {
        symbol
        for part in sympy.preorder_traversal(read)
        for symbol in getattr(part, "bound_symbols", ())
    }
    constants = {"i": sympy.I, "e": sympy.E}
    named = {
        symbol: constants[symbol.name]
        for symbol in read.free_symbols - bound
        if symbol.name in constants
    }
    floats: dict[Any, Any] = {part: sympy.Rational(str(part)) for part in read.atoms(sympy.Float)}
    return read.xreplace({**named, **floats}) if named or floats else read


def _equal(gold: Any, answer: Any, *, is_decimal: bool) -> bool:
    if gold == answer:
        return True
    matrices = [_matrix(side) for side in (gold, answer)]
    if matrices != [None, None]:
        return None not in matrices and _same_matrix(*matrices, is_decimal=is_decimal)
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return _same_value(gold, answer, is_decimal=is_decimal)
    if isinstance(gold, Relational) and isinstance(answer, Relational):
        return _same_relation(gold, answer)
    if isinstance(gold, sympy.And) and isinstance(answer, sympy.And):
        return _same_chain(gold.args, answer.args)
    if isinstance(gold, sympy.Expr) != isinstance(answer, sympy.Expr):
        return False
    if has_unworkable_number(gold) or has_unworkable_number(answer):
        return False
    return verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)


def _matrix(read: Any) -> Any | None:
    """Returns the matrix that `read` is or multiplies out to."""
    if not isinstance(read, sympy.MatrixBase | sympy.MatrixExpr):
        return None
    if has_unworkable_number(read):
        return None
    worked_out = read.doit()
    return worked_out if isinstance(worked_out, sympy.MatrixBase) else None


def _same_matrix(gold: Any, answer: Any, *, is_decimal: bool) -> bool:
    return gold.shape == answer.shape and all(
        _equal(g, a, is_decimal=is_decimal) for g, a in zip(gold.flat(), answer.flat(), strict=True)
    )


def _same_chain(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    """Compares `a < b < c` and its like, whatever their order."""
    if not all(isinstance(relation, Relational) for relation in (*gold, *answer)):
        return False
    return len(gold) == len(answer) and all(any(_same_relation(g, a) for a in answer) for g in gold)


def _same_value(gold: Any, answer: Any, *, is_decimal: bool) -> bool:
    if certainly_differ(magnitude(gold), magnitude(answer)):
        return False
    if has_unworkable_number(gold) or has_unworkable_number(answer):
        return False
    opaque: dict[Any, Any] = {}
    gold, answer = _made_plain(gold, opaque), _made_plain(answer, opaque)
    if gold is None or answer is None:
        return False
    tolerance = float(RELATIVE_TOLERANCE) if is_decimal else None
    if not gold.free_symbols | answer.free_symbols:
        return _same_constant(gold, answer, tolerance)
    return _same_at_points(gold, answer, tolerance)


def _made_plain(expression: Any, opaque: dict[Any, Any]) -> Any | None:
    """Works out sums and the like; unknown functions become variables. None: it cannot be done."""
    if not all(map(_is_short, expression.atoms(sympy.Sum, sympy.Product))):
        return None
    if expression.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative):
        expression = expression.doit()
        if expression.has(sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product):
            return None
    for call in expression.atoms(AppliedUndef):
        opaque.setdefault(call, sympy.Dummy(f"u{len(opaque)}", real=True))
    expression = expression.xreplace(opaque)
    return None if has_unworkable_number(expression) else expression


def _is_short(series: Any) -> bool:
    """Returns whether a sum or product is cheap: few small terms, or a sum with a closed form."""
    for variable, low, high in series.limits:
        count = high - low
        if not (count.is_number and count.is_finite):
            continue
        function = series.function
        most = _MAX_SUMMANDS if function.free_symbols <= {variable} else _MAX_SYMBOLIC_SUMMANDS
        is_short = magnitude(count).high < 40 and low >= 0 and count <= most
        if is_short and has_workable_values(function, variable, low, high):
            continue
        if isinstance(series, sympy.Product) or not function.is_polynomial(variable):
            return False
    return all(
        not series.function.is_polynomial(variable)
        or sympy.degree(series.function, variable) <= _MAX_SUMMED_DEGREE
        for variable, *_ in series.limits
    )


def _same_constant(gold: Any, answer: Any, tolerance: float | None) -> bool:
    gold, answer = _worked_out(gold), _worked_out(answer)
    if gold == answer:
        return True
    if tolerance is None and gold.is_Rational and answer.is_Rational:
        return False
    rough = value_at(gold, {}, _DIGITS)
    if rough is None:
        return False
    whole_digits = 0 if not rough else max(0, int(rough.context.log(abs(rough), 10)))
    if whole_digits > 10 * _CONSTANT_DIGITS:
        return False
    digits = _CONSTANT_DIGITS + whole_digits
    values = value_at(gold, {}, digits), value_at(answer, {}, digits)
    return None not in values and _close(*values, digits=digits, tolerance=tolerance)


def _worked_out(constant: Any) -> Any:
    if constant.is_number and not has_unworkable_number(constant):
        return constant.doit()
    return constant


def _same_at_points(gold: Any, answer: Any, tolerance: float | None) -> bool:
    """Compares at points of both signs, where both are real; else where all variables are positive.

    So `sqrt(1/n)` is `1/sqrt(n)`, and `sqrt(x**2)` is not `x`.
    """
    verdicts: list[bool] = []
    complex_verdicts: list[bool] = []
    for point in _points(gold.free_symbols | answer.free_symbols):
        first, second = value_at(gold, point, _DIGITS), value_at(answer, point, _DIGITS)
        if first is None or second is None:
            continue
        close = _close(first, second, digits=_DIGITS, tolerance=tolerance)
        if is_real(first) and is_real(second):
            verdicts.append(close)
        elif all(value > 0 for value in point.values()):
            complex_verdicts.append(close)
        if not all(verdicts) or not all(complex_verdicts):
            return False
    return len(verdicts) + len(complex_verdicts) >= 2


def _points(symbols: set[Any]) -> Iterator[dict[Any, Any]]:
    """Yields the same points for the same names; the first half positive, the rest mixed."""
    names = sorted(symbols, key=str)
    draw = random.Random(20)
    for index in range(_NUM_POINTS):
        point: dict[Any, Any] = {}
        for symbol in names:
            size = sympy.Rational(draw.randrange(10**6, 3 * 10**6), 10**6 + 3)
            point[symbol] = size if index < _NUM_POINTS // 2 or draw.random() < 0.4 else -size
        yield point


def _close(gold: Any, answer: Any, *, digits: int, tolerance: float | None) -> bool:
    difference, size = abs(gold - answer), max(abs(gold), abs(answer))
    if tolerance is not None and difference <= tolerance * abs(gold) * (1 + 1e-9):
        return True
    return bool(difference <= size * gold.context.mpf(10) ** (20 - digits))


def _same_relation(gold: Any, answer: Any) -> bool:
    """Compares two equations or inequalities: one side of the one is a multiple of the other's."""
    if has_unworkable_number(gold) or has_unworkable_number(answer):
        return False
    kinds = {type(gold), type(answer)}
    strict = {sympy.StrictLessThan, sympy.StrictGreaterThan}
    loose = {sympy.LessThan, sympy.GreaterThan}
    sides = (gold.lhs, gold.rhs, answer.lhs, answer.rhs)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    if len(kinds) > 1 and not (kinds <= strict or kinds <= loose):
        return False
    opaque: dict[Any, Any] = {}
    first, second = (_made_plain(r.lhs - r.rhs, opaque) for r in (gold, answer))
    if first is None or second is None or first.free_symbols != second.free_symbols:
        return False
    rising = (sympy.StrictGreaterThan, sympy.GreaterThan)
    sign = 1 if isinstance(gold, rising) == isinstance(answer, rising) else -1
    if _has_constant_ratio(first, second, sign=None if type(gold) in _SIGNLESS else sign):
        return True
    if type(gold) not in _SIGNLESS or not _is_rational(first) or not _is_rational(second):
        return False
    tops = [sympy.fraction(sympy.together(side))[0] for side in (first, second)]
    return _has_constant_ratio(*tops, sign=None)


_SIGNLESS = (sympy.Equality, sympy.Unequality)


def _is_rational(expression: Any) -> bool:
    return bool(expression.is_rational_function(*expression.free_symbols))


def _has_constant_ratio(first: Any, second: Any, *, sign: int | None) -> bool:
    """Returns whether `first / second` is one number at all points, and of that sign if given."""
    ratios: list[Any] = []
    for point in _points(first.free_symbols):
        top, bottom = value_at(first, point, _DIGITS), value_at(second, point, _DIGITS)
        if top is None or bottom is None or not bottom or not top:
            continue
        ratios.append(top / bottom)
        if not _close(ratios[0], ratios[-1], digits=_DIGITS, tolerance=None):
            return False
    return len(ratios) >= 2 and (sign is None or (is_real(ratios[0]) and ratios[0] * sign > 0))
