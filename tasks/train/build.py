"""Builds DeepSpeed's communication op into the cache: `python -m tasks.train.build CACHE`.

`init_distributed` compiles it the first time (20 s on a quiet machine, minutes on a busy one), so
the installer does it ahead.
"""

import argparse
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import subprocess
import sys
from pathlib import Path

from tasks.errors import Permanent

logger = logging.getLogger(__name__)

_TAIL_BYTES = 2000


def extensions_dir(cache: Path) -> Path:
    """Returns where compiled ops lie: one directory per pair of library versions and environment.

    The compiler is given the environment's path, and another path means compiling again: two
    environments that share a cache would do so by turns.
    """
    versions = [f"{name}-{importlib.metadata.version(name)}" for name in ("torch", "deepspeed")]
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return cache / "torch-extensions" / "-".join([*versions, environment])


def ensure(cache: Path) -> Path:
    """Returns the directory of compiled ops, building them in a child process if need be.

    Safe to call from several processes: one builds, the others wait.

    Raises:
        Permanent: the compiler failed; the message ends with what it said.
    """
    directory = extensions_dir(cache)
    directory.mkdir(parents=True, exist_ok=True)
    done = directory / "built"
    with (directory / "building.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _build(directory)
            done.touch()
    return directory


def _build(directory: Path) -> None:
    logger.info("compiling DeepSpeed's communication op into %s (once)", directory)
    # torch waits for ever on the lock file of a build that was killed; under our lock none lives.
    for stale in directory.glob("*/lock"):
        stale.unlink()
    code = (
        "from deepspeed.accelerator import get_accelerator\n"
        "if get_accelerator().device_name() == 'cpu':\n"
        "    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder\n"
        "    ShareMemCommBuilder().load()\n"
    )
    built = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(directory)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if built.returncode != 0:
        said = (built.stdout + built.stderr).decode("utf-8", "replace")[-_TAIL_BYTES:]
        raise Permanent(
            "DeepSpeed's communication op does not compile. Expected g++ and ninja on PATH. "
            f"Install them and run `make install` again. The compiler said:\n{said}"
        )


def main() -> None:
    """Builds into the cache named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path, help="the host cache, `<home>/cache`")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ensure(parser.parse_args().cache)


if __name__ == "__main__":
    main()
