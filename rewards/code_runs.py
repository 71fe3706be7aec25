"""Runs a program against its tests in a sandbox, and tells from outside how each test went."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rewards.code_compare import same_output, same_value
from rewards.code_harness import PROGRAM
from rewards.code_tests import CallTest, CheckerTests, StdinTest, entry_name, free_names
from rewards.contract import (
    Program,
    ProgramResult,
    Sandbox,
    SandboxLimits,
    Score,
    ScorerConfig,
    Status,
)
from rewards.plain_values import dumps, loads

_COMMAND = ("python", "-S", "start.py")
"""Without `site`: it costs more than all the rest of a short program."""
_QUESTIONING = 3
"""A checker may use more than the program that it questions, which has a clock of its own."""
_WRONG = "wrong_output"
_LIMIT_WORDS = {
    "cpu": "timeout",
    "asleep": "timeout",
    "memory": "memory",
    "output": "output_limit",
    "signal": "signal",
}
_OF_LIMITS = ("timeout", "memory", "output_limit")
_UTF8_BYTES = 4
_ANSWER_CHARACTERS = 32
"""Around the value of an answer to a call."""
_RAISED = re.compile(r"^(?:\w+\.)*(\w+)(?::.*)?$")
_REASON_CHARACTERS = 60
# A whole program runs as the main module, with the names that `site` would have brought.
_START = f"""\
import builtins, sys
builtins.exit = builtins.quit = sys.exit
sys.argv = [{PROGRAM!r}]
exec(compile(open({PROGRAM!r}, "rb").read(), {PROGRAM!r}, "exec"))
"""

Outcome = str | None
"""Of one test: None if it passed, else the reason."""


class JudgeConfig(ScorerConfig):
    """How a program is judged, and what one of its tests may cost."""

    partial: bool = False
    """The reward is the share of tests that pass; False: 1 if all do."""
    floats: bool = False
    """All tests compare numbers within 1e-6; a test can also say so itself (`"float": true`)."""
    cpu_s: Annotated[float, Field(gt=0)] = 4.0
    """CPU seconds of one test. A program may sleep for as long again."""
    total_cpu_s: Annotated[float, Field(gt=0)] = 60.0
    """CPU seconds of all tests that share a process: those of one function or module."""
    wall_s: Annotated[float, Field(gt=0)] = 300.0
    """Backstop: whoever reaches it has met a machine too busy to judge, and gets no verdict."""
    memory_bytes: Annotated[int, Field(ge=32 << 20)] = 1 << 30
    output_bytes: Annotated[int, Field(gt=0)] = 1 << 20
    """Of standard output and of standard error, each, beyond what the right answer takes."""
    file_bytes: Annotated[int, Field(gt=0)] = 64 << 20
    """Of all files that the program writes."""
    processes: Annotated[int, Field(gt=0)] = 32
    """Processes and threads."""
    max_timeouts: Annotated[int, Field(gt=0)] = 3
    """With `partial`: after so many tests over a limit, the rest count as failed."""


class _NoVerdict(Exception):
    """The machine or the tests are at fault, not the program."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.score = Score(None, status, reason)


def run_stdin(
    source: str, tests: Sequence[StdinTest], config: JudgeConfig, sandbox: Sandbox
) -> Score:
    """Returns the score of a program that reads and prints; every test has its own process."""

    def run(first: int) -> list[Outcome]:
        return [_stdin_outcome(source, tests[first], config, sandbox)]

    return _combined(len(tests), config, run)


def run_calls(
    source: str, tests: Sequence[CallTest], config: JudgeConfig, sandbox: Sandbox
) -> Score:
    """Returns the score of a program's functions; all calls share a process while it lives."""

    def run(first: int) -> list[Outcome]:
        return _call_outcomes(source, tests[first:], config, sandbox)

    return _combined(len(tests), config, run)


def run_checker(source: str, tests: CheckerTests, config: JudgeConfig, sandbox: Sandbox) -> Score:
    """Returns the score by test code, which questions the program from a sandbox of its own."""
    if not sandbox.joins:
        reason = (
            "these tests are code that questions the program: reward.sandbox.backend=bubblewrap "
            "can run it, this sandbox cannot"
        )
        return Score(None, "grader_error", reason)
    num_tests = tests.module.count("def test") if tests.asserts is None else len(tests.asserts)
    asked = {
        "cpu_s": config.cpu_s,
        "asserts": None if tests.asserts is None else list(tests.asserts),
        "module": tests.module,
        "setup": tests.setup,
        "entry_point": entry_name(tests),
    }
    program, checker = sandbox.run_joined(
        Program({PROGRAM: source, **_shipped("code_harness", "serve")}, _COMMAND),
        checker=Program(_shipped("code_checker", "main"), _COMMAND, dumps(asked) + "\n"),
        limits=_limits(config, num_tests=_QUESTIONING * max(num_tests, 1)),
    )
    try:
        outcomes, total = _checked_outcomes(tests, program, checker)
    except _NoVerdict as none:
        return none.score
    return _verdict(outcomes, total, config)


def _combined(
    num_tests: int, config: JudgeConfig, run: Callable[[int], Sequence[Outcome]]
) -> Score:
    """Returns the score of tests; `run(first)` returns the outcomes from there on.

    A run ends early where the program dies: with `partial` another one begins behind that test.
    """
    outcomes: list[Outcome] = []
    try:
        while len(outcomes) < num_tests:
            outcomes += run(len(outcomes))
            failed = [outcome for outcome in outcomes if outcome is not None]
            over_limits = sum(outcome in _OF_LIMITS for outcome in failed)
            if failed and (not config.partial or over_limits >= config.max_timeouts):
                break
    except _NoVerdict as none:
        return none.score
    return _verdict(outcomes, num_tests, config)


def _verdict(outcomes: Sequence[Outcome], num_tests: int, config: JudgeConfig) -> Score:
    passed = sum(outcome is None for outcome in outcomes)
    if passed == num_tests:
        return Score(1.0)
    first = next(
        (index for index, outcome in enumerate(outcomes) if outcome is not None), len(outcomes)
    )
    word = outcomes[first] if first < len(outcomes) else "ended"
    value = passed / num_tests if config.partial else 0.0
    return Score(value, reason=f"{word} (test {first + 1} of {num_tests})")


def _stdin_outcome(source: str, test: StdinTest, config: JudgeConfig, sandbox: Sandbox) -> Outcome:
    # Python reads a line end of Windows as a character of the line; no data set means that.
    stdin = test.stdin.replace("\r\n", "\n")
    program = Program({PROGRAM: source, "start.py": _START}, _COMMAND, stdin)
    limits = _limits(config, num_tests=1, right_characters=len(test.stdout))
    result = sandbox.run(program, limits=limits)
    failure = _failure(result)
    if failure is not None:
        return failure
    is_float = test.is_float or config.floats
    return None if same_output(test.stdout, result.stdout, is_float=is_float) else _WRONG


def _call_outcomes(
    source: str, tests: Sequence[CallTest], config: JudgeConfig, sandbox: Sandbox
) -> list[Outcome]:
    """Returns the outcomes of calls in one process, up to the one at which it died."""
    asked = {"cpu_s": config.cpu_s, "tests": [_question(test) for test in tests]}
    files = {PROGRAM: source, **_shipped("code_harness", "call")}
    program = Program(files, _COMMAND, dumps(asked) + "\n")
    right = sum(len(dumps(test.expected)) + _ANSWER_CHARACTERS for test in tests)
    limits = _limits(config, num_tests=len(tests), right_characters=right)
    result = sandbox.run(program, limits=limits)
    outcomes: list[Outcome] = []
    # What follows the last line end was never finished.
    for test, line in zip(tests, result.stdout.split("\n")[:-1], strict=False):
        outcomes.append(_call_outcome(test, line, config))
        if outcomes[-1] is not None and not config.partial:
            return outcomes
    if len(outcomes) < len(tests):
        outcomes.append(_failure(result) or "exit_code 0")
    return outcomes


def _question(test: CallTest) -> dict[str, Any]:
    if test.expression is not None:
        return {"expression": test.expression}
    return {"fn": test.fn, "args": test.args, "kwargs": test.kwargs}


def _call_outcome(test: CallTest, line: str, config: JudgeConfig) -> Outcome:
    try:
        answer = loads(line)
    except ValueError:
        return "forged"
    if type(answer) is not dict:
        return "forged"
    if "error" in answer:
        return _exception(answer["error"])
    wanted = [test.expected] if test.alternative is None else [test.expected, test.alternative]
    is_float = test.is_float or config.floats
    same = any(
        same_value(each, answer.get("value"), from_python=test.from_python, is_float=is_float)
        for each in wanted
    )
    return None if same else _WRONG


def _checked_outcomes(
    tests: CheckerTests, program: ProgramResult, checker: ProgramResult
) -> tuple[list[Outcome], int]:
    """Returns the outcomes that the checker wrote, and how many tests there are.

    Raises:
        _NoVerdict: the tests failed by themselves, or took too much.
    """
    said: dict[str, Any] = {}
    outcomes: list[Outcome] = []
    for line in checker.stdout.split("\n")[:-1]:
        message = loads(line)
        if "passed" in message:
            outcomes.append(None if message["passed"] else _failed_test(message["error"]))
        said |= message
    if "unsupported" in said:
        raise _NoVerdict("grader_error", said["unsupported"])
    if not said.get("done"):
        outcomes.append(_unfinished(said, tests, program, checker))
    total = max(said.get("tests", 1), len(outcomes))
    if said.get("tests") == 0:
        raise _NoVerdict("grader_error", "the test code holds no test that can be found")
    return outcomes, total


def _unfinished(
    said: Mapping[str, Any], tests: CheckerTests, program: ProgramResult, checker: ProgramResult
) -> str:
    """Returns why the tests did not come to their end, if that is the program's doing.

    What befalls the tests once they have asked the program is its doing: it chose the values that
    they work on, and a program that could end its own tests would go ungraded.
    """
    failure = _failure(program)
    if "failed" in said:
        if said["in_program"] or _hangs_on_program(said["failed"], tests):
            return _exception(said["failed"])
        raise _NoVerdict("grader_error", f"the setup of the tests raised {said['failed']}")
    if said.get("gone") == "ended":
        return failure if failure in _OF_LIMITS else "ended"
    if "gone" in said:
        return str(said["gone"])
    if checker.killed_by == "asleep" or failure in _OF_LIMITS:
        return failure if failure in _OF_LIMITS else "timeout"
    if checker.killed_by == "wall":
        raise _NoVerdict("grader_timeout", "the machine is too busy: the wall limit was reached")
    if checker.killed_by is not None and ("asked" in said or "loaded" not in said):
        return f"tests_{_LIMIT_WORDS[checker.killed_by]}"
    if checker.killed_by in _LIMIT_WORDS and checker.killed_by != "signal":
        raise _NoVerdict("grader_timeout", f"the tests themselves: {checker.killed_by} limit")
    raise _NoVerdict("grader_error", f"the checker of the tests ended: {_last_line(checker)}")


def _hangs_on_program(raised: str, tests: CheckerTests) -> bool:
    """Whether a setup that raised works on names of the program: then it is not broken itself."""
    return raised != "ModuleNotFoundError" and bool(free_names(tests.setup))


def _failed_test(error: str | None) -> str:
    return _WRONG if error is None else _exception(error)


def _failure(result: ProgramResult) -> Outcome:
    """Returns why a program did not end well, None if it did.

    Raises:
        _NoVerdict: the machine was too busy to say.
    """
    if result.killed_by == "wall":
        raise _NoVerdict("grader_timeout", "the machine is too busy: the wall limit was reached")
    if result.killed_by is not None:
        return _LIMIT_WORDS[result.killed_by]
    if result.exit_code == 0:
        return None
    raised = _RAISED.match(_last_line(result))
    if raised is not None and "Traceback (most recent call last)" in result.stderr:
        return _exception(raised[1])
    if raised is not None and raised[1] in ("SyntaxError", "IndentationError", "TabError"):
        return _exception(raised[1])
    return f"exit_code {result.exit_code}"


def _exception(name: object) -> str:
    if name == "MemoryError":
        return "memory"
    return f"exception {name}"[:_REASON_CHARACTERS]


def _last_line(result: ProgramResult) -> str:
    return result.stderr.strip().rpartition("\n")[2]


def _limits(config: JudgeConfig, *, num_tests: int, right_characters: int = 0) -> SandboxLimits:
    cpu_s = min(config.cpu_s * max(num_tests, 1), max(config.total_cpu_s, config.cpu_s))
    return SandboxLimits(
        cpu_s=cpu_s,
        asleep_s=config.cpu_s,
        wall_s=config.wall_s,
        memory_bytes=config.memory_bytes,
        output_bytes=config.output_bytes + _UTF8_BYTES * right_characters,
        file_bytes=config.file_bytes,
        processes=config.processes,
    )


@cache
def _shipped(module: str, function: str) -> Mapping[str, str]:
    """Returns the files of this folder that run inside, and a start that calls one of them."""
    folder = Path(__file__).parent
    names = ["plain_values", "code_harness"]
    if module == "code_checker":
        names += ["code_checker", "code_collect"]
    files = {f"rewards/{name}.py": (folder / f"{name}.py").read_text("utf-8") for name in names}
    start = f"from rewards.{module} import {function}\n{function}()\n"
    return {**files, "rewards/__init__.py": "", "start.py": start}
