"""Finds a function of the user's by its name, and says which code it is."""

import functools
import hashlib
import importlib
import importlib.util
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def load_function(name: str) -> Callable[..., Any]:
    """Returns what `package.module:function` or `folder/file.py:function` names.

    Modules are looked for in the controller's environment and then in the current directory;
    relative paths begin there. A file is read again when it has changed, a module is not.

    Raises:
        ValueError: there is no such module, file or function, or importing it fails.
    """
    place, attribute = _split(name)
    module = _load_file(place) if _is_file(place) else _load_module(place)
    try:
        found = attrgetter(attribute)(module)
    except AttributeError as error:
        raise ValueError(_no_attribute(module, attribute)) from error
    if not callable(found):
        raise ValueError(
            f"{name} is no function: it is {type(found).__name__}. Expected a function of the TRL "
            "or the verl shape."
        )
    return found


def code_digest(name: str) -> str:
    """Returns the digest of the source that `name` names, as it is on disk now.

    Of a file of its own: that file. Of a module in a package: every `.py` file of the outermost
    package. What it does not see: other packages and modules beside it that the code imports, and
    files that it reads. A module that Python itself brings is named with Python's version.

    Raises:
        ValueError: it cannot be loaded or read any more.
    """
    place, _ = _split(name)
    load_function(name)
    source = _path(place) if _is_file(place) else _source(place)
    if source is None:
        return f"python {platform.python_version()}"
    try:
        return f"sha256:{_digest(source)}"
    except OSError as error:
        raise ValueError(f"The code of {name} cannot be read: {error}.") from error


def _split(name: str) -> tuple[str, str]:
    place, _, attribute = name.rpartition(":")
    usable = _is_file(place) or (_MODULE.fullmatch(place) and place != "__main__")
    if not usable or not _MODULE.fullmatch(attribute):
        raise ValueError(
            f"{name!r} names no function. Expected 'package.module:function' or "
            "'folder/file.py:function'; what a notebook or a script defines is not there in the "
            "grading processes: write it into a file."
        )
    return place, attribute


def _is_file(place: str) -> bool:
    return place.endswith(".py")


def _path(place: str) -> Path:
    return Path(os.path.expanduser(place)).absolute()


def _load_module(place: str) -> ModuleType:
    _also_search(Path.cwd())
    # The file may be younger than what Python remembers of its directory.
    importlib.invalidate_caches()
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(_no_import(place, error)) from error


def _load_file(place: str) -> ModuleType:
    path = _path(place)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"The file {path} cannot be read: {error.strerror}. Expected the file with your reward "
            "function; a relative path begins where rollbook was started."
        ) from error
    try:
        return _run_file(path, source)
    except (Exception, SystemExit) as error:
        raise ValueError(_broken(str(path), error)) from error


@functools.lru_cache(maxsize=16)
def _run_file(path: Path, source: bytes) -> ModuleType:
    """Runs each version of a file once; bytecode that Python cached is never taken for it."""
    _also_search(path.parent)
    name = f"reward_file_{hashlib.sha256(bytes(path) + source).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses and pickle look their module up.
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def _also_search(folder: Path) -> None:
    """Last, so that no file of the user's hides a library."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _source(place: str) -> Path | None:
    """Returns the folder of the outermost package of a loaded module, or the module's file."""
    parts = place.split(".")
    for end in range(1, len(parts) + 1):
        module = sys.modules[".".join(parts[:end])]
        file = getattr(module, "__file__", None)
        if file and (hasattr(module, "__path__") or end == len(parts)):
            return Path(file).parent if hasattr(module, "__path__") else Path(file)
    return None


def _digest(source: Path) -> str:
    if not source.is_dir():
        return hashlib.sha256(source.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    named = ((path.relative_to(source).as_posix(), path) for path in source.rglob("*.py"))
    for name, path in sorted(named):
        if path.is_file():
            digest.update(f"{name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _no_import(place: str, error: BaseException) -> str:
    absent = isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}.")
    if not absent:
        return _broken(place, error)
    outer = sys.modules.get(place.partition(".")[0])
    found = f" {outer.__name__!r} is {getattr(outer, '__file__', None)}." if outer else ""
    return (
        f"There is no module {place!r} in the controller's environment or in {Path.cwd()}.{found} "
        "Start rollbook where it lies, install it, or name the file: 'folder/file.py:function'."
    )


def _broken(place: str, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        f" ({frame.filename} line {frame.lineno})"
        for frame in frames
        if frame.filename != __file__ and not frame.filename.startswith("<")
    ]
    at = lines[-1] if lines else ""
    return f"{place} does not import: {type(error).__name__}: {error}{at}. Correct it first."


def _no_attribute(module: ModuleType, attribute: str) -> str:
    callables = {name: value for name, value in vars(module).items() if callable(value)}
    own = [
        name
        for name, value in callables.items()
        if getattr(value, "__module__", None) == module.__name__
    ]
    near = get_close_matches(attribute, callables, n=3) or sorted(own)[:8]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"{module.__file__ or module.__name__} has no {attribute!r}.{hint} A module that changed "
        "after this process imported it is not read again: start a new process."
    )
