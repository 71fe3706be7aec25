"""When the trainer's state is stored: what losing it would cost."""

from flows.session import Unsaved
from storage.records import SnapshotRef
from tasks.train.contract import TrainConfig
from tests.contract import records

CONFIG = TrainConfig(snapshot_every=3, snapshot_after_s=60.0)
TRAINED = records.stage_record("train")
SAVED = TRAINED.model_copy(update={"snapshot": SnapshotRef(files={}, ranks=1, zero_stage=2)})


def test_a_snapshot_is_due_every_so_many_steps():
    unsaved, due = Unsaved(), []
    for _ in range(6):
        due.append(unsaved.due(CONFIG))
        unsaved.trained(SAVED if due[-1] else TRAINED, seconds=1.0)
    assert due == [False, False, True, False, False, True]


def test_a_snapshot_is_due_after_so_many_seconds_of_training_however_few_the_steps():
    unsaved = Unsaved()
    unsaved.trained(TRAINED, seconds=59.0)
    assert not unsaved.due(CONFIG)
    unsaved = Unsaved()
    unsaved.trained(TRAINED, seconds=60.0)
    assert unsaved.due(CONFIG)
    unsaved.trained(SAVED, seconds=30.0)
    assert not unsaved.due(CONFIG)
