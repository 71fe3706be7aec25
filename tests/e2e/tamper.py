"""Spoils every kind of object of a real run, one after the other, and asks `verify` what it sees.

`python -m tests.e2e.tamper DIRECTORY RUN` does so with a copy of the store in DIRECTORY and prints
the table.
"""

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.verification import VerifyOptions, verify_run
from flows.verify_report import Report
from storage.backends.local import LocalStore
from storage.layout import runs_prefix
from storage.ledger import head, read_run
from tasks.workspace import Workspace

WAYS = ("flip a bit", "cut a byte", "swap", "delete")
KINDS = {
    "run.json": r"runs/[^/]+/run\.json",
    "plan": r".*/plan-\d+\.json",
    "commit": r".*/steps/\d+/commit\.json",
    "prompts record": r".*/steps/.*/stages/prompts/.*",
    "rollout record": r".*/steps/.*/stages/rollout-\d+/.*",
    "reward record": r".*/steps/.*/stages/reward-\d+/.*",
    "train record": r".*/steps/.*/stages/train/.*",
    "prompts shard": r".*/steps/.*/prompts\.parquet",
    "rollout shard": r".*/steps/.*/rollout-\d+\.parquet",
    "reward shard": r".*/steps/.*/reward-\d+\.parquet",
    "train shard": r".*/steps/.*/attempts/[^/]+/train\.parquet",
    "policy file": r".*/policy/.*\.safetensors",
    "probe": r".*/probe\.json",
    "snapshot file": r".*/attempts/[^/]+/snapshot/.*",
    "evaluation": r".*/evals/.*/eval\.json",
    "evaluation's rollout record": r".*/evals/.*/stages/rollout-\d+/.*",
    "evaluation's reward record": r".*/evals/.*/stages/reward-\d+/.*",
    "evaluation's rollout shard": r".*/evals/.*/rollout-\d+\.parquet",
    "evaluation's reward shard": r".*/evals/.*/reward-\d+\.parquet",
    "training prompts": r"inputs/.*/train\.parquet",
    "held-out prompts": r"inputs/.*/held_out\.parquet",
    "tokenizer": r"inputs/.*/tokenizer.*\.json",
    "model config": r"inputs/.*/(generation_)?config\.json",
}


@dataclass(frozen=True)
class Case:
    """One object spoilt in one way. `seen` if verify failed and named it, in `words`."""

    kind: str
    way: str
    key: str
    seen: bool
    words: str


class Lab:
    """A run in a directory, its head known, every object of it as it should be between cases."""

    def __init__(self, directory: Path, run: str, workspace: Workspace) -> None:
        self.directory, self.run = directory, run
        self._store = LocalStore(directory)
        self._workspace = workspace
        newest = head(self._store, run)
        assert newest is not None, "the run has commits"
        self.head = newest[1]

    def verify(self, *, known_head: bool = True) -> Report:
        """Checks the chain as it is now."""
        options = VerifyOptions(level="chain", head=self.head if known_head else None)
        return verify_run(
            self._store,
            self.run,
            options,
            workspace=self._workspace,
            progress=lambda what, done, total: None,
        )

    def keys(self) -> dict[str, list[str]]:
        """Returns the keys of every kind; what no kind claims is under `other`."""
        found: dict[str, list[str]] = {}
        record, _ = read_run(self._store, self.run)
        inputs = {
            ref.key.rsplit("/", 1)[0]
            for ref in [record.prompts.train, *record.model.files.values()]
        }
        for entry in self._store.list(""):
            ours = entry.key.startswith(f"{runs_prefix()}{self.run}/")
            if not ours and entry.key.rsplit("/", 1)[0] not in inputs:
                continue
            kinds = [kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, entry.key)]
            found.setdefault(kinds[0] if kinds else "other", []).append(entry.key)
        return found

    def cases(self) -> Iterator[Case]:
        """Spoils the last object of every kind but the last step's, and the very last, each way."""
        for kind, keys in self.keys().items():
            if kind != "other":
                for key in dict.fromkeys([keys[len(keys) // 2], keys[-1]]):
                    yield from self._spoil(kind, key, keys)

    def _spoil(self, kind: str, key: str, siblings: list[str]) -> Iterator[Case]:
        path = self.directory / key
        content = path.read_bytes()
        for position in sorted({0, len(content) // 3, len(content) // 2, len(content) - 1}):
            flipped = bytearray(content)
            flipped[position] ^= 1
            yield self._case(kind, WAYS[0], {key: bytes(flipped)})
        yield self._case(kind, WAYS[1], {key: content[:-1]})
        yield self._case(kind, WAYS[3], {key: None})
        others = [one for one in siblings if (self.directory / one).read_bytes() != content]
        if others:
            other = others[-1]
            swapped = {key: (self.directory / other).read_bytes(), other: content}
            yield self._case(kind, WAYS[2], swapped)

    def _case(self, kind: str, way: str, changes: dict[str, bytes | None]) -> Case:
        key = next(iter(changes))
        before = {name: (self.directory / name).read_bytes() for name in changes}
        for name, content in changes.items():
            _write(self.directory / name, content)
        try:
            report = self.verify()
        finally:
            for name, content in before.items():
                _write(self.directory / name, content)
        findings = [finding for promise in report.promises for finding in promise.broken]
        named = [finding for finding in findings if finding.key == key]
        words = f"expected {named[0].expected}; found {named[0].found}" if named else "-"
        return Case(kind, way, key, not report.holds and bool(named), words)


def _write(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def table(cases: list[Case]) -> str:
    """Returns how many cases of every kind and way were found and named, as a table."""
    lines = [f"{'object':<30}" + "".join(f"{way:>14}" for way in WAYS)]
    for kind in KINDS:
        cells = [[case for case in cases if (case.kind, case.way) == (kind, way)] for way in WAYS]
        texts = [
            f"{sum(case.seen for case in cell)}/{len(cell)}" if cell else "-" for cell in cells
        ]
        lines.append(f"{kind:<30}" + "".join(f"{text:>14}" for text in texts))
    seen = sum(case.seen for case in cases)
    return "\n".join([*lines, f"found and named: {seen} of {len(cases)}"])


def _share(cases: list[Case]) -> str:
    return f"{sum(case.seen for case in cases)}/{len(cases)}" if cases else "-"


def main() -> None:
    """Copies the store, spoils the copy, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("run")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "store"
        shutil.copytree(chosen.directory, copy)
        lab = Lab(copy, chosen.run, Workspace(cache=Path(folder), scratch=Path(folder)))
        cases = list(lab.cases())
    print(table(cases))
    for case in cases:
        if not case.seen:
            print(f"missed: {case.way} of {case.key}")
    sys.exit(not all(case.seen for case in cases))


if __name__ == "__main__":
    main()
