"""A real run goes on to the same bits after gc, and what was given up comes back by a fork."""

import json
import shutil
from pathlib import Path

import pytest

from infra.home import home as product_home
from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

SMALL = ("--set", "evaluate.suites.held_out.max_prompts=64", "--set", "train.snapshot_every=2")
STRICT = ("--set", "retention.policies_every=1000", "--set", "retention.snapshots_every=1000")


@pytest.fixture
def alone(cli: Cli, tmp_path: Path) -> Cli:
    """The command with a cache that holds base models and nothing of any run."""
    home = tmp_path / "home"
    (home / "cache").mkdir(parents=True)
    for name in ("models", "inductor", "torch-extensions"):
        (home / "cache" / name).symlink_to(product_home() / "cache" / name)
    return Cli(home, str(tmp_path / "store"), cli.environment | {"ROLLBOOK_HOME": str(home)})


def digests(cli: Cli, run: str) -> list[str]:
    shown = json.loads(cli.ok("show", run, "--json", "--store", cli.store))
    return [step["policy_digest"] for step in shown["steps"]]


def forget(cli: Cli) -> None:
    """Empties the cache of what runs left there, so that only the store can bring it back."""
    for path in (cli.home / "cache").iterdir():
        if not path.is_symlink():
            shutil.rmtree(path)


def test_a_run_goes_on_to_the_same_bits_after_gc(alone: Cli) -> None:
    at = ("--store", alone.store)
    alone.ok("launch", "addition", "--run", "r", "--steps", "7", *SMALL, *at)
    report = json.loads(alone.ok("gc", "r", "--delete", "--json", *STRICT, *at))
    assert report["goes"]["policy"]["objects"] == 5
    assert sorted(report["policies"]) == ["0", "6", "7"]
    assert "unreferenced" not in report["goes"]
    forget(alone)
    refused = alone("fork", "r@3", "--run", "f", *at)
    assert refused.returncode == 1
    said = " ".join(refused.stderr.split())
    assert "was given up by retention" in said
    assert "rollbook fork r@0 --run NEW" in said
    alone.ok("resume", "r", "--steps", "1", *at)
    forget(alone)
    alone.ok("fork", "r@0", "--run", "back", "--steps", "8", *at)
    assert digests(alone, "back") == digests(alone, "r")
    assert "are equal" in alone.ok("diff", "r", "back", *at)
