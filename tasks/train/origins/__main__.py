"""Makes or checks a base model: `python -m tasks.train.origins NAME DIR` or `--check DIR`.

Runs in the engines' environment. Prints a line per thing that takes time; a failure ends with its
cause as the last line on stderr.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tasks.errors import Permanent
from tasks.processes import kill_group
from tasks.train.origins import BUILTIN
from tasks.train.origins.landing import open_landing


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="a hub name, a directory, or builtin:<name>")
    parser.add_argument("directory", type=Path, help="where the model is, or is to be")
    parser.add_argument("--check", action="store_true", help="check the directory, print JSON")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of the result")
    parser.add_argument("--lifeline", action="store_true", help="end when standard input closes")
    arguments = parser.parse_args()
    if not arguments.check and arguments.name is None:
        parser.error("a model NAME is needed, unless --check is given")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("TQDM_DISABLE", "1")
    if arguments.lifeline:
        if os.getpgrp() != os.getpid():
            os.setsid()
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _work(arguments)
    except (Permanent, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _end_with_parent() -> None:
    """Ends this process and its group when the parent does, which holds our standard input."""
    while os.read(0, 1):
        pass
    kill_group(os.getpid())


def _work(arguments: argparse.Namespace) -> None:
    if arguments.check:
        checking = importlib.import_module("tasks.train.origins.checking")
        print(json.dumps(checking.check(arguments.directory)))  # noqa: T201 - the answer
    else:
        make(arguments.name, arguments.directory, threads=arguments.threads, say=_say)


def make(name: str, directory: Path, *, threads: int, say: Callable[[str], None]) -> None:
    """Makes `directory` a Hugging Face model directory: whole, or not there at all.

    Safe to call from several processes; whoever is last to finish finds it made.

    Args:
        name: `builtin:<name>`, a hub name, or a directory.
        directory: what to make; left alone if it is there.
        threads: CPU threads of a supervised start; its bits depend on them.
        say: told what is being done.

    Raises:
        Permanent: no such model, or no way to it from this machine.
    """
    if directory.exists():
        return
    with open_landing(directory.parent) as landing:
        made = landing / "model"
        _maker(name)(name, made, threads=threads, say=say)
        try:
            made.rename(directory)
        except OSError:
            # Another process was first; what it made is as good.
            shutil.rmtree(made)


def _maker(name: str) -> Callable[..., None]:
    if not name.startswith("builtin:"):
        return importlib.import_module("tasks.train.origins.huggingface").make
    short = name.removeprefix("builtin:")
    if short not in BUILTIN:
        raise Permanent(
            f"There is no model {name!r}. Expected one of "
            f"{', '.join(f'builtin:{known}' for known in sorted(BUILTIN))}, a directory, or the "
            "name of a model on the hub."
        )
    return importlib.import_module(BUILTIN[short]).make


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the caller shows it


if __name__ == "__main__":
    sys.exit(main())
