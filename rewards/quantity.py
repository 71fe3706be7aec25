"""Plain numbers with their unit, exactly: integers, decimals, fractions, percent, powers of ten."""

import re
from dataclasses import dataclass
from fractions import Fraction

from rewards.notation import plain_words

RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""Within which a number equals a gold answer that is a decimal (rule 5 of grading)."""

_MAX_DIGITS = 400
"""Longer numbers and exponents beyond it are left to the symbolic comparison."""

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,3}(?: \d{3})+(?!\d)|\d+)"
_EXPONENT = r"(?:\{\s*%s\s*\}|%s)"
_PREFIX = re.compile(r"(?P<sign>[+-]?)\s*(?P<money>[$€£]?)\s*(?P<inner_sign>[+-]?)\s*")
_FRACTION = re.compile(
    rf"(?:(?P<whole>\d+) *(?=\\frac)|(?P<spaced_whole>\d+) +)?"
    rf"(?:\\frac\s*(?:\{{\s*(?P<top>-?\d+)\s*\}}|(?P<top_digit>\d))"
    rf"\s*(?:\{{\s*(?P<bottom>-?\d+)\s*\}}|(?P<bottom_digit>\d))"
    rf"|(?P<plain_top>{_INTEGER})\s*/\s*(?P<plain_bottom>{_INTEGER}))"
)
_POWER = re.compile(r"10\s*\^\s*(?:\{\s*(?P<braced>[+-]?\d+)\s*\}|(?P<bare>\d))")
_DECIMAL = re.compile(
    rf"(?P<digits>{_INTEGER}(?:\.\d*)?|\.\d+)"
    r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*(?P<braced>[+-]?\d+)\s*\}|(?P<bare>[+-]?\d+))"
    r"|[eE](?P<e>[+-]?\d+))?"
)
_UNIT_ALIASES = {
    "$": "dollar", "usd": "dollar", "€": "euro", "eur": "euro", "£": "pound", "%": "%",
    "°": "degree", "deg": "degree", "meter": "m", "metre": "m", "centimeter": "cm",
    "centimetre": "cm", "millimeter": "mm", "kilometer": "km", "kilometre": "km", "gram": "g",
    "kilogram": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "foot": "ft", "feet": "ft", "inch": "in", "inche": "in", "liter": "l", "litre": "l",
}  # fmt: skip
_KNOWN_UNITS = frozenset(_UNIT_ALIASES.values())
_UNIT_WORDS = re.compile(r"(?P<name>[a-z°$€£%µ][a-z °$€£µ./-]*?)\.?\s?(?P<power>\^\s?-?\d|[²³])?")


@dataclass(frozen=True)
class Quantity:
    """A number; `is_decimal` if it was written with a decimal point; `unit` None if bare."""

    value: Fraction
    is_decimal: bool
    unit: str | None = None


def parse_quantity(text: str) -> Quantity | None:
    """Returns the number that `text` (normalised) is, or None if it is anything else.

    Percent is a factor of 1/100, not a unit.
    """
    prefix = _PREFIX.match(text)
    assert prefix is not None, "every group of the prefix is optional"
    read = _read_number(text, prefix.end())
    if read is None:
        return None
    value, is_decimal, end = read
    unit = _UNIT_ALIASES[prefix["money"]] if prefix["money"] else None
    if text[end:].strip():
        unit = _read_unit(text[end:])
        if unit is None:
            return None
    if unit == "%":
        value, unit = value / 100, None
    negative = (prefix["sign"] == "-") != (prefix["inner_sign"] == "-")
    return Quantity(-value if negative else value, is_decimal, unit)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Returns whether the two agree: exactly, or to a relative 1e-6 if the gold is a decimal.

    A unit on one side only is ignored; two units must agree.
    """
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.value == answer.value:
        return True
    if not gold.is_decimal:
        return False
    return abs(gold.value - answer.value) <= RELATIVE_TOLERANCE * abs(gold.value)


def _read_number(text: str, start: int) -> tuple[Fraction, bool, int] | None:
    """Returns value, whether it is a decimal, and where it ends."""
    if match := _FRACTION.match(text, start):
        value = _fraction(match)
        return None if value is None else (value, False, match.end())
    if match := _POWER.match(text, start):
        value = _power_of_ten(match["braced"] or match["bare"])
        return None if value is None else (value, False, match.end())
    match = _DECIMAL.match(text, start)
    if match is None or len(match["digits"]) > _MAX_DIGITS:
        return None
    digits = match["digits"].replace(",", "").replace(" ", "").rstrip(".")
    power = _power_of_ten(match["braced"] or match["bare"] or match["e"] or "0")
    return None if power is None else (Fraction(digits) * power, "." in digits, match.end())


def _fraction(match: re.Match[str]) -> Fraction | None:
    top = match["top"] or match["top_digit"] or match["plain_top"]
    bottom = match["bottom"] or match["bottom_digit"] or match["plain_bottom"]
    whole = match["whole"] or match["spaced_whole"] or "0"
    if max(len(top), len(bottom), len(whole)) > _MAX_DIGITS or _integer(bottom) == 0:
        return None
    return _integer(whole) + Fraction(_integer(top), _integer(bottom))


def _integer(digits: str) -> int:
    return int(digits.replace(",", "").replace(" ", ""))


def _power_of_ten(exponent: str) -> Fraction | None:
    if len(exponent) > 4 or abs(int(exponent)) > _MAX_DIGITS:
        return None
    return Fraction(10) ** int(exponent)


def _read_unit(rest: str) -> str | None:
    """Returns the unit that `rest` (what follows a number) is, or None if it is no unit.

    Unmarked letters are a unit only after a blank: `5m` may be a product.
    """
    words = plain_words(rest).replace("^\\circ", "°").replace("{", "").replace("}", "")
    words = re.sub(r"\s+", " ", words).strip().casefold()
    if words in ("%", "percent", "per cent"):
        return "%"
    match = _UNIT_WORDS.fullmatch(words)
    if match is None or re.search(r"\b(?:or|and)\b", words):
        return None
    name = match["name"].strip()
    name = _UNIT_ALIASES.get(name) or _UNIT_ALIASES.get(name.rstrip("s")) or name.removesuffix("s")
    marked = "\\text" in rest or not words[0].isalpha()
    spaced = rest[0] == " " and (len(name) > 1 or name in _KNOWN_UNITS)
    if not (marked or spaced):
        return None
    power = (match["power"] or "").replace(" ", "")
    return name + power.replace("²", "^2").replace("³", "^3")
