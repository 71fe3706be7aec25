"""How fast is `rollbook verify --level chain`, and does its memory stay flat?

`python tests/benchmarks/verify.py` writes a run of 10,000 tiny but complete steps into a temporary
directory and audits it, whole and its first tenth, each in a fresh process. Prints seconds, objects
and peak memory; the last line is JSON.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from storage.audit import ChainRequest, audit_chain
from storage.backends.local import LocalStore
from storage.object_store import ObjectStore
from storage.records import sha256_hex
from tests.contract.complete_run import write_run

RUN = "made"


class UnsyncedStore(LocalStore):
    """Writes without waiting for the disk: a benchmark's run need not survive a crash."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._root = root

    def put(self, key: str, payload: bytes) -> None:
        """See `ObjectStore.put`."""
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload)

    def put_if_absent(self, key: str, payload: bytes) -> str:
        """See `ObjectStore.put_if_absent`."""
        self.put(key, payload)
        return sha256_hex(payload)


def build(directory: Path, steps: int) -> float:
    """Writes the run; returns the seconds that it took."""
    began = time.perf_counter()
    store: ObjectStore = UnsyncedStore(directory)
    write_run(store, steps, snapshot_every=10, evals=tuple(range(20, steps + 1, 20)))
    return time.perf_counter() - began


def audit(directory: Path, last: int) -> dict[str, float]:
    """Audits steps 0 to `last` in this process."""
    began, cpu = time.perf_counter(), time.process_time()
    found = audit_chain(
        LocalStore(directory),
        RUN,
        ChainRequest(last=last),
        progress=lambda done, total: None,
    )
    counts = found.tally.counts
    return {
        "steps": counts["steps"],
        "objects": counts["objects"],
        "broken": found.tally.num_findings,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_fresh_process(directory: Path, last: int) -> dict[str, float]:
    """Audits in a child, so that the peak of memory is that of one audit."""
    command = [sys.executable, __file__, "--directory", str(directory), "--audit", str(last)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Builds, audits, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--directory", type=Path, help="where a run lies, or will; kept")
    parser.add_argument("--audit", type=int, help="only audit steps 0 to this one of --directory")
    chosen = parser.parse_args()
    if chosen.audit is not None:
        print(json.dumps(audit(chosen.directory, chosen.audit)))
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = chosen.directory or Path(folder) / "store"
        if not directory.exists():
            print(f"wrote {chosen.steps} steps in {build(directory, chosen.steps):.1f} s")
        rows = [in_fresh_process(directory, last) for last in (chosen.steps // 10, chosen.steps)]
    names = ("objects", "broken", "s", "cpu s", "peak MiB", "ms/step")
    print(f"{'steps':>8} " + " ".join(f"{name:>9}" for name in names))
    for row in rows:
        print(
            f"{row['steps']:>8} {row['objects']:>9} {row['broken']:>9} {row['seconds']:>9.1f} "
            f"{row['cpu_seconds']:>9.1f} {row['peak_mib']:>9.1f} "
            f"{1000 * row['seconds'] / row['steps']:>9.2f}"
        )
    print(json.dumps({"benchmark": "verify", "rows": rows}))


if __name__ == "__main__":
    main()
