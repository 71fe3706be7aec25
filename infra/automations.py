"""What a Prefect server does by itself for our deployments: `python -m infra.automations apply`.

It ends flow runs whose process is gone, runs `advance` again after a crash, says why a flow run
waits, sends notifications, and starts `advance` when data arrives or another deployment ends.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from infra.daemons import ServiceError
from infra.prefect_api import Refused, call, find_deployment

FLOWS = (
    "advance",
    "evaluate",
    "verify",
    "gc",
    "rollout-service",
    "train-service",
    "rollout-stage",
    "train-stage",
    "reward-stage",
)
"""Every flow that `prefect.yaml` deploys."""
RESTARTED = ("advance",)
"""Flows that know how to go on where a dead process of the same flow run stopped."""
POOLS = ("driver", "rollout-gpu", "train-gpu", "reward-cpu")
"""The work pools that `prefect.yaml` names."""
HEARTBEAT_S = 30
"""Prefect's shortest; workers set PREFECT_FLOWS_HEARTBEAT_FREQUENCY to it."""
SILENT_S = 100
"""Three heartbeats and some: a server that was away for a minute finds no flow run dead."""
CRASHED_S = 15
"""A worker reports a dead process twice, some seconds apart; the second report must not hit the
flow run that has started again."""
RESTART_MESSAGE = "Run again after a crash: it goes on from the last commit."
WAITING_NAME = "WaitingForWorker"
MAX_STARTS, STARTS_WITHIN_S = 10, 3600
"""A flow run that is scheduled so often does not even get as far as counting its own crashes."""
DATA_EVENT = "rollbook.data.arrived"
_PREFIX = "rollbook: "

Automation = dict[str, Any]


def automations(*, notify_block_id: str | None = None) -> list[Automation]:
    """Returns what `apply` puts on a server."""
    always = [_ends_silent(), _restarts_crashed(), _ends_endless_restarts()]
    always += [_says_why_late(pool) for pool in POOLS]
    return [*always, *([_notifies(notify_block_id)] if notify_block_id else [])]


def apply(api_url: str, wanted: Sequence[Automation]) -> list[str]:
    """Makes the server have these automations, and returns what was done, a line each.

    One of the same name is updated in place, unless it is as it should be; whether it is enabled
    stays as a person left it. Others are not touched.

    Raises:
        ServiceError: the server does not answer or refuses.
    """
    done: list[str] = []
    for automation in wanted:
        marked = {**automation, "tags": ["rollbook", f"rollbook-{_digest(automation)}"]}
        present = _of_name(api_url, automation["name"])
        for extra in present[1:]:
            call(api_url, "DELETE", f"/automations/{extra['id']}")
        if not present:
            call(api_url, "POST", "/automations/", marked)
            done.append(f"made {automation['name']!r}")
        elif present[0].get("tags") != marked["tags"]:
            kept = {**marked, "enabled": present[0]["enabled"]}
            call(api_url, "PUT", f"/automations/{present[0]['id']}", kept)
            done.append(f"updated {automation['name']!r}")
    return done


def on_data(api_url: str, prefix: str, parameters: dict[str, Any]) -> Automation:
    """Returns what starts `advance` when `python -m infra.announce` names something below `prefix`.

    Args:
        api_url: the server that has the deployment.
        prefix: such as `s3://bucket/prompts/`.
        parameters: of `advance`; texts may be Jinja templates that see `event`.
    """
    return {
        "name": f"{_PREFIX}{prefix} starts advance of {parameters.get('run')}",
        "description": "New data under a prefix starts a flow run.",
        "trigger": {
            "type": "event",
            "posture": "Reactive",
            "expect": [DATA_EVENT],
            "match": {"prefect.resource.id": data_resource(f"{prefix}*")},
            "threshold": 1,
            "within": 0,
        },
        "actions": [_start_advance(api_url, parameters)],
    }


def on_deployment(api_url: str, upstream: str, parameters: dict[str, Any]) -> Automation:
    """Returns what starts `advance` when a flow run of the deployment `upstream` completes."""
    found = find_deployment(api_url, upstream)
    return {
        "name": f"{_PREFIX}{upstream} starts advance of {parameters.get('run')}",
        "description": "A finished deployment starts the next one.",
        "trigger": {
            "type": "event",
            "posture": "Reactive",
            "expect": ["prefect.flow-run.Completed"],
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": {
                "prefect.resource.role": "deployment",
                "prefect.resource.id": f"prefect.deployment.{found['id']}",
            },
            "threshold": 1,
            "within": 0,
        },
        "actions": [_start_advance(api_url, parameters)],
    }


def data_resource(uri: str) -> str:
    """Returns the resource id under which an event names data."""
    return f"rollbook.data.{uri}"


def find_block(api_url: str, name: str) -> str:
    """Returns the id of the block document `TYPE/NAME`, such as `slack-webhook/team`.

    Raises:
        ServiceError: there is none.
    """
    kind, _, document = name.partition("/")
    try:
        found = call(api_url, "GET", f"/block_types/slug/{kind}/block_documents/name/{document}")
    except Refused as error:
        if error.status != 404:
            raise
        raise ServiceError(
            f"There is no block {name!r} at {api_url}. Expected TYPE/NAME, such as "
            "slack-webhook/team or custom-webhook/team: make it in the UI under Blocks."
        ) from error
    return str(found["id"])


def _ends_silent() -> Automation:
    heartbeat = "prefect.flow-run.heartbeat"
    ends = ("Completed", "Failed", "Cancelled", "Crashed", "Scheduled", "AwaitingRetry", "Paused")
    return {
        "name": f"{_PREFIX}no heartbeat means crashed",
        "description": f"A flow run that was silent for {SILENT_S} s has lost its process.",
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "after": [heartbeat],
            "expect": [heartbeat, *(f"prefect.flow-run.{state}" for state in ends)],
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": _of_flows(FLOWS),
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": SILENT_S,
        },
        "actions": [
            {
                "type": "change-flow-run-state",
                "state": "CRASHED",
                "message": f"No heartbeat for {SILENT_S} s: its process, worker or host is gone.",
            }
        ],
    }


def _restarts_crashed() -> Automation:
    others = ("Scheduled", "Pending", "Running", "AwaitingRetry", "Completed", "Failed")
    return {
        "name": f"{_PREFIX}advance goes on after a crash",
        "description": "The same flow run is scheduled again. It counts its crashes and gives up "
        "by itself when they get it nowhere.",
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "after": ["prefect.flow-run.Crashed"],
            "expect": [f"prefect.flow-run.{state}" for state in (*others, "Cancelled")],
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": _of_flows(RESTARTED),
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": CRASHED_S,
        },
        "actions": [
            {"type": "change-flow-run-state", "state": "SCHEDULED", "message": RESTART_MESSAGE}
        ],
    }


def _ends_endless_restarts() -> Automation:
    return {
        "name": f"{_PREFIX}advance that cannot start is given up",
        "description": "A worker that cannot start the flow's process would crash it for ever.",
        "trigger": {
            **_reactive(["Scheduled"], _of_flows(RESTARTED)),
            "for_each": ["prefect.resource.id"],
            "threshold": MAX_STARTS,
            "within": STARTS_WITHIN_S,
        },
        "actions": [
            {
                "type": "change-flow-run-state",
                "state": "FAILED",
                "message": f"Scheduled {MAX_STARTS} times within {STARTS_WITHIN_S // 60} minutes: "
                "its process keeps dying, or the worker cannot start it. Every commit is kept. "
                "Look at the log of the worker and of this flow run, mend the cause, press Retry.",
            }
        ],
    }


def _says_why_late(pool: str) -> Automation:
    return {
        "name": f"{_PREFIX}says why a flow run in {pool} waits",
        "description": "Another name than Late, so that this does not answer itself; still "
        "scheduled, so that a worker takes it up as soon as there is one.",
        "trigger": _reactive(
            ["Late"], _of_flows(FLOWS), {"prefect.resource.role": "work-pool", _NAME: pool}
        ),
        "actions": [
            {
                "type": "change-flow-run-state",
                "state": "SCHEDULED",
                "name": WAITING_NAME,
                "message": f"No worker of work pool '{pool}' has taken this flow run up. Either "
                "none is online (start one: `prefect worker start --pool "
                f"{pool}`, on one machine `make up PROFILE=pools`), or the pool or its queue is "
                f"paused (`prefect work-pool resume {pool}`), or its concurrency limit is reached. "
                "It starts by itself once that is mended.",
            }
        ],
    }


def _notifies(block_id: str) -> Automation:
    return {
        "name": f"{_PREFIX}notifies when advance ends",
        "description": "Completed, failed, stopped or crashed.",
        "trigger": _reactive(["Completed", "Failed", "Cancelled", "Crashed"], _of_flows(RESTARTED)),
        "actions": [
            {
                "type": "send-notification",
                "block_document_id": block_id,
                "subject": "{{ flow_run.name }}: {{ event.resource['prefect.state-name'] }}",
                "body": "{{ event.resource['prefect.state-message'] }}\n{{ flow_run|ui_url }}",
            }
        ],
    }


_NAME = "prefect.resource.name"


def _of_flows(names: Sequence[str]) -> dict[str, Any]:
    # By flow, because a heartbeat does not name its deployment.
    return {"prefect.resource.role": "flow", _NAME: list(names)}


def _reactive(states: Sequence[str], *related: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "event",
        "posture": "Reactive",
        "expect": [f"prefect.flow-run.{state}" for state in states],
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": list(related),
        "threshold": 1,
        "within": 0,
    }


def _start_advance(api_url: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "run-deployment",
        "source": "selected",
        "deployment_id": find_deployment(api_url, "advance")["id"],
        "parameters": parameters,
    }


def _of_name(api_url: str, name: str) -> list[dict[str, Any]]:
    body = {"automations": {"name": {"any_": [name]}}, "sort": "CREATED_DESC"}
    found = call(api_url, "POST", "/automations/filter", body)
    return sorted(found, key=lambda automation: automation["created"])


def _digest(automation: Automation) -> str:
    return hashlib.sha256(json.dumps(automation, sort_keys=True).encode()).hexdigest()[:12]


def _parameters(texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ServiceError(f"--param {text!r} is not KEY=VALUE.")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _wanted(options: argparse.Namespace, api_url: str) -> list[Automation]:
    if options.command == "apply":
        block = find_block(api_url, options.notify) if options.notify else None
        return automations(notify_block_id=block)
    make: Callable[..., Automation] = on_data if options.command == "on-data" else on_deployment
    return [make(api_url, options.what, _parameters(options.param))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="infra.automations", description=__doc__)
    parser.add_argument(
        "--api-url",
        default=os.environ.get("PREFECT_API_URL"),
        help="The Prefect server. Default: PREFECT_API_URL.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    apply_command = commands.add_parser("apply", help="make or update all of them")
    apply_command.add_argument(
        "--notify", metavar="TYPE/NAME", help="block that is told when advance ends"
    )
    for name, what, about in (
        ("on-data", "PREFIX", "start advance when data is announced under a prefix"),
        ("on-deployment", "FLOW/NAME", "start advance when another deployment completes"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("what", metavar=what)
        command.add_argument(
            "--param", metavar="KEY=VALUE", action="append", default=[], help="of advance"
        )
    return parser


def main() -> None:
    """Runs one command; a failure ends with its cause and a non-zero exit."""
    options = _parser().parse_args()
    try:
        if not options.api_url:
            raise ServiceError("No Prefect server was named. Set PREFECT_API_URL, or --api-url.")
        done = apply(options.api_url, _wanted(options, options.api_url))
    except ServiceError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    sys.stdout.write("\n".join(done or ["all automations are as they should be"]) + "\n")


if __name__ == "__main__":
    main()
