"""A run that tests look at from outside, through the Prefect API and a real browser."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.seaweedfs import S3Keys
from storage.store_config import StoreConfig

SCREENSHOTS = "ROLLBOOK_SCREENSHOTS"
"""Names the folder where screenshots are kept; by default they go with the test's own output."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 30_000
FADES_MS = 1000
"""A page fades in; what waits for its texts finds them before a person sees them."""


@dataclass(frozen=True)
class Watched:
    """A finished run, its store, and the Prefect server that saw it."""

    run: str
    steps: int
    store: StoreConfig
    keys: S3Keys
    home: Path
    api_url: str
    ui_url: str
    commands: set[str]
    """Command lines of all processes of this machine while it went on."""
    printed: str

    def rows(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """What the API lists at `path` for these filters."""
        answer = httpx.post(f"{self.api_url}{path}", json=body, timeout=60)
        answer.raise_for_status()
        return answer.json()

    def flow_runs(self, flow: str) -> list[dict[str, Any]]:
        """This run's flow runs of a flow, oldest first."""
        # By tag, because the server tells of 200 at most, and other tests run hundreds of steps.
        return self.rows(
            "/flow_runs/filter",
            flows={"name": {"any_": [flow]}},
            flow_runs={"tags": {"all_": [f"run:{self.run}"]}},
            sort="START_TIME_ASC",
        )

    def artifacts(self, name: str) -> list[dict[str, Any]]:
        """Every version of one of this run's artifacts."""
        wanted = {"key": {"any_": [f"{self.run}-{name}"]}}
        return self.rows("/artifacts/filter", artifacts=wanted)


@dataclass
class Browser:
    """A page of a real browser, and all that servers answered it."""

    page: Any
    screenshots: Path
    answers: dict[str, bytes] = field(default_factory=dict)
    """Bodies by what was asked for."""
    _finished: list[Any] = field(default_factory=list)

    def open(self, address: str, *texts: str) -> None:
        """Opens a page and waits until it shows every one of `texts`."""
        self.page.goto(address)
        self.wait(*texts)

    def wait(self, *texts: str) -> None:
        for text in texts:
            self.page.get_by_text(text).first.wait_for(timeout=PATIENCE_MS)

    def tab(self, name: str, *texts: str) -> None:
        """Opens a tab of the page and waits until it shows every one of `texts`."""
        self.page.get_by_text(name, exact=True).first.click()
        self.wait(*texts)

    def shown(self) -> str:
        """All text of the page, and what else its document holds."""
        return self.page.inner_text("body") + self.page.content()

    def keep(self, name: str) -> Path:
        """Takes a screenshot that a person can look at."""
        path = self.screenshots / f"{name}.png"
        self.page.wait_for_timeout(FADES_MS)
        self.page.screenshot(path=path)
        return path

    def remember(self, request: Any) -> None:
        self._finished.append(request)

    def read_answers(self) -> None:
        """Reads the bodies; the browser drops them when the page goes elsewhere."""
        for request in self._finished:
            response = request.response()
            kind = response.headers.get("content-type", "") if response else ""
            if "json" in kind or "html" in kind:
                key = f"{request.method} {request.url} {request.post_data or ''}"
                self.answers[key] = response.body()
        self._finished.clear()


@contextmanager
def opened_browser(*, screenshots: Path) -> Iterator[Browser]:
    """Yields an open page of Debian's Chromium, or skips the test where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(
            f"no browser: none of {', '.join(PROGRAMS)} is on the PATH. On Debian, `apt-get "
            "install chromium` brings one"
        )
    from playwright.sync_api import sync_playwright

    kept = Path(os.environ.get(SCREENSHOTS) or screenshots)
    kept.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not start as root, and it opens our server's pages only.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = started.new_page(viewport={"width": 1440, "height": 1400})
        browser = Browser(page, kept)
        page.on("requestfinished", browser.remember)
        try:
            yield browser
        finally:
            started.close()
