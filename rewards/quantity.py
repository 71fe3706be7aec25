"""Plain numbers with their unit, exactly: integers, decimals, fractions, percent, powers of ten."""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rewards.notation import plain_words

RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""Within which a number equals a gold answer that is a decimal (rule 5 of grading)."""

_MAX_DIGITS = 4000
"""Longer numbers and exponents beyond it are left to the symbolic comparison."""

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,3}(?: \d{3})+(?!\d)|\d+)"
_PART = rf"\s*[+-]?\s*(?:{_INTEGER}(?:\.\d+)?|\.\d+)\s*"
_MONEY_CODES = {"usd": "$", "eur": "€", "gbp": "£", "inr": "₹", "rs.": "₹", "rs": "₹", "cny": "¥"}
_PREFIX = re.compile(
    r"(?P<sign>[+-]?)\s*"
    r"(?:\\text\s*\{\s*(?P<marked_code>[A-Z]{3}|Rs\.?)\s*\}|(?P<code>USD|EUR|GBP|INR|CNY|Rs\.?)\s)?"
    r"\s*(?P<money>\$|[^\x00-\x7f])?\s*(?P<inner_sign>[+-]?)\s*"
)
_FRACTION = re.compile(
    rf"(?:(?P<whole>\d+) *\{{?(?=\\frac)|(?P<spaced_whole>\d+)(?: +| +and +))?"
    rf"(?:\\frac\s*(?:\{{(?P<top>{_PART})\}}|(?P<top_digit>\d))"
    rf"\s*(?:\{{(?P<bottom>{_PART})\}}|(?P<bottom_digit>\d))\}}?"
    rf"|(?P<plain_top>{_INTEGER})\s*/\s*(?P<plain_bottom>{_INTEGER}))"
)
_POWER = re.compile(r"10\s*\^\s*(?:\{\s*(?P<braced>[+-]?\d+)\s*\}|(?P<bare>\d))")
_REPEATING = re.compile(
    r"(?P<whole>\d*)\.(?P<fixed>\d*)\s*"
    r"\\(?:overline|bar|dot)\s*(?:\{\s*(?P<cycle>\d+)\s*\}|(?P<digit>\d))(?!\s*\\dot)"
)
_DECIMAL = re.compile(
    rf"(?P<digits>{_INTEGER}(?:\.\d*)?|\.\d+)"
    r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*(?P<braced>[+-]?\d+)\s*\}|(?P<bare>[+-]?\d+))"
    r"|[eE](?P<e>[+-]?\d+))?"
)
_NUMBER_WORD = re.compile(
    r"\s*(?:\\text\s*\{\s*)?(?P<word>thousand|million|billion|trillion)\b\s*\}?", re.IGNORECASE
)
_NUMBER_WORDS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNIT_ALIASES = {
    "$": "dollar", "usd": "dollar", "€": "euro", "eur": "euro", "£": "pound", "gbp": "pound",
    "₹": "rupee", "rs": "rupee", "¥": "yen", "%": "%", "pct": "%",
    "°": "degree", "deg": "degree", "meter": "m", "metre": "m", "centimeter": "cm",
    "centimetre": "cm", "millimeter": "mm", "kilometer": "km", "kilometre": "km", "gram": "g",
    "kilogram": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "foot": "ft", "feet": "ft", "inch": "in", "inche": "in", "liter": "l", "litre": "l",
}  # fmt: skip
_UNIT_FRACTION = re.compile(
    r"\\frac\s*\{([^{}]*\{[^{}]*\}[^{}]*|[^{}]*)\}\s*\{([^{}]*\{[^{}]*\}|[^{}]*)\}"
)
_ORDINALS = ("st", "nd", "rd", "th")
_ORDINAL = re.compile(r"^\s*\^\s*\{?\s*(st|nd|rd|th)\s*\}?\s*$")
_KNOWN_UNITS = frozenset(_UNIT_ALIASES.values())
_GLUED_UNITS = frozenset({"m", "cm", "mm", "km", "g", "kg", "mg", "ml", "l", "ft", "min", "hr"})
_UNIT_WORDS = re.compile(
    r"(?P<name>°?[^\W\d_][^\W\d_ °$%./·-]*(?:[ °./·-]+[^\W\d_]+)*|[°$€£¥₹%'\"]+)"
)
_UNIT = re.compile(rf"{_UNIT_WORDS.pattern}\.?\s?(?P<power>\^\s?-?\d)?")


@dataclass(frozen=True)
class Quantity:
    """A number; `is_decimal` if it was written with a decimal point; `unit` None if bare."""

    value: Fraction
    is_decimal: bool
    unit: str | None = None


def parse_quantity(text: str) -> Quantity | None:
    """Returns the number that `text` (normalised) is, or None if it is anything else.

    Percent is a factor of 1/100, not a unit; `million` and its like are factors too.
    """
    return None if len(text) > 2 * _MAX_DIGITS else _parse(text)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Quantity | None:
    prefix = _PREFIX.match(text)
    assert prefix is not None, "every group of the prefix is optional"
    money = prefix["money"]
    if money and money != "$" and unicodedata.category(money) != "Sc":
        return None
    read = _read_number(text, prefix.end())
    if read is None:
        return None
    value, is_decimal, end = read
    code = prefix["marked_code"] or prefix["code"]
    money = _MONEY_CODES.get(code.casefold(), code.casefold()) if code else money
    unit = _UNIT_ALIASES.get(money, money) if money else None
    if word := _NUMBER_WORD.match(text, end):
        value, end = value * _NUMBER_WORDS[word["word"].casefold()], word.end()
    if text[end:].strip():
        unit = read_unit(text[end:])
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


def read_unit(rest: str) -> str | None:
    """Returns the unit that `rest` (what follows a number) is, or None if it is no unit.

    Unmarked letters are a unit only after a blank, or where they are a common one: `5m` and `5x`
    may be products.
    """
    words = (
        plain_words(_UNIT_FRACTION.sub(r"\1/\2", rest)).replace("^\\circ", "°").replace("° ", "°")
    )
    words = _ORDINAL.sub(r"\1", words).replace("\\cdot", "·").replace("\\Omega", "Ω")
    words = re.sub(r"\s+", " ", re.sub(r"[{}]", "", words)).strip().casefold()
    if words in ("%", "percent", "per cent", "pct"):
        return "%"
    match = _UNIT.fullmatch(words)
    if match is None or re.search(r"\b(?:or|and)\b", words):
        return None
    name = re.sub(r"\s*([·/])\s*", r"\1", match["name"].strip())
    known = _UNIT_ALIASES.get(name) or _UNIT_ALIASES.get(name.rstrip("s"))
    marked = "\\text" in rest or not words[0].isascii() or not words[0].isalpha()
    glued = name in _GLUED_UNITS or name in _ORDINALS
    spaced = rest[0] == " " and (len(name) > 1 or name in _KNOWN_UNITS)
    if not (marked or spaced or glued):
        return None
    return (known or name.removesuffix("s")) + (match["power"] or "").replace(" ", "")


def _read_number(text: str, start: int) -> tuple[Fraction, bool, int] | None:
    """Returns value, whether it is a decimal, and where it ends."""
    if match := _FRACTION.match(text, start):
        value = _fraction(match)
        return None if value is None else (value, False, match.end())
    if match := _POWER.match(text, start):
        value = _power_of_ten(match["braced"] or match["bare"])
        return None if value is None else (value, False, match.end())
    if match := _REPEATING.match(text, start):
        return None if len(match[0]) > _MAX_DIGITS else (_repeating(match), False, match.end())
    match = _DECIMAL.match(text, start)
    if match is None or len(match["digits"]) > _MAX_DIGITS:
        return None
    power = _power_of_ten(match["braced"] or match["bare"] or match["e"] or "0")
    if power is None:
        return None
    return _number(match["digits"]) * power, "." in match["digits"].rstrip("."), match.end()


def _fraction(match: re.Match[str]) -> Fraction | None:
    top = match["top"] or match["top_digit"] or match["plain_top"]
    bottom = match["bottom"] or match["bottom_digit"] or match["plain_bottom"]
    whole = match["whole"] or match["spaced_whole"] or "0"
    if max(len(top), len(bottom), len(whole)) > _MAX_DIGITS or _number(bottom) == 0:
        return None
    return _number(whole) + _number(top) / _number(bottom)


def _repeating(match: re.Match[str]) -> Fraction:
    """0.1 and the cycle 6 is 0.1 + 6/90."""
    fixed, cycle = match["fixed"], match["cycle"] or match["digit"]
    scale = 10 ** len(fixed)
    start = Fraction(int((match["whole"] + fixed) or "0"), scale)
    return start + Fraction(int(cycle), (10 ** len(cycle) - 1) * scale)


def _number(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "").rstrip("."))


def _power_of_ten(exponent: str) -> Fraction | None:
    if len(exponent) > 5 or abs(int(exponent)) > _MAX_DIGITS:
        return None
    return Fraction(10) ** int(exponent)
