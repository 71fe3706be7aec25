"""What the status of a service says, as markdown. No Prefect here."""

from flows.progress import number
from flows.report_pages import cell, facts_table
from tasks.service_contract import Health


def status_markdown(health: Health, *, run: str, run_url: str | None, address: str) -> str:
    """Returns how a service is: what it serves, how fast, what waits, and why if it failed.

    Args:
        health: as the service says it.
        run: whose stages it serves.
        run_url: where the UI shows the flow run that advances it, if that is known.
        address: where the service listens.
    """
    rows = [
        ("serves", _served(health)),
        ("listens at", f"`{address}`"),
        ("run", f"[{run}]({run_url})" if run_url else run),
        ("tokens a second", number(health.tokens_per_s, 0)),
        ("calls done", str(health.num_calls)),
        ("calls waiting", str(health.queue)),
        ("call in hand", _seconds(health.busy_s)),
        ("progress", f"{health.progress} (grows while the engine works)"),
    ]
    return (
        f"# Service of {run}: {health.status}\n\n{cell(health.message)}\n\n"
        f"{facts_table(rows)}{_error(health)}{_environment(health)}"
    )


def _served(health: Health) -> str:
    if health.policy_version is None:
        return "no policy yet"
    digest = f", `{health.policy_digest[:16]}`" if health.policy_digest else ""
    return f"policy version **{health.policy_version}**{digest}"


def _seconds(busy_s: float | None) -> str:
    return "none" if busy_s is None else f"for {busy_s:.1f} s"


def _error(health: Health) -> str:
    if health.error is None:
        return ""
    again = "another try may help" if health.error.kind == "transient" else "a retry repeats it"
    return f"\n## Why it failed\n\n`{health.error.type}` ({again}): {cell(health.error.message)}\n"


def _environment(health: Health) -> str:
    if not health.environment:
        return ""
    rows = "\n".join(
        f"| {cell(name)} | `{cell(value)}` |" for name, value in sorted(health.environment.items())
    )
    return f"\n## Environment\n\n| what | which |\n|---|---|\n{rows}\n"
