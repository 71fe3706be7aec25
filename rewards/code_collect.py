"""Finds the tests of a module, pytest-style and unittest-style, inside the checker's sandbox.

A small part of pytest under its name: raises, approx, fail, fixture, mark.parametrize and
mark.skip. It starts in a millisecond, where pytest takes half a second per sample. What a module
asks for beyond that is an error of the data set, not of the program.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rewards.code_checker import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_DEFAULT_RELATIVE, _DEFAULT_ABSOLUTE = 1e-6, 1e-12
_FUNCTION = type(lambda: None)
_NEVER_RUN = 0x20 | 0x80 | 0x200
"""Flags of generators, coroutines and both: a call of one does nothing, and would pass."""
Case = tuple[str, "Callable[[], object]"]


def prepare(module: str) -> None:
    """Makes ready for the source of a module of tests: it finds our pytest, and runs nothing."""
    sys.modules["pytest"] = Pytest()  # pyright: ignore[reportArgumentType]
    if "unittest" in module:
        __import__("unittest").main = lambda *_, **__: None


def cases(namespace: dict[str, Any]) -> Iterator[Case]:
    """Yields every test of a module that has run, in the order of the module.

    Args:
        namespace: what the tests define; an object of the program would answer to any name.
    """
    functions = {name: each for name, each in namespace.items() if type(each) is _FUNCTION}
    fixtures = {name: each for name, each in functions.items() if hasattr(each, "_fixture")}
    hooks = functions.keys() & {"setup_module", "setup_function"}
    if hooks:
        raise Unsupported(f"the tests use {min(hooks)}")
    for name, value in list(namespace.items()):
        if issubclass(type(value), type):
            yield from _class_cases(name, value, fixtures)
        elif name.startswith("test") and name in functions:
            yield from _function_cases(name, value, lambda value=value: value, fixtures)


def _class_cases(name: str, kind: type, fixtures: dict[str, Any]) -> Iterator[Case]:
    methods = [
        each for each in dir(kind) if each.startswith("test") and callable(getattr(kind, each))
    ]
    if "unittest" in sys.modules and issubclass(kind, sys.modules["unittest"].TestCase):
        for method in methods:
            yield f"{name}.{method}", lambda method=method: _run_unittest(kind, method)
    elif name.startswith("Test"):
        for method in methods:
            function = getattr(kind, method)
            yield from _function_cases(
                f"{name}.{method}", function, lambda method=method: _bound(kind, method), fixtures
            )


def _bound(kind: type, method: str) -> Any:
    instance: Any = kind()
    for hook in ("setup_class", "setup_method"):
        setup = getattr(instance, hook, None)
        if setup is not None:
            setup(*[None] * (setup.__code__.co_argcount - 1))
    return getattr(instance, method)


def _run_unittest(kind: Any, method: str) -> None:
    raised: list[BaseException] = []

    def note(*told: Any) -> None:
        if told[-1] is not None:
            raised.append(told[-1][1])

    result: Any = sys.modules["unittest"].TestResult()
    result.addError = result.addFailure = result.addSubTest = note
    kind.setUpClass()
    kind(method).run(result)
    if raised:
        raise raised[0]


def _function_cases(
    name: str, function: Any, bind: Callable[[], Any], fixtures: dict[str, Any]
) -> Iterator[Case]:
    if getattr(function, "_skipped", False):
        return
    if function.__code__.co_flags & _NEVER_RUN:
        raise Unsupported(f"the test {name} is a coroutine or a generator")
    for index, arguments in enumerate(_parametrized(function)):

        def run(arguments: dict[str, Any] = arguments) -> None:
            _call(bind(), arguments, fixtures)

        yield f"{name}[{index}]", run


def _parametrized(function: Any) -> list[dict[str, Any]]:
    combined: list[dict[str, Any]] = [{}]
    for names, rows in getattr(function, "_parameters", ()):
        combined = [
            before | dict(zip(names, row, strict=True)) for row in rows for before in combined
        ]
    return combined


def _call(function: Any, arguments: dict[str, Any], fixtures: dict[str, Any]) -> Any:
    """Calls a test or a fixture with the fixtures that its parameters name."""
    code = function.__code__
    own = [name for name in code.co_varnames[: code.co_argcount] if name != "self"]
    needed = own[: len(own) - len(function.__defaults__ or ())]
    given = dict(arguments)
    for name in needed:
        if name not in given:
            if name not in fixtures:
                raise Unsupported(f"the tests use the fixture {name}")
            value = _call(fixtures[name], {}, fixtures)
            given[name] = next(value) if hasattr(value, "gi_frame") else value
    return function(**given)


class Raises:
    """`pytest.raises`: passes if its block raises one of these exceptions."""

    def __init__(self, expected: Any, match: str | None) -> None:
        self.value: BaseException | None = None
        self._expected = expected
        self._match = match

    @property
    def type(self) -> Any:
        """The class of what was raised."""
        return type(self.value)

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> bool:
        if error is None:
            raise AssertionError(f"did not raise {self._expected}")
        if not isinstance(error, self._expected):
            return False
        self.value = error
        if self._match is not None and not __import__("re").search(self._match, str(error)):
            raise AssertionError(f"{error!s} does not match {self._match}")
        return True


class Approximate:
    """`pytest.approx`: equals numbers, and numbers in lists, tuples and dicts, that are close."""

    def __init__(self, expected: Any, relative: float | None, absolute: float | None) -> None:
        self._expected = expected
        self._relative = relative
        self._absolute = absolute

    def __eq__(self, other: Any) -> bool:
        expected = self._expected
        if isinstance(expected, dict):
            keys: Any = expected
            return (
                isinstance(other, dict)
                and keys.keys() == other.keys()
                and all(self._of(keys[key]) == other[key] for key in keys)
            )
        if isinstance(expected, list | tuple):
            return (
                isinstance(other, list | tuple)
                and len(expected) == len(other)
                and all(self._of(a) == b for a, b in zip(expected, other, strict=True))
            )
        if expected == other:
            return True
        if not _is_number(expected) or not _is_number(other):
            return False
        return bool(abs(other - expected) <= self._tolerance(abs(expected)))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        raise TypeError("approx has no hash")

    def _of(self, expected: Any) -> Approximate:
        return Approximate(expected, self._relative, self._absolute)

    def _tolerance(self, size: float) -> float:
        if self._relative is None and self._absolute is not None:
            return self._absolute
        relative = _DEFAULT_RELATIVE if self._relative is None else self._relative
        return max(relative * size, self._absolute or _DEFAULT_ABSOLUTE)


def _is_number(value: object) -> bool:
    return type(value) in (int, float, complex)


class Pytest:
    """What a test module gets where it imports pytest."""

    def __init__(self) -> None:
        self.mark = Marks()

    def raises(self, expected: Any, *call: Any, match: str | None = None, **kwargs: Any) -> Any:
        """Returns the block's watcher; with a function, calls it."""
        watcher = Raises(expected, match)
        if not call:
            return watcher
        with watcher:
            call[0](*call[1:], **kwargs)
        return watcher

    def approx(self, expected: Any, rel: float | None = None, abs: float | None = None) -> Any:
        """Returns what equals all that is close."""
        return Approximate(expected, rel, abs)

    def fail(self, reason: str = "") -> None:
        """Fails the test."""
        raise AssertionError(reason)

    def fixture(self, *function: Any, **settings: Any) -> Any:
        """Marks a function as a fixture, made anew for each test."""
        if settings.keys() - {"scope", "autouse"} or settings.get("autouse"):
            raise Unsupported("the tests use a fixture with parameters, a name or autouse")
        return _mark_fixture(function[0]) if function else _mark_fixture

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(f"the tests use pytest.{name}")


def _mark_fixture(function: Any) -> Any:
    function._fixture = True
    return function


class Marks:
    """`pytest.mark`."""

    def parametrize(self, names: Any, rows: Sequence[Any], **_: Any) -> Callable[[Any], Any]:
        """Gives a test one call per row."""
        words = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        pairs = [row if len(words) > 1 else (row,) for row in rows]

        def mark(function: Any) -> Any:
            function._parameters = [*getattr(function, "_parameters", ()), (words, pairs)]
            return function

        return mark

    def skip(self, *function: Any, **_: Any) -> Any:
        """Leaves a test out."""
        return _mark_skipped(function[0]) if function and callable(function[0]) else _mark_skipped

    def __getattr__(self, name: str) -> Any:
        if name in ("skipif", "xfail", "usefixtures", "asyncio"):
            raise Unsupported(f"the tests use pytest.mark.{name}")
        return _label


def _mark_skipped(function: Any) -> Any:
    function._skipped = True
    return function


def _label(*function: Any, **_: Any) -> Any:
    return function[0] if function and callable(function[0]) else lambda labelled: labelled
