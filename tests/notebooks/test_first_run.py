"""The notebook that the README links to runs from top to bottom."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from infra.home import home
from storage.ledger import head, list_runs
from storage.opening import open_store
from storage.store_config import StoreConfig

NOTEBOOK = Path(__file__).with_name("first_run.ipynb")
TIMEOUT_S = 540


@pytest.fixture
def store_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a store of the test's own; of this machine's home only the cache is shared."""
    cache = home() / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    own = tmp_path / "home"
    own.mkdir()
    # Disposable and content addressed: it saves making the base model once more.
    (own / "cache").symlink_to(cache)
    store = tmp_path / "store"
    store.mkdir()
    for name in ("ROLLBOOK_ENDPOINT", "AWS_ENDPOINT_URL_S3", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROLLBOOK_HOME", str(own))
    monkeypatch.setenv("ROLLBOOK_STORE", str(store))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    # Prefect's temporary server, for there are no services in this home; 20 s are few on two cores.
    monkeypatch.setenv("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "300")
    return store


@pytest.mark.e2e
@pytest.mark.slow
def test_the_first_run_trains_three_steps_and_shows_curve_and_samples(store_directory: Path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3")
    client.execute()
    images, tables = (
        [
            output["data"][kind]
            for cell in notebook.cells
            for output in cell.get("outputs", [])
            if kind in output.get("data", {})
        ]
        for kind in ("image/png", "text/html")
    )
    assert len(images) == 1
    samples = next(table for table in tables if "<th>completion</th>" in table)
    assert samples.count("<tr") == 1 + 16
    store = open_store(StoreConfig(uri=str(store_directory)), writing=False)
    (run,) = list_runs(store)
    newest = head(store, run)
    assert newest is not None
    assert newest[0].step == 3


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
