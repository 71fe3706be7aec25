"""Step 0 as a flow run: the base model becomes policy 0, with probe and snapshot."""

from pathlib import Path

from prefect import flow

from flows.config import stage_configs
from flows.model import base_model, weight_digests
from flows.session import session_of
from flows.step import move_head
from storage.layout import StepScope
from storage.ledger import adopt_plan, record_ref
from storage.records import Cursor, Plan
from tasks.checkpoint.contract import CheckpointRequest
from tasks.checkpoint.task import checkpoint
from tasks.train.contract import GenesisRequest
from tasks.train.task import train


@flow(name="step", flow_run_name="step 0 (genesis)", persist_result=False)
def genesis(run: str) -> None:
    """Makes commit 0 of `run` exist. Safe to repeat.

    Raises:
        Permanent: the base model cannot be imported.
    """
    session = session_of(run)
    config, scope = session.config, StepScope(run=run, step=0)
    plan, plan_ref = adopt_plan(
        session.store,
        Plan(
            run=run,
            step=0,
            kind="genesis",
            previous=session.run_digest,
            prompts=None,
            shards=[],
            cursor=Cursor(),
            configs=stage_configs(config),
        ),
    )
    model_dir: Path = base_model(config, watcher=session.watcher)
    session.watcher.begin("genesis: importing the base model")
    request = GenesisRequest(
        scope=scope,
        model=session.run.model,
        weights=weight_digests(model_dir),
        model_dir=str(model_dir),
        seed=config.seed,
        config=config.train,
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
