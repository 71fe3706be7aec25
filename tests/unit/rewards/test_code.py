import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rewards import code
from rewards.code_compare import same_output
from rewards.contract import Program, ProgramResult, RewardInput, Sandbox, SandboxLimits, Score
from tasks.reward.contract import SandboxConfig
from tasks.reward.sandbox import open_sandbox
from tests.unit.reward.zombies import zombies

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases_code.jsonl").read_text("utf-8").splitlines()
]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    opened = open_sandbox(SandboxConfig(concurrency=2), scratch=tmp_path_factory.mktemp("scratch"))
    yield opened
    opened.close()


def item(source: str, tests: object, **extra: object) -> RewardInput:
    return RewardInput(f"```python\n{source}\n```", extra={"tests": tests, **extra})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['kind']}")
def test_case_gets_its_verdict(case: dict[str, Any], sandbox: Sandbox) -> None:
    config = code.Config(**case.get("options", {}))
    score = code.score(item(case["code"], case["tests"], **case.get("extra", {})), config, sandbox)
    status = "grader_error" if case["value"] is None else "graded"
    assert (score.value, score.status) == (case["value"], status), score.reason
    reason = case.get("reason")
    if case["value"] is not None:
        assert (score.reason or "").partition(" (test")[0] == (reason or "")


@pytest.mark.parametrize("example", code.GOLD, ids=lambda example: example.item.completion[:20])
def test_gold_examples_score_the_maximum(example: Any, sandbox: Sandbox) -> None:
    config = code.Config(**example.options)
    assert code.check_gold(example.item.answer, example.item.extra, config) is None
    assert code.score(example.item, config, sandbox) == Score(1.0)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("0.333333", "0.333333333333", True),
        ("12345.1", "12345.2", False),
        ("1e-9", "0.0", True),
        ("1 2\n3", "1.0 2.0\n3.0000001", True),
        ("1 2", "1\n2", False),
        ("inf", "1e999", True),
        ("nan", "0", False),
        ("a 1", "b 1", False),
        ("1", "1_0", False),
    ],
)
def test_numbers_of_float_tests_need_only_be_close(expected: str, printed: str, same: bool) -> None:
    assert same_output(expected, printed, is_float=True) is same


@pytest.mark.parametrize(
    ("completion", "options", "program"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```", {}, "b\n"),
        ("```\na\n```", {}, "a\n"),
        ("```python\na\n```\n```text\nout\n```", {}, "a\n"),
        ("```Python\na\n```", {}, "a\n"),
        ("```python\na", {}, None),
        ("```python\na\n```\n```python\nb", {}, "a\n"),
        ("a = 1", {}, None),
        ("a = 1", {"whole": True}, "a = 1"),
        ("", {"whole": True}, None),
        ("<think>```python\na\n```</think>", {}, None),
        ("<think>x</think>b", {"whole": True}, "\nb"),
        ("````md\n```python\na\n```\n````", {}, None),
        ("~~~python\na\n~~~", {}, "a\n"),
        ("1. So:\n   ```python\n   if a:\n       b\n   ```", {}, "if a:\n    b\n"),
        ("```python\n\n```", {}, None),
        ("say ```x``` inline\n```python\na\n```", {}, "a\n"),
    ],
)
def test_the_program_is_the_last_closed_block(
    completion: str, options: dict[str, Any], program: str | None
) -> None:
    assert code.program_text(RewardInput(completion), code.Config(**options)) == program


def test_no_program_is_a_graded_zero(sandbox: Sandbox) -> None:
    for completion in ("", "42", "```python\nprint(1)"):
        asked = RewardInput(completion, answer='[{"stdin": "", "stdout": "1"}]')
        assert code.score(asked, code.Config(), sandbox) == Score(0.0, reason="no_code")


def test_one_sample_cannot_help_the_next(sandbox: Sandbox) -> None:
    patches = "import math,builtins\nmath.isclose=lambda *a,**k: True\nbuiltins.abs=lambda x: 0"
    tests = ["assert abs(f(2)-4)<1e-6"]
    for source in (patches, "def f(n): return -1"):
        assert code.score(item(source, tests), code.Config(), sandbox).value == 0.0
    assert code.score(item("def f(n): return 4", tests), code.Config(), sandbox).value == 1.0


def test_sleeping_programs_leave_no_zombie(sandbox: Sandbox) -> None:
    before = zombies()
    sleeper = item("import time; time.sleep(30)", [{"stdin": "", "stdout": ""}])
    for _ in range(5):
        score = code.score(sleeper, code.Config(cpu_s=0.1), sandbox)
        assert (score.value, score.reason) == (0.0, "timeout (test 1 of 1)")
    assert zombies() <= before


def test_the_first_failure_ends_it_unless_parts_count(sandbox: Sandbox) -> None:
    tests = {"inputs": ["1"] * 9, "outputs": ["1"] * 9}
    failing = item("print(input(), 1 / 0)", tests)
    counted = _Counting(sandbox)
    code.score(failing, code.Config(), counted)
    assert counted.runs == 1
    looping = item("while True: pass", tests)
    counted = _Counting(sandbox)
    score = code.score(looping, code.Config(partial=True, cpu_s=0.2), counted)
    assert (counted.runs, score.value) == (3, 0.0)


def test_a_machine_too_busy_to_judge_gives_no_verdict() -> None:
    busy = _Answering(ProgramResult(None, "", "", "wall"))
    for tests in ([{"stdin": "", "stdout": ""}], ["assert f(1) == 1"], ["assert f(1)"]):
        score = code.score(item("def f(n): return 1", tests), code.Config(), busy)
        assert (score.value, score.status) == (None, "grader_timeout")


def test_a_broken_sandbox_is_not_caught() -> None:
    for tests in ([{"stdin": "", "stdout": ""}], ["assert f(1) == 1"], ["assert f(1)"]):
        with pytest.raises(OSError, match="broken"):
            code.score(item("x", tests), code.Config(), _Answering(OSError("broken")))


@pytest.mark.parametrize(
    "returned",
    ['{"value":{"d":5}}', '{"value":{"s":[[1],{"d":[1]}]}}', "{}", "[]", "9", '{"value":{}}', "{",
     "[" * 100000, '{"value":' + "[" * 900 + "]" * 900 + "}", '{"value":{"i":"zz"}}'],
)  # fmt: skip
def test_a_malformed_answer_is_a_graded_zero(returned: str) -> None:
    answering = _Answering(ProgramResult(0, returned + "\n", ""))
    for expected in ({"a": 1}, [1], 5):
        tests = [{"fn": "f", "args": [], "expected": expected}]
        score = code.score(item("x", tests), code.Config(), answering)
        assert (score.value, score.status) == (0.0, "graded")


@pytest.mark.parametrize(
    "options", [{"cpu_s": 0}, {"memory_bytes": 1}, {"wall_s": -1}, {"limit": 3}, {"processes": 0}]
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        code.Config(**options)


@pytest.mark.parametrize(
    ("answer", "extra", "problem"),
    [
        (None, {}, "no tests"),
        ("", {}, "no tests"),
        ("not json", {}, "neither JSON nor Python"),
        ("[" * 100000, {}, "neither JSON nor Python"),
        ("5", {}, "type int"),
        ('[{"fn": "a b", "args": [], "expected": 1}]', {}, "function name"),
        ('[{"fn": "f", "args": 1, "expected": 1}]', {}, "args is no list"),
        ('[{"input": "1", "output": "1", "testtype": "functional"}]', {}, "fn_name"),
        ('[{"stdin": 1, "stdout": "1"}]', {}, "expected text"),
        ('[{"stdin": "", "stdout": "", "float": 1}]', {}, "float is 1"),
        (None, {"tests": {"test": "def check(c): assert c(1)"}}, "no entry_point"),
        (None, {"tests": {"test": "x = 1"}}, "checks nothing"),
    ],
)
def test_unusable_tests_are_named(answer: str | None, extra: dict, problem: str) -> None:
    found = code.check_gold(answer, extra, code.Config())
    assert found is not None
    assert problem in found


F, RIGHT = "def f(n): return 0\n", "def f(n): return n * n\n"
MODULE = {"test": "def test_f():\n    from solution import f\n    assert f(3) == 9"}
NAMED = {**MODULE, "entry_point": "f"}
SCRIPT = {"test": "from solution import f\nassert f(3) == 9"}


def sends(line: str) -> str:
    return f"import os, time\nos.write(3, {line!r}.encode() + b'\\n')\ntime.sleep(1)"


def module(name: str) -> str:
    return F + f"import types; m = types.ModuleType({name!r})"


ESCAPES = [
    ("own_check", F + "def check(c): pass", NAMED, "wrong_output"),
    ("own_test", F + "def test_f(): pass", SCRIPT, "wrong_output"),
    ("own_math", F + "class math: isclose = print", ["assert not math.isclose(f(3), 0)"],
     "wrong_output"),
    ("holds_everything", "class Z:\n    __contains__ = lambda *a: True\ndef f(n): return Z()",
     {"test": "from solution import f\nassert 9 in f(3)"}, "exception TypeError"),
    ("module_that_is_none", module("os.none"), MODULE, "wrong_output"),
    ("module_that_ends_it", module("unittest.__main__"), MODULE, "wrong_output"),
    ("module_with_a_screen", module("idlelib.idle"), MODULE, "wrong_output"),
    ("deep", sends('{"x":' + "[" * 900 + "]" * 900 + "}"), MODULE, "forged"),
    ("unhashable", sends('{"x":{"s":[[1]]}}'), MODULE, "forged"),
    ("no_exception", sends('{"x":{"o":0,"exception":"eval","name":"eval"}}'), MODULE, "forged"),
    ("no_class", sends('{"x":{"o":0,"exception":"__doc__","name":"x"}}'), MODULE, "forged"),
    ("exception_that_cannot_be_made", sends('{"error":{"o":0,"exception":"ExceptionGroup",'
     '"name":"ExceptionGroup"},"args":{"t":[]}}'), MODULE, "forged"),
    ("huge_range", "def f(n): return range(10**12)",
     {"test": "from solution import f\ndef test_f(): assert sum(f(3)) == 9"}, "tests_timeout"),
    ("huge_print", "def f(n): return 'x' * (4 << 20)",
     {"test": "from solution import f\ndef test_f():\n    print(f(3))\n    assert f(3) == 9"},
     "wrong_output"),
    ("huge_complaint", "def f(n): return 'x' * (4 << 20)",
     {"test": "import sys\nfrom solution import f\ndef test_f():\n    sys.stderr.write(f(3))\n"
      "    assert f(3) == 9"}, "tests_output_limit"),
    ("script_that_exits", F, {"test": "import sys\nfrom solution import f\n"
     "if f(3) != 9: sys.exit(1)"}, "exception SystemExit"),
    ("setup_without_its_class", F,
     {"test_list": ["assert f(r) == 9"], "test_setup_code": "r = Node(1)"}, "exception NameError"),
    ("setup_with_another_class", F + "Node = 5",
     {"test_list": ["assert f(r) == 9"], "test_setup_code": "r = Node(1)"}, "exception TypeError"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "tests", "word"), [case[1:] for case in ESCAPES], ids=[case[0] for case in ESCAPES]
)
def test_no_program_passes_or_goes_ungraded_by_what_it_does_to_its_tests(
    source: str, tests: object, word: str, sandbox: Sandbox
) -> None:
    score = code.score(item(source, tests), code.Config(cpu_s=1), sandbox)
    assert (score.value, (score.reason or "").partition(" (test")[0]) == (0.0, word)


UNITTEST = "import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n"
HONEST = [
    ("own_test", RIGHT + "def test_f(): pass", SCRIPT),
    ("set_up_once", RIGHT, {"test": UNITTEST + "    @classmethod\n    def setUpClass(cls): "
     "cls.v = 9\n    def test_f(self): self.assertEqual(f(3), self.v)"}),
    ("set_up_class", RIGHT, {"test": "from solution import f\nclass TestF:\n    test_data = [9]\n"
     "    @classmethod\n    def setup_class(cls): cls.v = 9\n"
     "    def test_f(self): assert f(3) == self.v"}),
    ("main_without_a_guard", RIGHT,
     {"test": UNITTEST + "    def test_f(self): self.assertEqual(f(3), 9)\nunittest.main()"}),
    ("script_that_exits", RIGHT, {"test": "from solution import f\nassert f(3) == 9\nexit(0)"}),
    ("holds_its_items", "class Z(list): pass\ndef f(n): return Z([n * n])",
     {"test": "from solution import f\nassert 9 in f(3)\nassert 8 not in f(3)"}),
    ("yields_its_items", "class Z:\n    def __iter__(self): yield 9\ndef f(n): return Z()",
     {"test": "from solution import f\nassert 9 in f(3)\nassert 8 not in f(3)"}),
    ("much_returned", "def f(n): return list(range(n))",
     [{"fn": "f", "args": [300000], "expected": list(range(300000))}]),
    ("much_printed", "print('x' * (3 << 20))", [{"stdin": "", "stdout": "x" * (3 << 20)}]),
    ("line_ends_of_windows", "print(input() + input())",
     [{"stdin": "1\r\n2\r\n", "stdout": "12\r\n"}]),
    ("much_in_all", "def f(n): return 'é' * n",
     [{"fn": "f", "args": [20000], "expected": "é" * 20000}] * 100),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "tests"), [case[1:] for case in HONEST], ids=[case[0] for case in HONEST]
)
def test_a_right_program_passes(source: str, tests: object, sandbox: Sandbox) -> None:
    assert code.score(item(source, tests), code.Config(), sandbox) == Score(1.0)


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n"
         "        import nowhere\n        self.fail()", "the tests import nowhere"),
        ("async def test_f():\n    assert False", "coroutine"),
        ("def test_f():\n    yield 1 / 0\n    assert False", "generator"),
        ("from solution import f\ndef setup_module(): pass\ndef test_f():\n    assert f(3) == 9",
         "setup_module"),
        ("def verify():\n    assert False", "checks nothing"),
        ("def run():\n    assert False\nif __name__ == '__main__':\n    run()", "checks nothing"),
        ("while True: pass\nassert False", "the tests themselves: cpu limit"),
    ],
)  # fmt: skip
def test_tests_that_would_not_run_give_no_verdict(test: str, reason: str, sandbox: Sandbox) -> None:
    score = code.score(item(RIGHT, {"test": test}), code.Config(cpu_s=1), sandbox)
    assert score.value is None
    assert reason in (score.reason or "")


def test_parts_count_tests_only(sandbox: Sandbox) -> None:
    tests = {"test": UNITTEST + "    def test_f(self): self.assertEqual(f(3), 9)"}
    assert code.score(item(F, tests), code.Config(partial=True), sandbox).value == 0.0


def test_a_long_line_after_a_fence_takes_no_time() -> None:
    began = time.process_time()
    for middle in ("a", " ", "`", "` "):
        assert code.program_text(RewardInput("```" + middle * 100_000 + "`"), code.Config()) is None
    assert time.process_time() - began < 5


class _Counting:
    joins = True

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.runs = 0

    def run(self, program: Program, *, limits: SandboxLimits) -> ProgramResult:
        self.runs += 1
        return self._sandbox.run(program, limits=limits)

    def run_joined(self, program: Program, *, checker: Program, limits: SandboxLimits) -> Any:
        raise AssertionError


class _Answering:
    joins = True

    def __init__(self, answer: ProgramResult | OSError) -> None:
        self._answer = answer

    def run(self, program: Program, *, limits: SandboxLimits) -> ProgramResult:
        if isinstance(self._answer, OSError):
            raise self._answer
        return self._answer

    def run_joined(self, program: Program, *, checker: Program, limits: SandboxLimits) -> Any:
        result = self.run(program, limits=limits)
        return result, result
