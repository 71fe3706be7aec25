"""How the two environments are made, and when they need not be."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from infra.install import CONTROLLER, ENGINES, Environment

REPOSITORY = Path(__file__).parents[3]
IN_STORED_BYTES = ("pyarrow", "pydantic", "pydantic-core", "safetensors", "numpy", "transformers")


def pins(constraints: Path) -> dict[str, str]:
    lines = (line.strip() for line in constraints.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def install(checkout: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "infra.install"],
        cwd=checkout,
        env={**os.environ, "ROLLBOOK_HOME": str(checkout / "home"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def pretend_installed(checkout: Path, *names: str) -> None:
    """Stamps environments of a checkout as current."""
    code = (
        "import sys, infra.install\n"
        "for each in (getattr(infra.install, name) for name in sys.argv[1:]):\n"
        "    each.directory.mkdir()\n"
        "    (each.directory / 'rollbook-stamp').write_text(each.fingerprint())\n"
    )
    subprocess.run([sys.executable, "-c", code, *names], cwd=checkout, check=True)


@pytest.fixture
def other_checkout(tmp_path: Path) -> Path:
    checkout = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / "infra", checkout / "infra")
    shutil.copy(REPOSITORY / "pyproject.toml", checkout)
    return checkout


def test_what_decides_stored_bytes_is_pinned_alike_in_both_environments() -> None:
    controller, engines = pins(CONTROLLER.constraints), pins(ENGINES.constraints)
    assert {name: controller[name] for name in IN_STORED_BYTES} == {
        name: engines[name] for name in IN_STORED_BYTES
    }


@pytest.mark.parametrize("environment", [CONTROLLER, ENGINES], ids=lambda each: each.name)
def test_every_direct_dependency_is_pinned(environment: Environment) -> None:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = environment.extras.split(",")
    wanted = [*project["dependencies"]]
    wanted += [each for extra in extras for each in project["optional-dependencies"][extra]]
    names = [re.split(r"[^A-Za-z0-9_-]", each)[0].replace("_", "-").lower() for each in wanted]
    assert "pyarrow" in names
    assert [name for name in names if name not in pins(environment.constraints)] == []


def test_environments_that_are_current_cost_no_time(other_checkout: Path) -> None:
    pretend_installed(other_checkout, "CONTROLLER", "ENGINES")
    began = time.monotonic()
    result = install(other_checkout)
    assert (result.returncode, result.stdout) == (0, "")
    assert time.monotonic() - began < 1.0


@pytest.mark.slow
def test_a_failed_download_says_where_the_log_is_and_leaves_no_stamp(other_checkout: Path) -> None:
    pretend_installed(other_checkout, "ENGINES")
    result = install(
        other_checkout, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE="/dev/null"
    )
    assert result.returncode == 1
    assert "installing packages failed" in result.stderr
    assert str(other_checkout / "home" / "logs" / "install") in result.stderr
    assert "`make install` goes on from here" in result.stderr
    assert not (other_checkout / ".venv" / "rollbook-stamp").exists()
