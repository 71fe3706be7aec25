"""Programs that want the reward without the work: what forges, searches or leaves early gets 0."""

import textwrap
from collections.abc import Iterator

import pytest

from rewards import code
from rewards.contract import RewardInput, Sandbox, Score
from tasks.reward.contract import SandboxConfig
from tasks.reward.sandbox import open_sandbox


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    opened = open_sandbox(SandboxConfig(concurrency=4), scratch=tmp_path_factory.mktemp("scratch"))
    yield opened
    opened.close()


def grade(sandbox: Sandbox, source: str, tests: object, **options: object) -> Score:
    completion = f"```python\n{textwrap.dedent(source)}\n```"
    item = RewardInput(completion, extra={"tests": tests})
    return code.score(item, code.Config.model_validate(options), sandbox)


SEARCH = """
import gc, os, sys
found = []
def look(text):
    if "".join(("7391", "0246")) in str(text):
        found.append(1)
for path, folders, files in os.walk("/tmp"):
    for name in files:
        look(open(os.path.join(path, name), errors="replace").read())
for name in os.listdir("/proc"):
    for part in ("cmdline", "environ", "maps", "fd"):
        try:
            look(open(f"/proc/{name}/{part}", "rb").read())
        except OSError:
            pass
for thing in gc.get_objects():
    if isinstance(thing, (dict, list, tuple)):
        look(thing)
frame = sys._getframe()
while frame:
    look(frame.f_locals)
    look(frame.f_globals)
    frame = frame.f_back
look(sys.argv)
"""
SHAPES = [
    ("stdin", [{"stdin": "1\n", "stdout": "73910246"}], "print(73910246 if found else 0)"),
    (
        "call",
        [{"fn": "f", "args": [1], "expected": 73910246}],
        "def f(n): return 73910246 if found else 0",
    ),
    ("assert", ["assert f(1) == 73910246"], "def f(n): return 73910246 if found else 0"),
    (
        "module",
        {"test": "def test_f():\n    from solution import f\n    assert f(1) == 73910246"},
        "def f(n): return 73910246 if found else 0",
    ),
]


@pytest.mark.parametrize(
    ("tests", "answer"), [case[1:] for case in SHAPES], ids=[case[0] for case in SHAPES]
)
def test_the_expected_answer_is_nowhere_inside(
    sandbox: Sandbox, tests: object, answer: str
) -> None:
    # The program names the number itself, so it is written apart: found means found elsewhere.
    split = answer.replace("73910246", "int(''.join(('7391', '0246')))")
    score = grade(sandbox, SEARCH + split, tests)
    assert (score.value, score.status) == (0.0, "graded")
    assert (score.reason or "").startswith("wrong_output")


F = "def f(n):\n    return 0\n"
LIAR = "class Z:\n    def __eq__(self, other): return True\n    __ne__ = __hash__ = None\n"
EVERYTHING = """
class Z:
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return 0
    __add__ = __mul__ = __rsub__ = __sub__
    def __abs__(self): return 0
    def __bool__(self): return True
    def __instancecheck__(self, other): return True
    __class__ = int
def f(n): return Z()
"""
TRICKS = [
    ("exit_zero", F + "import sys; sys.exit(0)"),
    ("exit_zero_at_once", F + "import os; os._exit(0)"),
    ("exit_zero_in_the_call", "def f(n):\n    raise SystemExit(0)"),
    ("exit_zero_at_once_in_the_call", "import os\ndef f(n): os._exit(0)"),
    ("exit_handler", F + "import atexit, os; atexit.register(lambda: os._exit(0))"),
    ("says_passed", F + "print('1 passed'); print('ALL TESTS PASSED'); print('OK')"),
    ("equals_everything", LIAR + "def f(n): return Z()"),
    ("operators_of_everything", EVERYTHING),
    ("int_that_equals_everything", "class Z(int):\n    __eq__ = lambda *a: True\nf = Z"),
    (
        "patched_builtins",
        F + "import builtins\nfor n in ('abs', 'repr', 'all'): "
        "setattr(builtins, n, lambda *a: True)",
    ),
    ("patched_assertion", F + "import builtins; builtins.AssertionError = ZeroDivisionError"),
    ("own_abs", F + "def abs(x): return 0\ndef isinstance(*a): return True"),
    ("patched_json", F + "import json, _json; json.loads = json.dumps = lambda *a: 1"),
    (
        "patched_harness",
        F + "import sys\nfor m in list(sys.modules.values()):\n"
        "    for n in ('encode', 'dumps', '_answer'):\n        hasattr(m, n) and setattr(m, n, "
        "lambda *a: {'value': True})",
    ),
    ("traced", F + "import sys; sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)"),
    ("replaced_test_module", F + "import sys; sys.modules['tests'] = sys.modules['pytest'] = sys"),
    ("raises_assertion_passed", "def f(n):\n    raise StopIteration('passed')"),
]
WRITERS = [
    ("verdict_lines", '{"passed":true}\\n{"done":true}\\n'),
    ("result_lines", '{"value":true}\\n'),
    ("garbage", "\\x00\\xff[[[[{"),
    ("callback", '{"callback":0,"args":[],"kwargs":{}}\\n'),
    ("handle", '{"value":{"o":0,"plain":null}}\\n'),
]
for _name, _line in WRITERS:
    TRICKS.append(
        (
            f"writes_{_name}_everywhere",
            "import os\ndef f(n):\n    for fd in range(10):\n        try:\n"
            f"            os.write(fd, b'{_line}' * 9)\n        except OSError: pass\n    return 0",
        )
    )
TRUTHS = {
    "call": ["assert f(3) == 9"],
    "asserts": ["assert f(3) == 9 and type(f(3)) is int", "assert abs(f(3) - 9) < 1e-6"],
    "module": {"test": "def check(candidate):\n    assert candidate(3) == 9", "entry_point": "f"},
    "unittest": {
        "test": "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n"
        "        from solution import f\n        self.assertAlmostEqual(f(3), 9)"
    },
    "stdin": [{"stdin": "3", "stdout": "9"}],
}


@pytest.mark.parametrize("tests", TRUTHS.values(), ids=TRUTHS.keys())
@pytest.mark.parametrize("source", [case[1] for case in TRICKS], ids=[case[0] for case in TRICKS])
def test_a_trick_is_a_graded_zero(sandbox: Sandbox, source: str, tests: object) -> None:
    score = grade(sandbox, source, tests, cpu_s=2)
    assert (score.value, score.status) == (0.0, "graded"), score.reason


def test_an_honest_program_passes_the_same_tests(sandbox: Sandbox) -> None:
    source = "def f(n): return n * n\nif __name__ == '__main__': print(f(int(input())))"
    for tests in TRUTHS.values():
        assert grade(sandbox, source, tests) == Score(1.0)
