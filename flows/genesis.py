"""Step 0 as a flow run: the base model becomes policy 0, with probe and snapshot."""

from pathlib import Path

from prefect import flow

from flows.model import base_model, weight_digests
from flows.planning import genesis_plan
from flows.session import session_of
from flows.step import move_head
from storage.layout import StepScope
from storage.ledger import record_ref
from storage.records import RunRecord
from tasks.checkpoint.contract import CheckpointRequest
from tasks.checkpoint.task import checkpoint
from tasks.train.contract import GenesisRequest, TrainConfig
from tasks.train.task import train


@flow(name="step", flow_run_name="step 0 (genesis)", persist_result=False)
def genesis(run: str) -> None:
    """Makes commit 0 of `run` exist. Safe to repeat.

    Raises:
        Permanent: the base model cannot be imported.
    """
    session = session_of(run)
    config, scope = session.config, StepScope(run=run, step=0)
    plan, plan_ref = genesis_plan(session, scope)
    model_dir: Path = base_model(config, watcher=session.watcher)
    _check_unchanged(model_dir, session.run)
    session.watcher.begin("genesis: importing the base model")
    request = GenesisRequest(
        scope=scope,
        model=session.run.model,
        weights=session.run.weights,
        model_dir=str(model_dir),
        seed=config.seed,
        config=TrainConfig.model_validate(plan.configs["train"]),
        redo=plan.redo,
    )
    trained = train(request, session.stages.train)
    result = checkpoint(
        CheckpointRequest(
            scope=scope,
            kind="genesis",
            plan=plan_ref,
            records=[record_ref(scope, trained.record, store=session.store)],
            cursor=plan.cursor,
            previous=plan.previous,
            metrics=trained.record.metrics,
        ),
        session.stages.checkpoint,
    )
    move_head(session, result)


def _check_unchanged(model_dir: Path, record: RunRecord) -> None:
    """Checks that the base model's weights are those that the launch checked.

    Raises:
        ValueError: a file changed, came or went since.
    """
    found = weight_digests(model_dir)
    if found != record.weights:
        changed = sorted(name for name, _ in found.items() ^ record.weights.items())
        raise ValueError(
            f"The base model in {model_dir} is not what run {record.run!r} was launched with: "
            f"{', '.join(dict.fromkeys(changed))} differ. Put the files back, or launch another "
            "run with these."
        )
