"""Writes a committed policy as a Hugging Face directory."""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from storage.errors import NotFound
from storage.inputs import open_input
from storage.ledger import head, read_commit, read_run
from storage.object_store import ObjectStore
from storage.policies import open_policy
from storage.records import StepCommit
from storage.safetensors_files import write_index


def parse_target(target: str) -> tuple[str, int | None]:
    """Splits `RUN[@STEP]`.

    Raises:
        ValueError: what follows the `@` is no number.
    """
    run, mark, text = target.partition("@")
    if mark and not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{target!r} names no step. Expected RUN or RUN@STEP, like {run}@12.")
    return run, int(text) if mark else None


def export_policy(
    store: ObjectStore,
    target: str,
    directory: Path,
    *,
    cache: Path,
    bring_back: Callable[[StepCommit], None],
) -> StepCommit:
    """Writes the policy of `RUN[@STEP]` to `directory` and returns the commit it belongs to.

    The directory appears whole or not at all; transformers and vLLM load it as it is.

    Args:
        store: opened for reading.
        target: the run, and the step if it is not the newest.
        directory: is made.
        cache: this host's.
        bring_back: makes a policy that is not in the store, and puts its files into the cache.

    Raises:
        NotFound: no such run or step.
        ValueError: the directory is there and not empty.
        Corrupt: a stored file does not match its digest.
    """
    run, step = parse_target(target)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty. Name a new directory.")
    commit = _commit(store, run, step)
    record, _ = read_run(store, run)
    draft = directory.with_name(f".{directory.name}-{uuid.uuid4().hex[:8]}")
    draft.mkdir(parents=True)
    try:
        for source in (
            _open(store, commit, cache, bring_back),
            open_input(store, record.model, cache=cache),
        ):
            for path in source.iterdir():
                shutil.copyfile(path, draft / path.name)
        if len(commit.policy.files) > 1:
            write_index(draft)
        if directory.exists():
            directory.rmdir()
        os.replace(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return commit


def _open(
    store: ObjectStore, commit: StepCommit, cache: Path, bring_back: Callable[[StepCommit], None]
) -> Path:
    try:
        return open_policy(store, commit.policy, cache=cache)
    except NotFound:
        bring_back(commit)
    return open_policy(store, commit.policy, cache=cache)


def _commit(store: ObjectStore, run: str, step: int | None) -> StepCommit:
    read_run(store, run)
    if step is not None:
        return read_commit(store, run, step)[0]
    newest = head(store, run)
    if newest is None:
        raise NotFound(
            f"Run {run!r} has no commit yet, so there is no policy to export. Resume it first: "
            f"`rollbook resume {run}`."
        )
    return newest[0]
