"""Code: a program that the model wrote passes the tests of the data set, run in a sandbox."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from rewards.answer import visible_text
from rewards.code_runs import JudgeConfig, run_calls, run_checker, run_stdin
from rewards.code_tests import (
    BadTests,
    CallTest,
    CheckerTests,
    StdinTest,
    read_tests,
    split_asserts,
)
from rewards.contract import GoldExample, RewardInput, Sandbox, Score

NEEDS: Literal["sandbox"] = "sandbox"

_LANGUAGES = ("", "python", "py", "python3")
# Possessive: no line, however long, is gone over twice.
_FENCE = re.compile(r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([^`\s]*+)[^`\n]*+$", re.MULTILINE)


class Config(JudgeConfig):
    """Where the program stands; how it is judged and what a test may cost are a JudgeConfig's."""

    whole: bool = False
    """The whole completion outside `<think>` is the program; False: its last fenced block."""


GOLD: Sequence[GoldExample] = (
    GoldExample(
        RewardInput(
            "Twice:\n```python\nprint(2 * int(input()))\n```",
            answer='[{"stdin": "21\\n", "stdout": "42"}]',
        )
    ),
    GoldExample(
        RewardInput("```py\ndef f(n):\n    return n * n\n```", answer='["assert f(3) == 9"]')
    ),
    GoldExample(
        RewardInput(
            "```\nclass Solution:\n    def two(self, xs: List[int]) -> List[int]:\n"
            "        return xs[:2]\n```",
            answer='{"fn_name": "two", "inputs": [[[1, 2, 3]]], "outputs": [[1, 2]]}',
        )
    ),
    GoldExample(
        RewardInput(
            "```python\ndef sort(xs):\n    xs.sort()\n```",
            extra={
                "tests": {
                    "test": "def check(candidate):\n    xs = [2, 1]\n    candidate(xs)\n"
                    "    assert xs == [1, 2]",
                    "entry_point": "sort",
                }
            },
        )
    ),
)


def score(item: RewardInput, config: Config, sandbox: Sandbox) -> Score:
    """Returns 1 if the program passes all tests, else 0; with `partial`, the share that it passes.

    Without `partial` the first failure ends it. Verdicts are made outside of the program's
    sandbox: expectations never enter it.

    Tests that are code have limits of their own. A program that they have asked is charged with
    what befalls them: it chose what they work on.

    Reasons: `no_code`, `wrong_output`, `timeout`, `memory`, `output_limit`, `exception <Type>`,
    `exit_code <n>`, `signal`, `ended` (before its tests), `forged`, each but the first with the
    number of the test. `tests_timeout`, `tests_memory`, `tests_output_limit`, `tests_signal`: the
    tests themselves, after they had asked the program.

    Raises:
        OSError: the sandbox does not work.
    """
    try:
        tests = read_tests(item.answer, item.extra)
    except BadTests as error:
        return Score(None, "grader_error", str(error))
    source = program_text(item, config)
    if source is None:
        return Score(0.0, reason="no_code")
    if isinstance(tests, CheckerTests):
        calls = split_asserts(tests, any_expression=not sandbox.joins)
        if calls is None:
            return run_checker(source, tests, config, sandbox)
        return run_calls(source, calls, config, sandbox)
    if isinstance(tests[0], CallTest):
        return run_calls(source, cast(Sequence[CallTest], tests), config, sandbox)
    return run_stdin(source, cast(Sequence[StdinTest], tests), config, sandbox)


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why the row's tests are unusable, or None."""
    try:
        read_tests(answer, extra)
    except BadTests as error:
        return str(error)
    return None


def program_text(item: RewardInput, config: Config) -> str | None:
    """Returns the program of a completion: its last closed fenced block of Python, or None."""
    text = visible_text(item.completion, prompt=item.prompt)
    if config.whole:
        return text if text.strip() else None
    found: str | None = None
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif not fence[3] and fence[2].startswith(opening[2]):
            if opening[3].lower() in _LANGUAGES:
                found = _unindented(text[opening.end() + 1 : fence.start()], len(opening[1]))
            opening = None
    return found if found and found.strip() else None


def _unindented(block: str, width: int) -> str:
    """Takes from every line what the fence is indented by: a block may stand in a list."""
    if not width:
        return block
    return re.sub(rf"^[ \t]{{1,{width}}}", "", block, flags=re.MULTILINE)
