"""Writes an answer in one notation: the same mathematics, fewer ways to spell it."""

import re

_CHARACTERS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": "\\times ",
        "·": "\\cdot ",
        "÷": "/",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "±": "\\pm ",
        "∪": "\\cup ",
        "∈": "\\in ",
        "°": "^\\circ ",
        "％": "%",
        "，": ",",
        "（": "(",
        "）": ")",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
    }
)
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\begin\{(?:bmatrix|smallmatrix|array|matrix)\}(?:\{[lcr| ]*\})?", r"\\begin{pmatrix}"),
        (r"\\end\{(?:bmatrix|smallmatrix|array|matrix)\}", r"\\end{pmatrix}"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right|m?middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),
        (r"\\l?brace(?![a-zA-Z])|\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:displaystyle|textstyle|limits|mathstrut)(?![a-zA-Z])", ""),
        (r"\\leqs?lant(?![a-zA-Z])|\\leq(?![a-zA-Z])", r"\\le "),
        (r"\\geqs?lant(?![a-zA-Z])|\\geq(?![a-zA-Z])", r"\\ge "),
        (r"\\neq(?![a-zA-Z])", r"\\ne "),
        (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset "),
        (r"^(?:\\approx|\\simeq|≈)\s*", ""),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\ne "),
        (r"\\(?:degree|textdegree)(?![a-zA-Z])", r"^\\circ "),
        (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        (r"\\(?:infin|infty)(?![a-zA-Z])", r"\\infty "),
        (
            r"\\(?:textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|operatorname|mbox)"
            r"(?=\s*\{)",
            r"\\text",
        ),
        (r"\\[,;:!>]", " "),
        (r"\\q?quad(?![a-zA-Z])|\\ |~", " "),
        (r"\\%", "%"),
        (r"\\\$", "$"),
        (r"\\cdotp?(?![a-zA-Z])", r"\\cdot "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d)(?!\])", r"\\sqrt{\1}"),
        (r"(?<=\d)\{,\}(?=\d)", ","),
    )
]
_DELIMITERS = (("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ("__", "__"))
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_JOINING_WORD = re.compile(r"\b(?:or|and)\b")
_INNER_MATH = re.compile(r"(?<![\\\d])\$([^$]+)\$")


def normalise(answer: str) -> str:
    r"""Returns `answer` in one notation; never raises.

    Markup around the answer, spacing commands, synonyms of one symbol and a final full stop go;
    meaning stays. Words in `\text{}` stay marked as words.
    """
    text = _without_delimiters(answer.strip())
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _TEXT.sub(_joining_word_unwrapped, text)
    text = re.sub(r"\s+", " ", text).strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    return _without_delimiters(text)


def plain_words(text: str) -> str:
    r"""Returns the text without `\text{}` around its words."""
    previous = None
    while previous != text:
        previous, text = text, re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    return text.strip()


def split_top_level(text: str, separator: re.Pattern[str]) -> list[str]:
    """Splits at matches of `separator` outside all brackets and braces; linear."""
    parts: list[str] = []
    depth, start, position = 0, 0, 0
    while position < len(text):
        character = text[position]
        match = separator.match(text, position) if depth == 0 else None
        if match and match.end() > position:
            parts.append(text[start:position].strip())
            start = position = match.end()
            continue
        if character == "\\" and text[position + 1 : position + 2] in ("{", "}"):
            position += 1
            character = text[position]
        depth += (character in "([{") - (character in ")]}")
        position += 1
    return [*parts, text[start:].strip()]


def _joining_word_unwrapped(match: re.Match[str]) -> str:
    return f" {match[1]} " if _JOINING_WORD.search(match[1]) else match[0]


def _without_delimiters(text: str) -> str:
    """Strips math delimiters and Markdown that wrap the whole answer, or the one span in prose."""
    changed = True
    while changed:
        changed = False
        for opening, closing in _DELIMITERS:
            size = len(opening) + len(closing)
            if len(text) > size and text.startswith(opening) and text.endswith(closing):
                text, changed = text[len(opening) : -len(closing)].strip(), True
    spans = _INNER_MATH.findall(text)
    if len(spans) == 1 and text.count("$") == 2:
        around = text.replace(f"${spans[0]}$", " ").strip(" .,:")
        if re.fullmatch(r"[A-Za-z ,:']*", around):
            return spans[0].strip()
    return text
