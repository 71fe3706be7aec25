"""The commands that look at the ledger, check it and tidy it; `cli` has those that make it.

They parse, call, and print; nothing is decided here.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from flows.cli_options import Endpoint, Run, Store, after_interrupt


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
    after_interrupt.append("nothing that is needed was deleted; the same command goes on")
    with Console(stderr=True).status(f"gc of {run}: looking at its forks and snapshots") as status:
        collect = run_gc if delete else plan_gc
        report = collect(opened, run, rule=rule, say=status.update)
    if as_json:
        sys.stdout.write(json.dumps(report.model_dump(mode="json"), indent=2) + "\n")
    else:
        print_gc(report, store_options=store_options(config.uri, config.endpoint))


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
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="reward.key=value: list what another way of grading would change; repeatable, "
            "with --level facts.",
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Grade again also by functions, models and services that the run names: its own.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    store: Store = None,
    endpoint: Endpoint = None,
) -> None:
    """Check committed steps from the store alone.

    Reads only; works on a copy of the bucket in a directory. Exits 0 only if everything that was
    checked holds.
    """
    from flows.progress import showing_progress
    from flows.stores import resolve_store
    from flows.verification import VerifyOptions, parse_steps, verify_run
    from flows.verify_page import print_report
    from infra.home import home
    from storage.errors import Corrupt
    from storage.opening import open_store
    from tasks.workspace import open_workspace

    first, last = parse_steps(steps)
    options = VerifyOptions(level, first, last, sample, seed, head, key, overrides or [], trust)
    where = resolve_store(store, endpoint)
    opened = open_store(where, writing=False)
    with (
        open_workspace(home()) as workspace,
        showing_progress(quiet=as_json, noun="steps") as progress,
    ):
        report = verify_run(
            opened, run, options, workspace=workspace, progress=progress, where=where
        )
    if as_json:
        sys.stdout.write(json.dumps(report.model_dump(mode="json"), indent=2) + "\n")
    else:
        print_report(report, Console())
    if report.cause is not None:
        raise Corrupt(report.cause)


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
