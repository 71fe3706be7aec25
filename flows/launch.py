"""Makes a run exist: model and prompts are found, checked and stored, then run.json is put."""

import logging
import uuid
from datetime import UTC, datetime

from pydantic import ValidationError

from flows.config import RunConfig, in_one_line, max_prompt_tokens
from flows.limits import check_limits, check_pythons
from flows.memory import check_fits, memory_plan
from flows.model import base_model, check_model, model_files, weight_digests
from flows.prefect_server import check_server
from flows.progress import Watcher
from storage.errors import AlreadyExists, NotFound
from storage.experience import read_shard
from storage.inputs import put_input
from storage.layout import check_run_name, run_key, runs_prefix
from storage.ledger import create_run
from storage.object_store import ObjectStore
from storage.records import PromptInputs, RunRecord, canonical_json
from storage.schemas import PROMPTS
from tasks.prompts.contract import PrepareRequest
from tasks.prompts.prepare import prepare
from tasks.reward.inputs import GOLD_COLUMNS
from tasks.reward.stage import check_golds
from tasks.workspace import Workspace

log = logging.getLogger(__name__)


def free_run_name(store: ObjectStore, recipe: str) -> str:
    """Returns `<recipe>-<n>` with the first number that no run of this store has."""
    taken = set(store.folders(runs_prefix()))
    return next(
        name for number in range(1, len(taken) + 2) if (name := f"{recipe}-{number}") not in taken
    )


def launch(
    config: RunConfig,
    *,
    run: str | None,
    store: ObjectStore,
    workspace: Workspace,
    watcher: Watcher,
) -> RunRecord:
    """Checks everything that can be checked without an engine and puts run.json.

    With `run` None the record gets the first free name of its recipe, however many launch at once.

    Raises:
        AlreadyExists: the run is there; `resume` continues it.
        ValueError: model, data or config cannot work; the message says what to do.
    """
    refuse_existing(store, run or free_run_name(store, config.recipe))
    check_storable(config)
    check_pythons(config)
    check_server()
    model_dir = base_model(config, watcher=watcher)
    facts = check_model(config, model_dir, watcher=watcher)
    for warning in check_limits(config, facts, model_dir=model_dir):
        watcher.say(warning)
    watcher.say(check_fits(memory_plan(config, facts)))
    model = put_input(store, model_files(model_dir))
    watcher.begin("prompts: reading and tokenising")
    request = PrepareRequest(
        config=config.prompts,
        seed=config.seed,
        tokenizer=model,
        max_prompt_tokens=max_prompt_tokens(config),
    )
    inputs = prepare(request, store, tokenizer_dir=model_dir, cache=workspace.cache)
    check_prompts(config, inputs, store, workspace=workspace)
    for prompt_set in inputs.sets:
        watcher.say(
            f"prompts {prompt_set.name}: {prompt_set.train_rows} to train on, "
            f"{prompt_set.held_out_rows} held out"
            + "".join(f", {count} dropped ({why})" for why, count in prompt_set.dropped.items())
        )
    record = RunRecord(
        run=run or config.recipe,
        launch_id=uuid.uuid4().hex,
        config=config.model_dump(mode="json"),
        prompts=inputs,
        model=model,
        weights=weight_digests(model_dir),
        stop_token_ids=facts.stop_token_ids,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return put_run(store, record, run=run)


def put_run(store: ObjectStore, record: RunRecord, *, run: str | None) -> RunRecord:
    """Puts run.json under `run`, or under the first free name of the recipe that `record.run` is.

    Raises:
        AlreadyExists: `run` is there.
    """
    while True:
        name = run or free_run_name(store, record.run)
        named = record.model_copy(update={"run": name})
        try:
            create_run(store, named)
        except AlreadyExists:
            if run is not None:
                raise
            log.info("Another launch took the name %s: trying the next.", name)
        else:
            return named


def refuse_existing(store: ObjectStore, run: str) -> None:
    """Checks that no run has this name.

    Raises:
        AlreadyExists: one has.
    """
    try:
        store.size(run_key(check_run_name(run)))
    except NotFound:
        return
    raise AlreadyExists(
        f"Run {run!r} exists in {store.uri} already. Expected a new name: continue it with "
        f"`rollbook resume {run}`, or launch with another --run."
    )


def check_storable(config: RunConfig) -> None:
    """Checks that run.json will give back this config: whatever is stored must be read again.

    Raises:
        ValueError: it would not; names what is lost.
    """
    values = config.model_dump(mode="json")
    try:
        stored = RunConfig.model_validate_json(canonical_json(values))
    except ValidationError as error:
        raise ValueError(
            f"The config cannot be stored: read back from JSON, {in_one_line(error)} Numbers must "
            "be finite and texts whole Unicode."
        ) from error
    changed = [key for key, value in stored.model_dump(mode="json").items() if value != values[key]]
    if changed:
        raise ValueError(
            f"The config cannot be stored: {', '.join(changed)} would read back from JSON as "
            "something else. Use finite numbers and whole Unicode texts."
        )


def check_prompts(
    config: RunConfig, inputs: PromptInputs, store: ObjectStore, *, workspace: Workspace
) -> None:
    """Checks that prompts are held out and that every gold answer can be graded.

    Raises:
        ValueError: not so; the message names rows.
    """
    held_out = inputs.held_out.rows or 0
    if not held_out:
        raise ValueError(
            "No prompt is held out, so no accuracy can be measured. Set held_out on a data set "
            "(prompts.datasets), for example 200."
        )
    for ref in (inputs.train, inputs.held_out):
        table = read_shard(store, ref, schema=PROMPTS, columns=GOLD_COLUMNS)
        check_golds(config.reward, table.to_pylist(), workspace=workspace)
