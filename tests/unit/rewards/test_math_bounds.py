"""How large, and what value: the parts of mathematical comparison that keep bombs cheap."""

import math
import time

import pytest
import sympy
from sympy import E, I, Integer, Pow, Rational, Symbol, cos, exp, factorial, log, pi, sqrt

from rewards import math as graded_math
from rewards.contract import RewardInput
from rewards.evaluation import value_at
from rewards.magnitude import (
    Magnitude,
    certainly_differ,
    has_unworkable_number,
    magnitude,
)
from rewards.symbolic import read_expression

X = Symbol("x", real=True)


@pytest.mark.parametrize(
    "number",
    [
        Integer(3),
        Rational(-7, 3),
        Integer(10) ** 400,
        Pow(2, 1000, evaluate=False),
        Pow(Rational(1, 2), 50, evaluate=False),
        Pow(3, Rational(-5, 2), evaluate=False),
        factorial(20, evaluate=False),
        factorial(0, evaluate=False),
        pi * 5,
        pi - 3,
        sqrt(2) - 1,
        sqrt(2) + sqrt(3),
        exp(10),
        exp(-10),
        E**pi,
        log(1000),
        cos(1),
        -factorial(5, evaluate=False) * pi,
    ],
    ids=str,
)
def test_bounds_hold_what_they_bound(number: sympy.Expr) -> None:
    bounds = magnitude(number)
    value = sympy.N(number, 30)
    size = float(sympy.log(abs(value), 2).evalf(30))
    assert bounds.low <= size <= bounds.high
    assert bounds.sign in (None, 1 if value > 0 else -1)


def test_a_tower_is_bounded_without_being_worked_out() -> None:
    def size(text: str) -> Magnitude:
        return magnitude(read_expression(text))

    # 9**(9**9) has 9**9 * log2(9) = 387420489 * 3.1699 = 1.228e9 binary digits.
    assert size("9^{9^9}").low == pytest.approx(387420489 * math.log2(9), rel=1e-6)
    assert certainly_differ(size("9^{9^9}"), size("3"))
    assert certainly_differ(size(r"\frac{1}{9^{9^9}}"), size("0"))
    assert not certainly_differ(size("9^{9^9}"), size("9^{9^9}+1"))


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^9}",
        "-9^{9^9}",
        "x^{9^{9^9}}",
        r"\sqrt{9^{9^9}}",
        r"\frac{1}{9^{9^9}}",
        "x+9^{9^9}",
        "x<9^{9^9}",
        "(10^9)!",
    ],
)
def test_giants_are_seen_wherever_they_stand(text: str) -> None:
    assert has_unworkable_number(read_expression(text))


def test_ordinary_numbers_are_workable() -> None:
    for number in (Integer(7), Pow(2, 1000, evaluate=False), X**100, factorial(2000)):
        assert not has_unworkable_number(number)


def test_values_are_those_of_the_expression() -> None:
    assert value_at(X**2 + 1, {X: Rational(3)}, 30) == 10
    assert value_at(1 / X, {X: Rational(0)}, 30) is None
    assert abs(value_at(exp(I * pi), {}, 30) + 1) < 1e-29
    # 1 + 1/(1 + 1/(1 + ...)) of 40 levels is a quotient of neighbouring Fibonacci numbers.
    nested = sympy.S.One
    for _ in range(40):
        nested = sympy.Add(1, sympy.Pow(nested, -1, evaluate=False), evaluate=False)
    fibonacci = sympy.fibonacci(42) / sympy.fibonacci(41)
    assert abs(value_at(nested, {}, 30) - value_at(fibonacci, {}, 30)) < 1e-29


@pytest.mark.parametrize(
    "answer",
    [
        r"9^{9^{9^{9}}}",
        r"2\cdot 9^{9^{9^9}}",
        r"\sqrt{9^{9^9}}",
        r"\ln((10^9)!)",
        r"x^{9^{9^9}}",
        r"(x+1)^{10^6}",
        r"(x+y+z)^{200}",
        r"\prod_{k=1}^{10^{12}} k",
        r"\sum_{k=1}^{1000} 2^{2^k}",
        r"\gcd(9^{9^9},3)",
        r"\binom{10^{9}}{5\cdot 10^8}",
        r"\lfloor 9^{9^9}\rfloor",
        r"x \in [9^{9^9}, 9^{9^{9^9}}]",
        r"e^{e^{e^{e^{e}}}}",
        "|x|" * 100,
        "-" * 3000 + "5",
        "4+" * 20_000 + "4",
        r"\frac{1}{1+" * 25 + "x" + "}" * 25,
        r"\sqrt{" * 29 + "2" + "}" * 29,
    ],
    ids=lambda answer: answer[:24],
)
def test_bombs_are_wrong_answers_at_little_cost(answer: str) -> None:
    item = RewardInput(f"\\boxed{{{answer}}}", answer="3")
    begin = time.process_time()
    score = graded_math.score(item, graded_math.Config())
    assert (score.value, score.reason) == (0.0, "wrong")
    # The limit is 3 s; the slowest takes 0.5 s, most a few milliseconds.
    assert time.process_time() - begin < 3.0


def test_letters_keep_their_case_and_constants_their_value() -> None:
    assert read_expression("X") != read_expression("x")
    assert read_expression(r"e^{i\pi}") == -1
    assert read_expression(r"\sum_{i=1}^{3} i").doit() == 6
