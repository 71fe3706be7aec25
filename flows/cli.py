"""The `rollbook` command. It parses, calls, and prints; nothing is decided here."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from typer.core import TyperCommand

from flows.show import RunSummary
from flows.terminal import command_line, print_next, print_summary
from tasks.errors import Permanent, Transient

INTERRUPTED = 130
"""What typer exits with after Ctrl-C."""

_after_interrupt: list[str] = []
"""What the command that runs would have a person do after Ctrl-C."""

app = typer.Typer(
    name="rollbook",
    help="Post-train language models with reinforcement learning, one auditable step at a time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: a usage error then ends in its cause, not in the lower edge of a box.
    rich_markup_mode=None,
)

Store = Annotated[
    str | None,
    typer.Option(
        help="s3://bucket/prefix or a directory. Default: ROLLBOOK_STORE, else the local server.",
        show_default=False,
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(help="Address of an S3 server that is not AWS.", show_default=False),
]
Run = Annotated[str, typer.Argument(help="Name of the run.", show_default=False)]


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
    from flows.overrides import near_names, with_overrides
    from flows.recipes import RECIPES

    if recipe not in RECIPES:
        raise ValueError(f"There is no recipe {recipe!r}. {near_names(recipe, sorted(RECIPES))}")
    changes = [*(overrides or []), *([f"steps={steps}"] if steps else [])]
    config = with_overrides(RECIPES[recipe](), changes)
    from flows.run import train_run
    from flows.stores import ensure_bucket, resolve_store

    def may_create(bucket: str) -> bool:
        if create_bucket or not sys.stdin.isatty():
            return create_bucket
        return typer.confirm(f"There is no bucket {bucket!r}. Create it?")

    name = run or "NAME"
    _after_interrupt.append(
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

    _after_interrupt.append(
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

    _after_interrupt.append(
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
def sql(
    question: Annotated[
        str | None,
        typer.Argument(
            metavar="QUERY",
            help='Like "select step, avg(reward) from samples group by step". '
            "Without one: the views and their columns.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(help="Only this run; repeatable. Default: all of the store."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All rows, for machines.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="All rows, for spreadsheets.")] = False,
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Ask committed steps in SQL: samples, rewards, steps, policies.

    flows/QUERIES.md has the questions that people ask. Nothing is written, and digests of shards
    are not checked: `rollbook verify` does that.
    """
    from flows.answer_page import print_answer, print_views, write_csv, write_json
    from flows.query import answer, open_tables, view_columns
    from flows.views import MEANINGS

    if question is None:
        print_views(view_columns(), MEANINGS)
        return
    if as_json and as_csv:
        raise ValueError("--json and --csv were given. Expected one of them.")
    reader = answer(open_tables(store=store, endpoint=endpoint, run=run), question)
    if as_json:
        write_json(reader, sys.stdout)
    elif as_csv:
        write_csv(reader, sys.stdout)
    else:
        print_answer(reader)


@app.command()
def samples(  # noqa: PLR0913 - every option is a parameter
    target: Annotated[str, typer.Argument(metavar="RUN[@STEP]", show_default=False)],
    group: Annotated[
        str | None,
        typer.Option(help="One group in full: its id, its number, or its prompt's id."),
    ] = None,
    worst: Annotated[int, typer.Option(help="So many samples of least reward.", min=0)] = 0,
    best: Annotated[int, typer.Option(help="So many samples of most reward.", min=0)] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="For machines; without another option, all groups.")
    ] = False,
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Read a step's samples: prompts, completions, rewards with reasons, advantages."""
    from flows.samples import FEW_GROUPS, choose_rows, open_samples, show_rows
    from flows.samples_page import PROMPT_LINES, print_groups, print_samples
    from flows.stores import resolve_store
    from infra.home import home
    from storage.opening import open_store

    opened = open_store(resolve_store(store, endpoint), writing=False)
    found = open_samples(opened, target, cache=home() / "cache")
    few = None if as_json else FEW_GROUPS
    rows = choose_rows(found, group=group, worst=worst, best=best, max_groups=few)
    shown = show_rows(found, rows)
    if as_json:
        sys.stdout.write(json.dumps(shown.model_dump(mode="json"), indent=2) + "\n")
    elif group is None and not (worst or best):
        print_groups(shown, Console(highlight=False))
    else:
        prompt_lines = PROMPT_LINES if group is None else None
        print_samples(shown, Console(highlight=False), prompt_lines=prompt_lines)


@app.command()
def export(
    target: Annotated[str, typer.Argument(metavar="RUN[@STEP]", show_default=False)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Write a policy as a Hugging Face directory.

    transformers and vLLM load it as it is.
    """
    from flows.export import export_policy
    from flows.stores import resolve_store
    from infra.home import home
    from storage.opening import open_store

    opened = open_store(resolve_store(store, endpoint), writing=False)
    commit = export_policy(opened, target, directory, cache=home() / "cache")
    Console().print(
        f"version {commit.policy_version} of {commit.run} (step {commit.step}, policy "
        f"{commit.policy_digest[:16]}) is in {directory}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@app.command()
def gc(
    run: Run,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete it; without this, only say what would go.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="retention.key=value, for this call; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Say, or delete, what nothing needs: policies and snapshots by the run's retention.

    All commits, plans, records, experience and evaluations stay, and old policies come back by
    replay. Safe beside running controllers, and to repeat.
    """
    from flows.gc import plan_gc, retention_rule, run_gc
    from flows.gc_report import print_gc
    from flows.stores import resolve_store, store_options
    from storage.opening import open_store

    config = resolve_store(store, endpoint)
    opened = open_store(config, writing=delete)
    rule = retention_rule(opened, run, overrides or [])
    _after_interrupt.append("nothing that is needed was deleted; the same command goes on")
    with Console(stderr=True).status(f"gc of {run}: looking at its forks and snapshots") as status:
        collect = run_gc if delete else plan_gc
        report = collect(opened, run, rule=rule, say=status.update)
    if as_json:
        sys.stdout.write(json.dumps(report.model_dump(mode="json"), indent=2) + "\n")
    else:
        print_gc(report, store_options=store_options(config.uri, config.endpoint))


@app.command()
def verify(  # noqa: PLR0913 - every option is a parameter
    run: Run,
    level: Annotated[
        Literal["chain", "facts", "replay"],
        typer.Option(help="chain: digests. facts: and rows. replay: and engines."),
    ] = "chain",
    steps: Annotated[
        str | None, typer.Option(help="A..B, A.., ..B or one step. Default: all.")
    ] = None,
    sample: Annotated[
        float, typer.Option(help="Share of the steps whose facts are computed again.")
    ] = 1.0,
    seed: Annotated[
        str, typer.Option(help="Draws that share; one of your own cannot be foreseen.")
    ] = "",
    head: Annotated[
        str | None, typer.Option(help="Digest of a commit that you saw once: finds a cut tail.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Public key that must have signed every commit.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Check committed steps from the store alone.

    Reads only; works on a copy of the bucket in a directory. Exits 0 only if everything that was
    checked holds.
    """
    from flows.stores import resolve_store
    from flows.verification import VerifyOptions, parse_steps, verify_run
    from flows.verify_page import print_report, showing_progress
    from infra.home import home
    from storage.errors import Corrupt
    from storage.opening import open_store
    from tasks.workspace import open_workspace

    first, last = parse_steps(steps)
    options = VerifyOptions(level, first, last, sample, seed, head, key)
    opened = open_store(resolve_store(store, endpoint), writing=False)
    with open_workspace(home()) as workspace, showing_progress(quiet=as_json) as progress:
        report = verify_run(opened, run, options, workspace=workspace, progress=progress)
    if as_json:
        sys.stdout.write(json.dumps(report.model_dump(mode="json"), indent=2) + "\n")
    else:
        print_report(report, Console())
    if report.cause is not None:
        raise Corrupt(report.cause)


@app.command()
def diff(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", show_default=False)],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Find the first step where two runs part, and the stage, setting or library version."""
    from flows.diff import diff_runs
    from flows.diff_report import diff_lines
    from flows.stores import resolve_store
    from storage.opening import open_store

    found = diff_runs(open_store(resolve_store(store, endpoint), writing=False), run_a, run_b)
    if as_json:
        sys.stdout.write(json.dumps(found.model_dump(mode="json"), indent=2) + "\n")
        return
    for line in diff_lines(found):
        Console().print(line, highlight=False, markup=False, soft_wrap=True)


keys = typer.Typer(help="Keys that vouch for commits.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys, name="keys")


@keys.command("new")
def keys_new(
    file: Annotated[
        Path | None,
        typer.Argument(help="Where to put the private key. Default: where runs find it."),
    ] = None,
) -> None:
    """Make a key that signs commits; its public half is for whoever verifies them."""
    from flows.signing import make_key

    for line in make_key(file):
        Console().print(line, highlight=False, markup=False, soft_wrap=True)


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
            line = ": ".join(["interrupted", *_after_interrupt])
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        raise
    except (ValueError, OSError, StorageError, Transient, Permanent) as error:
        # The cause is the last line; what an engine's log says of it stands above.
        cause, *details = _cause(error).splitlines()
        for line in [*details, f"error: {cause}"]:
            console.print(line, style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(1)
