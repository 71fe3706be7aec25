"""Reads the tests of a data set's row, in the shapes of the field, into one of three kinds."""

import ast
import builtins
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rewards.plain_values import encode

Tree = Any
_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StdinTest:
    """A program is given `stdin` and must print `stdout`; `is_float`: numbers within 1e-6."""

    stdin: str
    stdout: str
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class CallTest:
    """A call, or an expression, whose value must be `expected`; values are trees of plain values.

    `from_python`: the expectation was written in Python, where a tuple is no list; JSON has only
    lists. `alternative`: another value that will do.
    """

    fn: str
    args: Tree
    kwargs: Tree
    expected: Tree
    from_python: bool = False
    is_float: bool = False
    expression: str | None = None
    alternative: Tree = None


@dataclass(frozen=True, slots=True)
class CheckerTests:
    """Test code that runs beside the program: assert statements one by one, or a whole module."""

    asserts: tuple[str, ...] | None
    module: str
    setup: str
    entry_point: str | None


Tests = Sequence[StdinTest] | Sequence[CallTest] | CheckerTests


class BadTests(ValueError):
    """The row's tests cannot be used; the message says why."""


def read_tests(answer: str | None, extra: _Row) -> Tests:
    """Returns the tests of a row: of `extra["tests"]`, else of `answer` (JSON text).

    Raises:
        BadTests: there are none, or they have no known shape.
    """
    raw: Any = extra.get("tests") or (answer or "").strip()
    if isinstance(raw, str) and raw:
        raw = _parsed(raw)
    if isinstance(raw, Mapping):
        return _from_mapping(cast(_Row, raw), extra)
    if isinstance(raw, list) and raw:
        return _from_list(cast(list[Any], raw), extra)
    raise BadTests("the row has no tests" if not raw else f"tests of type {type(raw).__name__}")


def entry_name(tests: CheckerTests) -> str | None:
    """Returns the function that the tests are about: named by the row, or called by an assert."""
    if tests.entry_point or not tests.asserts:
        return tests.entry_point
    called = [
        node.func.id
        for node in ast.walk(ast.parse(tests.asserts[0]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    # The program must not replace what the tests judge with: abs(f(2) - 4) < 1e-6 is about f. A
    # task may be about a function called sum, and then it is the innermost that they call.
    own = [name for name in called if not hasattr(builtins, name)]
    return next(iter(own or called[::-1]), None)


def free_names(code: str) -> set[str]:
    """Returns the names that code uses and neither binds nor finds among the builtins."""
    used, bound = set[str](), set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound


def split_asserts(tests: CheckerTests, *, any_expression: bool) -> Sequence[CallTest] | None:
    """Returns asserts of the form `CALL == LITERAL` as calls; None unless all have that form.

    Args:
        tests: asserts, or a module (which is none).
        any_expression: also split `EXPRESSION == LITERAL`, which the program's process evaluates.
    """
    if tests.asserts is None or tests.setup.strip():
        return None
    found = [_split(source, any_expression=any_expression) for source in tests.asserts]
    calls = [each for each in found if each is not None]
    return calls if len(calls) == len(found) else None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if _compiles(text) and ("assert" in text or "def " in text):
        return {"test": text}
    raise BadTests("the tests are neither JSON nor Python test code")


def _from_mapping(raw: _Row, extra: _Row) -> Tests:
    if "inputs" in raw and "outputs" in raw:
        return _from_columns(raw)
    if "assert_case" in raw:
        return _asserts(raw["assert_case"], raw, extra)
    if "test_list" in raw:
        return _asserts(raw["test_list"], raw, extra)
    if "test" in raw:
        return _module(raw, extra)
    shape = ", ".join(sorted(str(key) for key in raw)[:8])
    raise BadTests(f"tests with the keys {shape or '(none)'} have no known shape")


def _from_columns(raw: _Row) -> Tests:
    """Reads `{"inputs": [...], "outputs": [...], "fn_name": ...}` (APPS, TACO, verl)."""
    inputs, outputs = raw["inputs"], raw["outputs"]
    if not (isinstance(inputs, list) and isinstance(outputs, list)):
        raise BadTests("inputs and outputs are no lists")
    rows = list(zip(cast(list[Any], inputs), cast(list[Any], outputs), strict=False))
    if not rows or len(inputs) != len(outputs):
        raise BadTests(f"{len(inputs)} inputs for {len(outputs)} outputs")
    name, is_float = raw.get("fn_name"), _flag(raw, "float")
    if name is None:
        return [StdinTest(_text(a), _text(b), is_float) for a, b in rows]
    return [_call_of_column(_name(name), a, b, is_float=is_float) for a, b in rows]


def _call_of_column(name: str, given: Any, expected: Any, *, is_float: bool) -> CallTest:
    if isinstance(given, str):
        given, expected = _lines_of_json(given), _json_or_text(expected)
    args = cast(list[Any], given) if isinstance(given, list) else [given]
    alternative = None
    # These data sets wrap some results in a list of one, and do not say which.
    if isinstance(expected, list) and len(cast(list[Any], expected)) == 1:
        alternative = _tree(cast(list[Any], expected)[0])
    return CallTest(
        name,
        args=_tree(args),
        kwargs=_tree({}),
        expected=_tree(expected),
        is_float=is_float,
        alternative=alternative,
    )


def _from_list(raw: list[Any], extra: _Row) -> Tests:
    if all(isinstance(each, str) for each in raw):
        return _asserts(raw, {}, extra)
    if not all(isinstance(each, Mapping) for each in raw):
        raise BadTests("a list of tests mixes statements and records")
    rows = cast(list[_Row], raw)
    for keys, read in _RECORDS:
        if all(keys <= row.keys() for row in rows):
            tests = [read(row, extra) for row in rows]
            if len({type(test) for test in tests}) > 1:
                raise BadTests("the tests mix standard input and calls")
            return cast(Tests, tests)
    shape = ", ".join(sorted(str(key) for key in rows[0])[:8])
    raise BadTests(f"a list of tests with the keys {shape or '(none)'} has no known shape")


def _stdin_record(row: _Row, extra: _Row) -> StdinTest:
    return StdinTest(_text(row["stdin"]), _text(row["stdout"]), _flag(row, "float"))


def _call_record(row: _Row, extra: _Row) -> CallTest:
    args, kwargs = row["args"], row.get("kwargs") or {}
    if not isinstance(args, list) or not isinstance(kwargs, Mapping):
        raise BadTests("args is no list, or kwargs no object")
    return CallTest(
        _name(row["fn"]),
        args=_tree(args),
        kwargs=_tree(dict(cast(_Row, kwargs))),
        expected=_tree(row["expected"]),
        is_float=_flag(row, "float"),
    )


def _typed_record(row: _Row, extra: _Row) -> StdinTest | CallTest:
    """Reads `{"input", "output", "testtype"}` (LiveCodeBench)."""
    if row.get("testtype", "stdin") != "functional":
        return StdinTest(_text(row["input"]), _text(row["output"]), _flag(row, "float"))
    name = row.get("fn_name") or extra.get("fn_name") or extra.get("func_name")
    if name is None:
        raise BadTests("a functional test without fn_name in the test or in extra")
    call = _call_of_column(_name(name), row["input"], row["output"], is_float=_flag(row, "float"))
    return CallTest(name, call.args, call.kwargs, call.expected, is_float=call.is_float)


_RECORDS: Sequence[tuple[set[str], Callable[[_Row, _Row], StdinTest | CallTest]]] = (
    ({"stdin", "stdout"}, _stdin_record),
    ({"fn", "args", "expected"}, _call_record),
    ({"input", "output"}, _typed_record),
)


def _asserts(raw: Any, row: _Row, extra: _Row) -> CheckerTests:
    sources = [raw] if isinstance(raw, str) else raw
    if not isinstance(sources, list) or not sources:
        raise BadTests("there are no assert statements")
    asserts = tuple(_text(source).strip() for source in cast(list[Any], sources))
    for source in asserts:
        if not _compiles(source):
            raise BadTests(f"a test is no Python: {source[:80]!r}")
        if "assert" not in source:
            raise BadTests(f"a test asserts nothing: {source[:80]!r}")
    return CheckerTests(asserts, "", setup_code(row, extra), _entry(row, extra))


def _module(row: _Row, extra: _Row) -> CheckerTests:
    code = _text(row["test"])
    if not code.strip() or not _compiles(code):
        raise BadTests("the test code is no Python")
    entry = _entry(row, extra)
    tree = ast.parse(code)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "check" in defined and entry is None and not any(n.startswith("test") for n in defined):
        raise BadTests("the test code defines check(candidate), and no entry_point names it")
    if not any(isinstance(node, ast.Assert | ast.With | ast.Call) for node in _that_runs(tree)):
        raise BadTests("the test code checks nothing")
    return CheckerTests(None, code, setup_code(row, extra), entry)


def _that_runs(module: ast.Module) -> Iterator[ast.AST]:
    """Yields the nodes of a module's tests: no other function is called, and no main block runs."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            runs = node.name.startswith("test") or node.name == "check"
        else:
            runs = not isinstance(node, ast.If) or "__name__" not in ast.unparse(node.test)
        if runs:
            yield from ast.walk(node)


def setup_code(row: _Row, extra: _Row) -> str:
    """Returns what runs before the tests: MBPP's `test_imports` and `test_setup_code`."""
    parts: list[str] = []
    for key in ("test_imports", "test_setup_code"):
        value = row.get(key) or extra.get(key) or ""
        parts += [_text(line) for line in cast(list[Any], value)] if isinstance(value, list) else []
        parts += [value] if isinstance(value, str) else []
    code = "\n".join(part for part in parts if part.strip())
    if not _compiles(code):
        raise BadTests("the setup of the tests is no Python")
    return code


def _entry(row: _Row, extra: _Row) -> str | None:
    name = row.get("entry_point") or extra.get("entry_point")
    return None if name is None else _name(name)


def _split(source: str, *, any_expression: bool) -> CallTest | None:
    statements = ast.parse(source).body
    if len(statements) != 1 or not isinstance(statements[0], ast.Assert):
        return None
    test = statements[0].test
    if not (
        isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
    ):
        return None
    for asked, literal in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        expected = _literal(literal)
        if expected is not None:
            return _asked(asked, expected[0], any_expression=any_expression)
    return None


def _asked(node: ast.expr, expected: Any, *, any_expression: bool) -> CallTest | None:
    tree = _tree(expected)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        args = [_literal(each) for each in node.args]
        kwargs = {each.arg: _literal(each.value) for each in node.keywords}
        if None not in args and None not in kwargs.values() and None not in kwargs:
            values = [each[0] for each in args if each is not None]
            named = {key: each[0] for key, each in kwargs.items() if each is not None}
            return CallTest(node.func.id, _tree(values), _tree(named), tree, from_python=True)
    # True is easily guessed by whoever evaluates a comparison: that is no proof from inside.
    guessed = expected is None or isinstance(expected, bool)
    if not any_expression or guessed or _literal(node) is not None:
        return None
    nothing = (_tree([]), _tree({}))
    return CallTest("", *nothing, tree, from_python=True, expression=ast.unparse(node))


def _literal(node: ast.expr) -> tuple[Any] | None:
    """Returns the value of a literal, in a tuple of one; None if it is none."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _lines_of_json(text: str) -> list[Any]:
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise BadTests(f"the input of a call is no JSON: {text[:80]!r}") from error


def _json_or_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _tree(value: Any) -> Tree:
    return encode(value, _no_plain)


def _no_plain(value: Any, plain: Tree) -> Tree:
    raise BadTests(f"a test holds a {type(value).__name__}")


def _flag(row: _Row, key: str) -> bool:
    value = row.get(key, False)
    if not isinstance(value, bool):
        raise BadTests(f"{key} is {value!r}, expected true or false")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise BadTests(f"the function name {value!r} is none")
    return value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in cast(list[Any], value)):
        return "\n".join(cast(list[str], value))
    raise BadTests(f"expected text, got {type(value).__name__}")


def _compiles(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True
