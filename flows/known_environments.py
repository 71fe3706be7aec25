"""What ran the newest steps of a run: what a service or worker is held against."""

from storage.errors import NotFound
from storage.ledger import ancestors, head, read_record
from storage.object_store import ObjectStore

_MOST_STEPS = 10
"""How far back a step is looked for that ran the stage; skipped steps run none."""


def known_environment(store: ObjectStore, run: str, stage: str) -> dict[str, str]:
    """Returns the environment of the run's newest committed record of `stage`; empty without one.

    Raises:
        StorageError: the ledger cannot be read.
    """
    try:
        newest = head(store, run)
    except NotFound:
        return {}
    if newest is None:
        return {}
    for looked, (commit, _) in enumerate(ancestors(store, run, newest[0].step)):
        for ref in commit.records:
            if ref.stage.partition("-")[0] == stage:
                return read_record(store, ref).environment
        if looked == _MOST_STEPS:
            break
    return {}
