"""Writes an answer in one notation: the same mathematics, fewer ways to spell it."""

import re
import unicodedata

_SYMBOLS = {
    "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "∙": "\\cdot ", "÷": "/", "∕": "/",
    "−": "-", "∞": "\\infty ", "≤": "\\le ", "≦": "\\le ", "⩽": "\\le ", "≥": "\\ge ",
    "≧": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ",
    "∩": "\\cap ", "∖": "\\setminus ", "∈": "\\in ", "→": "\\to ", "°": "^\\circ ",
    "∅": "\\emptyset ", "⌀": "\\emptyset ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}",
    "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "∧": "\\land ", "∨": "\\lor ",
    "⟨": "\\langle ", "⟩": "\\rangle ", "∣": "|", "∶": ":", "≈": "\\approx ", "∑": "\\sum ",
    "∏": "\\prod ", "∫": "\\int ", "∘": "^\\circ ", "⁄": "/", "。": ".", "、": ",", "⋯": "...",
    "٫": ".", "٬": ",", "′": "'", "″": "''",
}  # fmt: skip
_GREEK = {
    chr(code): f"\\{name.rsplit(' ', 1)[-1].lower()} "
    for code in range(0x3B1, 0x3CA)
    if "FINAL" not in (name := unicodedata.name(chr(code)))
}
_ROOTS = ((re.compile(r"√\s*(\d+|[A-Za-z])"), r"\\sqrt{\1}"), (re.compile("√"), r"\\sqrt"))
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!", ""),
        (r"\\begin\{([bB]matrix|smallmatrix|array|matrix)\}(?:\{[lcr| ]*\})?", r"\\begin{pmatrix}"),
        (r"\\end\{(?:[bB]matrix|smallmatrix|array|matrix)\}", r"\\end{pmatrix}"),
        (r"\\cr(?![a-zA-Z])|\\\\\s*\[[\d.]+\s*[a-z]{2}\]", r"\\\\"),
        (r"\\\\\s*(?=\\end|$)", ""),
        (r"\\\\", "\0"),
        (r"\\(?:hspace|vspace|label|tag|phantom|hphantom|vphantom)\*?\s*\{[^{}]*\}", " "),
        (r"\\(?:textcolor|color)\s*\{[^{}]*\}", ""),
        (r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|bf|rm|it|cal)(?![a-zA-Z])", ""),
        (r"\\(?:underline|boldsymbol|bm|pmb|framebox|fbox|boxed|mathsf|ensuremath)(?=\s*\{)", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\\(?:left|right)\s*(?=[\[\]])", ""),
        (r"\\(?:left|right|m?middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),
        (r"\\l?brace(?![a-zA-Z])|\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\(?:displaystyle|textstyle|limits|mathstrut)(?![a-zA-Z])", ""),
        (r"\\leqs?lant(?![a-zA-Z])|\\leq(?![a-zA-Z])", r"\\le "),
        (r"\\geqs?lant(?![a-zA-Z])|\\geq(?![a-zA-Z])", r"\\ge "),
        (r"\\neq(?![a-zA-Z])", r"\\ne "),
        (r"\\vee(?![a-zA-Z])", r"\\lor "),
        (r"\\wedge(?![a-zA-Z])", r"\\land "),
        (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset "),
        (r"\\varphi(?![a-zA-Z])", r"\\phi "),
        (r"^(?:\\approx|\\simeq)\s*", ""),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\ne "),
        (r"\+/-", r"\\pm "),
        (r"\\(?:degree|textdegree)(?![a-zA-Z])", r"^\\circ "),
        (r"\^\s*\{\s*\\circ\s*\}|(?<=\d)\s*\^\s*(?:\\text\{o\}|\{o\}|o$)", r"^\\circ "),
        (r"\\(?:infin|infty)(?![a-zA-Z])", r"\\infty "),
        (r"\\(?:ldots|cdots|dots|dotsc|dotsb|vdots)(?![a-zA-Z])|\.\.\.+", r"\\ldots "),
        (r"\\(?:math(?:rm|bf)|operatorname)\s*\{([ei])\}", r"\1"),
        (r"\\mathbf\s*\{([RZNQC])\}", r"\\mathbb{\1}"),
        (
            r"\\(?:textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|operatorname|mbox|unit)"
            r"(?=\s*\{)",
            r"\\text",
        ),
        (r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1\\text{ \2}"),
        (r"\\(?:pounds|textsterling)(?![a-zA-Z])", "£"),
        (r"\\(?:euro|texteuro)(?![a-zA-Z])", "€"),
        (r"\\(?:mathdollar|textdollar)(?![a-zA-Z])|\bUS\s*\\?\$", "$"),
        (r"\{:\}|\\colon(?![a-zA-Z])", ":"),
        (r"\\[,;:>]", " "),
        (r"\\q?quad(?![a-zA-Z])|\\(?=\s|$)|~", " "),
        (r"\\%", "%"),
        (r"\\\$", "$"),
        (r"\\cdotp?(?![a-zA-Z])", r"\\cdot "),
        (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({\\-])", "^"),
        (r"(?<![\\a-zA-Z])sqrt\s*(?=[({])", r"\\sqrt"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d)(?!\])", r"\\sqrt{\1}"),
        (r"(\\sqrt\s*\[[^\[\]]*\])\s*(\w)", r"\1{\2}"),
        (r"(?<=\d)\{,\}(?=\d)", ","),
        (r"\{([-+])\}", r"\1"),
        ("\0", r"\\\\"),
    )
]
_DELIMITERS = (("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ("__", "__"))
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_ALTERNATIVES = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![A-Za-z])", re.IGNORECASE)
_JOINING_WORD = re.compile(r"\b(?:or|and)\b")
_INNER_MATH = re.compile(r"(?<![\\\d])\$([^$]+)\$")
_LEAD_IN = re.compile(
    r"\*{0,2}(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answer"
    r"\s*(?:\bis\b|[:=])\s*:?\*{0,2}\s*(?=\S)",
    re.IGNORECASE,
)
_BOLD = re.compile(r"(?<![\w)}*])\*\*(?=[^\s*])([^*]+)\*\*(?![\w({])")


def normalise(answer: str) -> str:
    r"""Returns `answer` in one notation; never raises.

    Markup around the answer, spacing commands, synonyms of one symbol, digits and signs of other
    scripts and a final full stop go; meaning stays. Words in `\text{}` stay marked as words.
    """
    text = _without_delimiters(in_ascii(answer.replace("\0", "")).strip())
    text = _BOLD.sub(r"\1", _without_delimiters(_without_lead_in(text).strip()))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _TEXT.sub(_joining_word_unwrapped, text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(",; ")
    if text.endswith((".", ".}")) and not text.endswith(".."):
        text = text.removesuffix("\\text{.}").removesuffix(".").rstrip()
    return _without_delimiters(text)


def in_ascii(text: str) -> str:
    r"""Returns `text` with characters of mathematics and of other scripts spelt in ASCII.

    Digits of any script, dashes, blanks, fractions (`½`), raised and lowered digits, Greek
    letters. Invisible characters go; letters, currency signs and what has no spelling stay.
    """
    if text.isascii():
        return text
    for pattern, replacement in _ROOTS:
        text = pattern.sub(replacement, text)
    spelt: list[str] = []
    script = ""
    for character in text:
        kind, written = _spelt(character)
        if script and kind != script:
            spelt.append("}")
        if kind and kind != script:
            spelt.append(kind + "{")
        script = kind
        if written[:1].isdigit() and "/" in written and spelt and spelt[-1][-1:].isdigit():
            spelt.append(" ")
        spelt.append(written)
    return "".join([*spelt, "}" if script else ""])


def plain_words(text: str) -> str:
    r"""Returns the text without `\text{}` around its words."""
    previous = None
    while previous != text:
        previous, text = text, re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    return text.strip()


def says_or(text: str) -> bool:
    """Returns whether `text` (normalised) offers alternatives: `3 or 4`."""
    return _ALTERNATIVES.search(plain_words(text)) is not None


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


def _without_lead_in(text: str) -> str:
    match = _LEAD_IN.match(text)
    return text[match.end() :] if match else text


def _spelt(character: str) -> tuple[str, str]:
    """Returns `^` or `_` for a raised or lowered character, and its spelling."""
    if character.isascii():
        return "", character
    known = _SYMBOLS.get(character) or _GREEK.get(character)
    if known:
        return "", known
    category = unicodedata.category(character)
    if category in ("Nd", "Pd", "Zs", "Cf"):
        digit = str(unicodedata.digit(character)) if category == "Nd" else ""
        return "", {"Nd": digit, "Pd": "-", "Zs": " ", "Cf": ""}[category]
    folded = unicodedata.normalize("NFKC", character)
    shape = unicodedata.decomposition(character)
    script = {"<super>": "^", "<sub>": "_"}.get(shape.partition(" ")[0], "")
    return script, "".join(_SYMBOLS.get(part) or _GREEK.get(part) or part for part in folded)


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
