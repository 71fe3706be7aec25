"""`rollbook verify` as a flow: the same checks, with the report as an artifact in the UI."""

from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from flows.posting import artifact_key
from flows.stores import resolve_store
from flows.verification import VerifyOptions, parse_steps, verify_run
from flows.verify_page import report_markdown
from flows.verify_report import Level
from flows.worker_process import begin
from infra.home import home
from storage.errors import Corrupt
from storage.opening import open_store
from tasks.workspace import open_workspace


@flow(name="verify", flow_run_name="verify {run}", persist_result=False)
def verify(  # noqa: PLR0913 - what a deployment may ask for
    run: str,
    level: Level = "chain",
    steps: str | None = None,
    sample: float = 1.0,
    head: str | None = None,
    key: str | None = None,
    trust: bool = False,
    store: str | None = None,
    endpoint: str | None = None,
) -> None:
    """Checks committed steps of `run` and posts what holds. Writes nothing to the store.

    Args:
        run: its name.
        level: `chain`, `facts` or `replay`; each includes the ones before it.
        steps: `A..B`; default: all.
        sample: share of the steps whose facts are computed again.
        head: digest of a commit that was seen once.
        key: file of the public key that must have signed all commits.
        trust: grade again also by functions, models and services that the run names.
        store: `s3://bucket/prefix` or a directory; default: see `rollbook verify --help`.
        endpoint: address of an S3 server that is not AWS.

    Raises:
        Corrupt: something that was checked does not hold; the artifact says what.
        NotFound: there is no such run.
    """
    begin(run)
    first, last = parse_steps(steps)
    options = VerifyOptions(
        level=level,
        first=first,
        last=last,
        sample=sample,
        head=head,
        key_file=Path(key) if key else None,
        trust=trust,
    )
    where = resolve_store(store, endpoint)
    opened = open_store(where, writing=False)
    with open_workspace(home()) as workspace:
        report = verify_run(
            opened,
            run,
            options,
            workspace=workspace,
            progress=lambda what, done, total: None,
            where=where,
        )
    create_markdown_artifact(
        key=artifact_key(run, "verify"),
        markdown=report_markdown(report),
        description=f"Verification of {run}, level {level}",
    )
    if report.cause is not None:
        raise Corrupt(report.cause)
