"""The `rollbook` command. It parses, calls, and prints; nothing is decided here."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from typer.core import TyperCommand

from flows.cli_ledger import diff, gc, keys, samples, sql, verify
from flows.cli_options import Endpoint, Run, Store, after_interrupt
from flows.cli_rewards import rewards
from flows.show import RunSummary
from flows.terminal import command_line, print_next, print_summary
from tasks.errors import Permanent, Transient

INTERRUPTED = 130
"""What typer exits with after Ctrl-C."""

app = typer.Typer(
    name="rollbook",
    help="Post-train language models with reinforcement learning, one auditable step at a time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: a usage error then ends in its cause, not in the lower edge of a box.
    rich_markup_mode=None,
)


def _recipe_lines() -> str:
    from flows.recipes import RECIPES

    lines = [
        f"{name}: {(recipe.__doc__ or '').strip().splitlines()[0]}"
        for name, recipe in RECIPES.items()
    ]
    # Without the mark, click would join the lines into one paragraph.
    return "\n".join(["\b", "Recipes:", *lines])


class _LaunchCommand(TyperCommand):
    """Adds the recipes to `launch --help`, so that the dictionary stays their only list."""

    def format_help(self, ctx: typer.Context, formatter: object) -> None:  # type: ignore[override]
        """Prints the help with one line per recipe at its end."""
        self.epilog = _recipe_lines()
        super().format_help(ctx, formatter)  # type: ignore[arg-type]


@app.command(cls=_LaunchCommand)
def launch(  # noqa: PLR0913 - every option is a parameter
    recipe: Annotated[str, typer.Argument(help="Which recipe; see below.", show_default=False)],
    run: Annotated[
        str | None, typer.Option(help="Name of the run. Default: RECIPE-N.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="RL steps. Default: the recipe's.", min=1, show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, like train.learning_rate=1e-6; repeatable."),
    ] = None,
    create_bucket: Annotated[
        bool, typer.Option("--create-bucket", help="Make the store's bucket if it is missing.")
    ] = False,
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Start a run from a recipe and train it."""
    from flows.recipes import from_recipe

    changes = [*(overrides or []), *([f"steps={steps}"] if steps else [])]
    config = from_recipe(recipe, changes)
    from flows.run import train_run
    from flows.stores import ensure_bucket, resolve_store

    def may_create(bucket: str) -> bool:
        if create_bucket or not sys.stdin.isatty():
            return create_bucket
        return typer.confirm(f"There is no bucket {bucket!r}. Create it?")

    name = run or "NAME"
    after_interrupt.append(
        "if the run was made (a line `run NAME in STORE` says so), every commit is kept and "
        f"`{_resume_command(name, store, endpoint)}` goes on"
    )
    store_config = resolve_store(store, endpoint)
    if store_config.scheme == "s3":
        ensure_bucket(store_config, may_create=may_create)
    summary = train_run(config, run=run, store=store, endpoint=endpoint)
    _print_end(summary)


def _resume_command(run: str, store: str | None, endpoint: str | None) -> str:
    options = [("--store", store), ("--endpoint", endpoint)]
    given = [word for name, value in options if value for word in (name, value)]
    return command_line("resume", run, *given)


def _print_end(summary: RunSummary) -> None:
    from flows.stores import store_options

    print_summary(summary)
    print_next(summary, store_options=store_options(summary.store, summary.endpoint))


@app.command()
def resume(  # noqa: PLR0913 - every option is a parameter
    run: Run,
    steps: Annotated[
        int | None,
        typer.Option(
            help="How many more. Default: up to the run's own.", min=1, show_default=False
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value from the next step on; with --redo for this one."),
    ] = None,
    redo: Annotated[
        bool,
        typer.Option("--redo", help="Plan the open step again; without --set do all of it afresh."),
    ] = False,
    skip_step: Annotated[
        bool,
        typer.Option("--skip-step", help="Pass the open step over: same policy, prompts consumed."),
    ] = False,
    reason: Annotated[
        str | None, typer.Option(help="Why, for the record of --redo or --skip-step.")
    ] = None,
    rebase: Annotated[
        bool,
        typer.Option("--rebase", help="Accept other bits of a replay, within tolerance."),
    ] = False,
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Continue a run from its last commit."""
    from flows.phases import Wishes
    from flows.run import resume_run

    after_interrupt.append(
        f"every commit is kept; `{_resume_command(run, store, endpoint)}` goes on"
    )
    wishes = Wishes(tuple(overrides or ()), redo, skip_step, reason, rebase)
    summary = resume_run(run, steps=steps, wishes=wishes, store=store, endpoint=endpoint)
    _print_end(summary)


@app.command()
def fork(
    target: Annotated[str, typer.Argument(metavar="RUN[@STEP]", show_default=False)],
    run: Annotated[str, typer.Option(help="Name of the new run.", show_default=False)],
    steps: Annotated[
        int | None,
        typer.Option(help="Train it so many steps. Default: none.", min=1, show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, like train.learning_rate=1e-6; repeatable."),
    ] = None,
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Continue a run under another name from one of its steps; nothing is copied."""
    from flows.run import fork_and_train

    after_interrupt.append(
        f"if the fork was made, `{_resume_command(run, store, endpoint)}` goes on"
    )
    summary = fork_and_train(
        target, run=run, steps=steps, overrides=overrides or (), store=store, endpoint=endpoint
    )
    _print_end(summary)


@app.command()
def show(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Print a run's steps, rewards and held-out accuracy, and its forks."""
    from flows.family import family_tree, read_parents
    from flows.show import summarise
    from flows.stores import resolve_store
    from storage.opening import open_store

    config = resolve_store(store, endpoint)
    opened = open_store(config, writing=False)
    summary = summarise(opened, run, store_config=config)
    if as_json:
        sys.stdout.write(json.dumps(summary.model_dump(mode="json"), indent=2) + "\n")
        return
    print_summary(summary)
    tree = family_tree(read_parents(opened), run)
    if tree is not None:
        Console().print(tree)


@app.command()
def export(
    target: Annotated[str, typer.Argument(metavar="RUN[@STEP]", show_default=False)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Write a policy as a Hugging Face directory.

    transformers and vLLM load it as it is. One that retention gave up is made again by replay.
    """
    from flows.bring_back import bring_back
    from flows.export import export_policy
    from flows.stores import resolve_store
    from infra.home import home
    from storage.opening import open_store
    from tasks.workspace import open_workspace

    where = resolve_store(store, endpoint)
    opened = open_store(where, writing=False)
    said = Console(stderr=True)
    with open_workspace(home()) as workspace:
        make_again = partial(
            bring_back,
            opened,
            where=where,
            workspace=workspace,
            say=partial(said.print, markup=False),
        )
        commit = export_policy(
            opened, target, directory, cache=workspace.cache, bring_back=make_again
        )
    Console().print(
        f"version {commit.policy_version} of {commit.run} (step {commit.step}, policy "
        f"{commit.policy_digest[:16]}) is in {directory}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


for _command in (sql, samples, gc, verify, diff):
    app.command()(_command)
app.add_typer(keys, name="keys")
app.add_typer(rewards, name="rewards")


def _cause(error: BaseException) -> str:
    from flows.config import in_one_line

    if isinstance(error, ValidationError):
        return in_one_line(error)
    return str(error) or type(error).__name__


def main() -> None:
    """Runs the command; a failure ends in one line that says the cause, and a non-zero exit."""
    from storage.errors import StorageError

    # Prefect's banner and usage reports have no place in our output.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    console = Console(stderr=True)
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            line = ": ".join(["interrupted", *after_interrupt])
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        raise
    except (ValueError, OSError, StorageError, Transient, Permanent) as error:
        # The cause is the last line; what an engine's log says of it stands above.
        cause, *details = _cause(error).splitlines()
        for line in [*details, f"error: {cause}"]:
            console.print(line, style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(1)
