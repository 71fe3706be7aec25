"""Text that a model or a data set wrote, made safe to print: nothing in it steers the terminal."""

import unicodedata

_KEPT = frozenset("\n\t\u200c\u200d")
"""Line ends, tabs, and the joiners that scripts and emoji are written with."""
_STEERING = frozenset(("Cc", "Cf", "Zl", "Zp", "Cs"))
"""Control and format characters (escapes, bidi overrides, zero width), separators, surrogates."""


def visible(text: str) -> str:
    r"""Returns `text` with every character that steers a terminal as its escape, like `\x1b`.

    Line ends and tabs stay; `visible_line` shows those too.
    """
    if text.isprintable():
        return text
    return "".join(_escape(character) if _steers(character) else character for character in text)


def visible_line(text: str) -> str:
    """Returns `text` on one line: line ends and tabs as escapes too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _steers(character: str) -> bool:
    return unicodedata.category(character) in _STEERING and character not in _KEPT


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
