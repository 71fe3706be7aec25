import pytest

from flows.visible_text import visible, visible_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, é, 漢, \U0001f600", "plain, é, 漢, \U0001f600"),
        ("\x1b[2Jcleared", "\\x1b[2Jcleared"),
        ("\x9b31mred", "\\x9b31mred"),
        ("a\x00b\x07\r", "a\\x00b\\x07\\r"),
        ("\u202eesrever\u2066", "\\u202eesrever\\u2066"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("\U000e0041tag", "\\U000e0041tag"),
        ("line\u2028end", "line\\u2028end"),
        ("a family: \U0001f469\u200d\U0001f467", "a family: \U0001f469\u200d\U0001f467"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
    ],
)
def test_what_steers_a_terminal_is_shown_as_its_escape(text: str, shown: str):
    assert visible(text) == shown


def test_a_line_has_no_line_ends():
    assert visible_line("a\nb\tc\x1b") == "a\\nb\\tc\\x1b"
