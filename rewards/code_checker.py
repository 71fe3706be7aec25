"""Runs a data set's tests in a sandbox of their own, against a program in another one.

What the tests see of the program are plain copies of its values, and proxies of everything else.
Verdicts are made here and leave through this process's standard output, which the program cannot
reach. Imports next to nothing: starting is what a test costs most.
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import TYPE_CHECKING, Any

from rewards.code_harness import MAX_LINE_BYTES, MODULE, SOCKET
from rewards.plain_values import decode, dumps, encode, loads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHANGEABLE = (list, dict, set, bytearray)
_MODULES = (MODULE, "main", "program")
"""Names under which tests import the program."""
_JUDGES = ("math", "cmath", "collections", "itertools", "functools", "operator")
"""Modules that tests judge with, imported or not: a program's own object is none of them."""
Case = tuple[str, "Callable[[], object]"]


class Unsupported(BaseException):
    """The tests ask for something that cannot cross between sandboxes: theirs is no verdict."""


class ProgramGone(BaseException):
    """The program ended, or speaks nonsense: no test after this one can be asked."""


def _unary(name: str) -> Callable[..., Any]:
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask(name, self, *args, **kwargs)

    return ask


def _binary(name: str) -> Callable[..., Any]:
    def ask(self: Any, other: Any) -> Any:
        return self._link.ask(name, self, other) if isinstance(other, Proxy) else NotImplemented

    return ask


def _is_a(question: str) -> Callable[..., Any]:
    def ask(self: Any, other: Any) -> bool:
        return isinstance(other, Proxy) and self._link.ask(question, other, self) is True

    return ask


_UNARY = (
    *("call", "iter", "len", "next", "reversed", "str", "repr", "bool", "int", "float", "complex"),
    *("abs", "round", "neg", "pos", "invert", "index", "getitem", "setitem", "delitem"),
    *("hash", "dir", "getattr", "setattr", "delattr"),
)
_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "xor", "lshift"),
    *("rshift", "lt", "le", "gt", "ge"),
)


class _Asks:
    """The operators of a proxy: each is a question to the program."""

    __slots__ = ()
    locals().update({f"__{name}__": _unary(name) for name in _UNARY})
    locals().update({f"__{name}__": _binary(name) for name in _BINARY})
    locals().update({f"__{name}__": _binary(f"{name}_") for name in ("and", "or")})
    __instancecheck__ = _is_a("isinstance")
    __subclasscheck__ = _is_a("issubclass")


class Proxy(_Asks):
    """An object of the program. It has no data: what it is asked, the program answers.

    It equals itself, and what the program says of its other objects. Between an object of the
    program and plain data no operator is asked, or an object could claim to equal every number:
    such operators raise TypeError, and it equals no plain data but that which it is a subclass of.
    """

    __slots__ = ("_link", "_tree")

    def __init__(self, link: Link, tree: dict[str, Any]) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_tree", tree)

    @property
    def __class__(self) -> type:
        """What it is a subclass of, so that `isinstance(counter, dict)` holds here too."""
        plain = self._tree["plain"]
        return Proxy if plain is None else type(decode(plain, self._link.meet))

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("an object of the program keeps its class")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Proxy):
            return self._link.ask("eq", self, other) is True
        if self._tree["plain"] is None:
            return False
        return bool(self._plain_now() == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = _unary("hash")  # An equality of its own would take it away.

    def __contains__(self, item: object) -> bool:
        """Looks through its items: an object could claim to hold everything."""
        if isinstance(item, Proxy):
            return self._link.ask("contains", self, item) is True
        if self._tree["plain"] is not None:
            return item in self._plain_now()
        return any(each is item or each == item for each in self._link.ask("iter", self))

    def _plain_now(self) -> Any:
        return self._link.decode(self._link.ask_tree("itself", self)["plain"])

    def __enter__(self) -> Any:
        return self._link.ask("enter", self)

    def __exit__(self, *error: object) -> Any:
        return self._link.ask("exit", self, None, None, None)


class Link:
    """The socket to the program, and what was met of it so far."""

    def __init__(self, socket: int) -> None:
        self._socket = socket
        self._reader = os.fdopen(socket, "rb", closefd=False)
        self._proxies: dict[int, Any] = {}
        self._callbacks: list[Callable[..., Any]] = []
        self.names: dict[str, Any] = {}
        self.on_first_ask: Callable[[], None] | None = None
        """Is called before the first question: the program has a part in what comes after."""

    def load(self) -> None:
        """Waits until the program has run; raises what it raised."""
        trees = self._answer()
        self.names = {str(name): tree for name, tree in trees.items()}

    def begin_test(self, cpu_s: float) -> None:
        """Gives the program `cpu_s` more CPU seconds."""
        self._send({"test": cpu_s})

    def get_global(self, name: str) -> Any:
        """Returns what the program calls `name`."""
        return self.ask("global", name)

    def ask(self, action: str, *args: Any, **kwargs: Any) -> Any:
        """Returns what the program answers; raises what it raised."""
        return self.decode(self._ask(action, args, kwargs))

    def ask_tree(self, action: str, *args: Any) -> Any:
        """Returns the answer as it came, where it is an object's."""
        tree = self._ask(action, args, {})
        if type(tree) is not dict or "plain" not in tree:
            raise ProgramGone("forged")
        return tree

    def decode(self, tree: Any) -> Any:
        """Returns the value of a tree that the program sent; one that is none ends it."""
        try:
            return decode(tree, self.meet)
        except Exception as error:
            raise ProgramGone("forged") from error

    def _ask(self, action: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.on_first_ask is not None:
            self.on_first_ask()
            self.on_first_ask = None
        self._send({"do": action, "args": self._encode(list(args)), "kwargs": self._encode(kwargs)})
        answer = self._answer()
        if action == "call":
            self._write_back(args[1:], answer.get("args"))
            self._write_back(tuple(kwargs.values()), answer.get("kwargs"))
        return answer.get("value")

    def _answer(self) -> dict[str, Any]:
        while True:
            answer = self._receive()
            if "callback" in answer:
                self._call_back(answer)
            elif "error" in answer:
                raise self._exception(answer)
            else:
                return answer

    def _write_back(self, given: tuple[Any, ...], tree: Any) -> None:
        """Changes the caller's arguments as the program changed its copies."""
        after = self.decode(tree)
        if type(after) is dict:
            after = list(after.values())
        for old, new in zip(given, after or (), strict=False):
            _update(old, new)

    def _call_back(self, message: dict[str, Any]) -> None:
        try:
            function = self._callbacks[message["callback"]]
            args, kwargs = self.decode(message["args"]), self.decode(message["kwargs"])
        except (LookupError, TypeError, ValueError) as error:
            raise ProgramGone("forged") from error
        try:
            reply = {"returned": self._encode(function(*args, **kwargs))}
        except Exception as error:
            plain = encode(list(error.args), lambda value, plain: plain)
            reply = {"raised": type(error).__name__, "args": plain}
        self._send(reply)

    def _exception(self, answer: dict[str, Any]) -> BaseException:
        kind = self.decode(answer["error"])
        args = self.decode(answer.get("args"))
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ProgramGone("exit_code")
        try:
            error = kind(*args)
        except Exception:
            error = _unmade(kind, args)
        error.__dict__["_from_program"] = True
        return error

    def meet(self, tree: dict[str, Any]) -> Any:
        """Returns the one object here that stands for an object of the program."""
        number = tree["o"]
        if number not in self._proxies:
            self._proxies[number] = self._stand_in(tree)
        return self._proxies[number]

    def _stand_in(self, tree: dict[str, Any]) -> Any:
        if "exception" not in tree:
            return Proxy(self, tree)
        base = getattr(builtins, str(tree["exception"]), None)
        if not (isinstance(base, type) and issubclass(base, BaseException)):
            raise ValueError(f"{tree['exception']} is no exception")
        if tree["name"] == base.__name__:
            return base
        own = {"__init__": lambda self, *args: None, "_tree": {"o": tree["o"]}}
        return type(str(tree["name"]), (base,), own)

    def _encode(self, value: Any) -> Any:
        return encode(value, self._opaque)

    def _opaque(self, value: Any, plain: Any) -> Any:
        if isinstance(value, Proxy) or (isinstance(value, type) and hasattr(value, "_tree")):
            met: Any = value
            return {"o": met._tree["o"]}
        if plain is not None:
            return plain
        if callable(value):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        raise Unsupported(f"a test passes a {type(value).__name__} to the program")

    def _send(self, message: Any) -> None:
        line = (dumps(message) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._socket, line) :]
        except OSError as error:
            raise ProgramGone("ended") from error

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._reader.readline(MAX_LINE_BYTES)
        except OSError:
            line = b""
        if not line:
            raise ProgramGone("ended")
        try:
            message = loads(line.decode("ascii"))
        except ValueError as error:
            raise ProgramGone("forged") from error
        if type(message) is not dict:
            raise ProgramGone("forged")
        return message


def _unmade(kind: type[Exception], args: Any) -> Exception:
    """Returns an exception of a kind that takes other arguments than those it ended up with."""
    try:
        return kind.__new__(kind, *args)
    except Exception as error:
        raise ProgramGone("forged") from error


def _update(old: Any, new: Any) -> None:
    if not isinstance(old, _CHANGEABLE) or type(old) is not type(new) or old == new:
        return
    changed: Any = old
    changed.clear()
    if isinstance(old, list | bytearray):
        changed.extend(new)
    else:
        changed.update(new)


def main() -> None:
    """Runs the tests that standard input holds, and writes a line for each step and each test.

    What the tests print goes nowhere: it can be long, and be the program's.
    """
    request = loads(sys.stdin.readline())
    verdicts = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # What `site` would have brought.

    def say(**line: Any) -> None:
        os.write(verdicts, (dumps(line) + "\n").encode())

    try:
        _run(request, Link(SOCKET), say)
    except ProgramGone as gone:
        say(gone=str(gone))
    except Unsupported as error:
        say(unsupported=str(error))
    except Exception as error:
        say(failed=type(error).__name__, in_program=hasattr(error, "_from_program"))


def _run(request: dict[str, Any], link: Link, say: Callable[..., None]) -> None:
    try:
        link.load()
        namespace = names_for_tests(request, link)
    except Exception as error:  # So far only what the program sent was read.
        say(failed=type(error).__name__, in_program=True)
        return
    say(loaded=True)
    link.on_first_ask = lambda: say(asked=True)
    cases = list(_cases(request, link, namespace))
    say(tests=len(cases))
    for _, case in cases:
        link.begin_test(request["cpu_s"])
        say(**_outcome(case))
    say(done=True)


def _outcome(case: Callable[[], object]) -> dict[str, Any]:
    try:
        case()
    except AssertionError:
        return {"passed": False, "error": None}
    except ModuleNotFoundError as error:
        if hasattr(error, "_from_program"):
            return {"passed": False, "error": type(error).__name__}
        raise Unsupported(f"the tests import {error.name}, which is not there") from error
    except SystemExit as end:  # Tests that are a script say so that they have failed.
        return {"passed": end.code in (None, 0), "error": "SystemExit"}
    except Exception as error:
        return {"passed": False, "error": type(error).__name__}
    return {"passed": True}


def _cases(request: dict[str, Any], link: Link, namespace: dict[str, Any]) -> Iterator[Case]:
    """Yields the tests in order; setup runs before the first."""
    if request["setup"]:
        exec(compile(request["setup"], "setup", "exec"), namespace)
    if request["asserts"] is not None:
        for index, source in enumerate(request["asserts"]):
            code = compile(source, f"test {index + 1}", "exec")
            yield str(index + 1), lambda code=code: exec(code, namespace)
        return
    yield from _module_cases(request, link, namespace)


def _module_cases(request: dict[str, Any], link: Link, namespace: dict[str, Any]) -> Iterator[Case]:
    collect: Any = __import__("rewards.code_collect", fromlist=["cases"])
    collect.prepare(request["module"])
    code = compile(request["module"], "tests", "exec")
    entry = request["entry_point"]
    before = dict(namespace)
    try:
        exec(code, namespace)
    except (Exception, SystemExit) as error:
        # No test is known yet: the module is the one that failed.
        yield "module", _raiser(error)
        return
    # A program may call something `check` or `test_this` too.
    own = {
        name: each
        for name, each in namespace.items()
        if name not in before or before[name] is not each
    }
    if entry and callable(own.get("check")):
        yield "check", lambda: own["check"](link.get_global(entry))
        return
    found = list(collect.cases(own))
    yield from found
    if not found and not any(name[:4] in ("test", "Test") for name in own):
        yield "module", lambda: None


def _raiser(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def names_for_tests(request: dict[str, Any], link: Link) -> dict[str, Any]:
    """Returns the globals of test code: the program's names, but never in place of a builtin.

    Its modules are this sandbox's own: those of the program may be patched.
    """
    namespace: dict[str, Any] = {"__name__": "tests"}
    entry = request["entry_point"]
    module = type(sys)(MODULE)
    for name, tree in link.names.items():
        value = _own_module(tree) if _is_module(tree) else link.decode(tree)
        if name in _JUDGES and name != entry:
            value = __import__(name)
        if value is None and tree is not None:
            continue
        setattr(module, name, value)
        if name == entry or not hasattr(builtins, name):
            namespace[name] = value
    if entry and entry not in link.names and "Solution" in link.names:
        namespace[entry] = link.get_global(entry)
        setattr(module, entry, namespace[entry])
    for name in _MODULES:
        sys.modules[name] = module
    return namespace


def _is_module(tree: Any) -> bool:
    return type(tree) is dict and "module" in tree


def _own_module(tree: Any) -> Any:
    name = str(tree["module"])
    if name.partition(".")[0] not in sys.stdlib_module_names or "__main__" in name:
        return None
    try:
        return __import__(name, fromlist=["*"])
    except (Exception, SystemExit):  # The program made one up, or one that needs a screen.
        return None
