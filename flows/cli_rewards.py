"""The commands that try graders. They parse, call, and print; nothing is decided here."""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

rewards = typer.Typer(
    help="Try graders before a run: no server, no store, no GPU.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@rewards.command("check")
def rewards_check(
    recipe: Annotated[str, typer.Argument(help="Which recipe.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, like reward.parts.0.kind=math; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Grade every gold answer of a recipe's data sets, and some junk.

    Golds must have the maximum, also in the form that the prompt asks for, and junk must not; exits
    0 only then. Says which answers no grader can read, what always giving the commonest answer
    would earn, and how fast grading is.
    """
    from flows.progress import showing_progress
    from flows.recipes import from_recipe
    from flows.rewards_page import print_check
    from flows.trying_rewards import check_recipe
    from infra.home import home
    from tasks.workspace import open_workspace

    config = from_recipe(recipe, overrides or [])
    with (
        open_workspace(home()) as workspace,
        showing_progress(quiet=as_json, noun="samples") as progress,
    ):
        report = check_recipe(config, workspace=workspace, progress=progress)
    if as_json:
        sys.stdout.write(json.dumps(report.model_dump(mode="json"), indent=2) + "\n")
    else:
        print_check(report, Console(highlight=False))
    if not report.usable:
        found = [(f" (part {part.name})", one) for part in report.parts for one in part.problems]
        part, problem = [*found, *(("", one) for one in report.problems)][0]
        raise ValueError(
            f"The reward does not fit the data: {problem.num_rows} {problem.what}{part}. Correct "
            "the rows or the reward."
        )


@rewards.command("try")
def rewards_try(  # noqa: PLR0913 - every option is a parameter
    name: Annotated[
        str,
        typer.Argument(
            help="A grader, like math; or a recipe, for its reward.", show_default=False
        ),
    ],
    completion: Annotated[
        str, typer.Option(help="What the model wrote; - reads standard input.", show_default=False)
    ],
    gold: Annotated[str | None, typer.Option(help="The gold answer.", show_default=False)] = None,
    prompt: Annotated[str | None, typer.Option(help="The text before the completion.")] = None,
    extra: Annotated[
        str | None, typer.Option(help="Further fields of the row, a JSON object.")
    ] = None,
    domain: Annotated[str, typer.Option(help="Name of the data set.", show_default=False)] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of a grader: option=value. Of a recipe: reward.key=value."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Grade one completion as a run would, and print the verdict with its reason."""
    from flows.rewards_page import print_verdict
    from flows.trying_rewards import parse_extra, reward_named, try_reward, verdict
    from infra.home import home
    from rewards.contract import RewardInput
    from tasks.workspace import open_workspace

    config = reward_named(name, overrides or [])
    item = RewardInput(
        sys.stdin.read() if completion == "-" else completion,
        answer=gold,
        sample_id="tried",
        prompt=prompt,
        extra=parse_extra(extra),
        domain=domain,
    )
    with open_workspace(home()) as workspace:
        score = try_reward(config, item, workspace=workspace)
    if as_json:
        sys.stdout.write(json.dumps(verdict(score), indent=2) + "\n")
    else:
        print_verdict(score, Console(highlight=False))
