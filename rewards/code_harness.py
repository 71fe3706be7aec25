"""Runs a model's program inside a sandbox and answers what it is asked. No verdict is made here.

All of this shares a process with the hostile program and is worth no more than it: answers are
compared elsewhere, with expectations that never come here. It imports next to nothing, because
starting is what a test costs most.
"""

from __future__ import annotations

import _operator
import builtins
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from rewards.plain_values import decode, dumps, encode, loads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROGRAM = "program.py"
MODULE = "solution"
SOCKET = 3
MAX_LINE_BYTES = 16 << 20

_Namespace = dict[str, Any]


def call() -> None:
    """Calls a function of the program for every test that standard input names; one line each."""
    request = loads(sys.stdin.readline())
    answers = _move_away(1)
    _close_stdin()
    namespace = load()
    for test in request["tests"]:
        _limit_cpu(request["cpu_s"])
        os.write(answers, (dumps(_answer(namespace, test)) + "\n").encode())


def serve() -> None:
    """Answers a checker at the other end of the socket until it hangs up."""
    _close_stdin()
    os.dup2(2, 1)
    _Server(SOCKET).run()


def load() -> _Namespace:
    """Runs the program as a module named `solution` and returns its names."""
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # What `site` would have brought.
    with open(PROGRAM, "rb") as file:
        source = file.read()
    module = type(sys)(MODULE)
    sys.modules[MODULE] = module
    if b"class Solution" in source:
        # Tasks of that kind show a signature with List[int] and import it unseen.
        exec("from typing import *", module.__dict__)
    exec(compile(source, PROGRAM, "exec"), module.__dict__)
    return module.__dict__


def function(namespace: _Namespace, name: str) -> Any:
    """Returns the function `name`, or that method of a new `Solution`.

    Raises:
        NameError: there is none.
    """
    if name in namespace:
        return namespace[name]
    solution = namespace.get("Solution")
    if solution is not None and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"name {name!r} is not defined")


def _answer(namespace: _Namespace, test: dict[str, Any]) -> dict[str, Any]:
    try:
        if "expression" in test:
            value = eval(test["expression"], namespace)
        else:
            arguments = decode(test["args"], _no_stranger)
            named = decode(test["kwargs"], _no_stranger)
            value = function(namespace, test["fn"])(*arguments, **named)
        return {"value": encode(value, _unknown)}
    except Exception as error:
        return {"error": type(error).__name__}


def _unknown(value: Any, plain: Any) -> Any:
    return {"o": type(value).__name__} if plain is None else plain


def _no_stranger(tree: Any) -> Any:
    raise ValueError(f"{tree} is no value")


def _move_away(fd: int) -> int:
    """Returns a copy of `fd`, which becomes standard error: a print is no answer."""
    moved = os.dup(fd)
    os.dup2(2, fd)
    return moved


def _close_stdin() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _limit_cpu(seconds: float) -> None:
    """Lets the kernel end this process after so many more CPU seconds (SIGPROF).

    For honest programs, so that the test that took too long is known. The sum of all is limited
    outside.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


class _Server:
    """Holds the program's objects that the checker knows by number."""

    def __init__(self, socket: int) -> None:
        self._reader = os.fdopen(socket, "rb", closefd=False)
        self._socket = socket
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._namespace: _Namespace = {}

    def run(self) -> None:
        self._reply(self._load)
        while True:
            request = self._receive()
            if "test" in request:
                _limit_cpu(request["test"])
            else:
                self._reply(lambda request=request: self._act(request))

    def _load(self) -> Any:
        self._namespace = load()
        names = {name: value for name, value in self._namespace.items() if name[:2] != "__"}
        return {name: self._encode(value) for name, value in names.items()}

    def _act(self, request: dict[str, Any]) -> Any:
        arguments = self._decode(request["args"])
        named = self._decode(request["kwargs"])
        value = _ACTIONS[request["do"]](self, *arguments, **named)
        answer = {"value": self._encode(value)}
        # What a call did to its arguments is seen by the caller, as if there were no wall.
        if request["do"] == "call":
            answer["args"] = self._encode(arguments[1:])
            answer["kwargs"] = self._encode(named)
        return answer

    def _reply(self, act: Callable[[], Any]) -> None:
        try:
            answer = act()
        except Exception as error:
            answer = self._error(error)
        self._send(answer)

    def _error(self, error: BaseException) -> dict[str, Any]:
        try:
            arguments = encode(error.args, lambda value, plain: plain)
        except Exception:
            arguments = {"t": []}
        return {"error": self._encode(type(error)), "args": arguments}

    def _send(self, message: Any) -> None:
        line = (dumps(message) + "\n").encode()
        while line:
            line = line[os.write(self._socket, line) :]

    def _receive(self) -> dict[str, Any]:
        line = self._reader.readline()
        if not line:
            os._exit(0)  # The checker has hung up.
        return loads(line.decode())

    def _encode(self, value: Any) -> Any:
        return encode(value, self._number)

    def _decode(self, tree: Any) -> Any:
        return decode(tree, self._stranger)

    def _number(self, value: Any, plain: Any) -> Any:
        known = self._numbers.get(id(value))
        if known is None:
            known = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        tree = {"o": known, "plain": plain}
        if type(value) is type(sys):
            tree["module"] = value.__name__
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [base for base in value.__mro__ if base.__module__ == "builtins"]
            tree |= {"exception": bases[0].__name__, "name": value.__name__}
        return tree

    def _stranger(self, tree: Any) -> Any:
        if "o" in tree:
            return self._objects[tree["o"]]
        return _Callback(self, tree["callback"])

    def ask_back(self, number: int, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        """Calls a function of the checker, and answers what that asks meanwhile."""
        self._send(
            {"callback": number, "args": self._encode(arguments), "kwargs": self._encode(named)}
        )
        while True:
            message = self._receive()
            if "returned" in message:
                return self._decode(message["returned"])
            if "raised" in message:
                kind = getattr(builtins, message["raised"], Exception)
                raise kind(*self._decode(message["args"]))
            self._reply(lambda message=message: self._act(message))

    def get_global(self, name: str) -> Any:
        """Returns what the program calls `name`, or that method of a `Solution`."""
        return function(self._namespace, name)


class _Callback:
    """A function of the checker: it can be called and nothing else."""

    def __init__(self, server: _Server, number: int) -> None:
        self._server = server
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._server.ask_back(self._number, list(args), kwargs)


def _on_object(act: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: act(*args, **kwargs)


_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"),
    *("lshift", "rshift", "neg", "pos", "invert", "lt", "le", "gt", "ge", "eq"),
    *("getitem", "setitem", "delitem", "contains", "index"),
)
_ACTIONS: dict[str, Callable[..., Any]] = {
    "global": _Server.get_global,
    "call": lambda _, target, *args, **kwargs: target(*args, **kwargs),
    **{name: _on_object(getattr(_operator, name)) for name in _OPERATORS},
    **{
        each.__name__: _on_object(each)
        for each in (getattr, setattr, delattr, len, iter, next, reversed, str, repr, bool, int)
    },
    **{
        each.__name__: _on_object(each)
        for each in (float, complex, abs, round, hash, isinstance, issubclass, dir)
    },
    "itself": _on_object(lambda value: value),
    "enter": _on_object(lambda value: type(value).__enter__(value)),
    "exit": _on_object(lambda value, *error: type(value).__exit__(value, *error)),
}
