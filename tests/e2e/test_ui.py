"""What a person sees of a run in the Prefect UI, in a real browser."""

import re

import httpx
import pytest
from prefect.utilities.callables import parameter_schema

from flows.deployments import advance
from tests.e2e.watched import PATIENCE_MS, Browser, Watched

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.s3]

MORE_THAN_BLANK = 2000
"""A curve has more letters in base64 than an empty picture of its size."""


def test_the_page_of_a_run_shows_its_steps(watched: Watched, browser: Browser):
    run = watched.flow_runs("run")[0]
    browser.open(f"{watched.ui_url}/runs/flow-run/{run['id']}", "Beginning flow run", "Completed")
    graph_is_drawn(browser)
    browser.keep("run")
    browser.tab("Subflow Runs", "step 0 (genesis)", *(f"step {n}" for n in (1, 2, 3)))
    browser.keep("run-steps")
    browser.tab("Artifacts", "watched-overview", "watched-progress")
    browser.keep("run-artifacts")


def test_the_page_of_a_step_shows_its_stages_and_their_lines(watched: Watched, browser: Browser):
    step = watched.flow_runs("step")[-1]
    browser.open(f"{watched.ui_url}/runs/flow-run/{step['id']}", "committed run=watched step=3")
    graph_is_drawn(browser)
    browser.keep("step")
    stages = ("prompts", "rollout 1/2", "rollout 2/2", "reward 1/2", "train", "checkpoint")
    browser.tab("Task Runs", *stages)
    browser.keep("step-stages")
    browser.page.get_by_text("watched", exact=True).first.click()
    browser.wait("Beginning flow run")
    assert watched.flow_runs("run")[0]["id"] in browser.page.url


def graph_is_drawn(browser: Browser) -> None:
    """The run graph is a canvas; it is there when it has the size of its frame."""
    canvas = browser.page.locator("canvas").first
    canvas.wait_for(timeout=PATIENCE_MS)
    box = canvas.bounding_box()
    assert box is not None
    assert box["width"] > 400
    assert box["height"] > 150


def test_the_overview_shows_curve_cost_and_head(watched: Watched, browser: Browser):
    versions = watched.artifacts("overview")
    assert len(versions) == 1, "it is changed in place"
    browser.open(
        f"{watched.ui_url}/artifacts/artifact/{versions[0]['id']}",
        "watched: step 3 of 3",
        "What a step costs",
        "Look further",
    )
    image = browser.page.locator("img[src^='data:image/png']").first
    image.wait_for(timeout=PATIENCE_MS)
    assert image.evaluate("it => it.complete && it.naturalWidth") > 400
    assert len(image.get_attribute("src")) > MORE_THAN_BLANK
    rows = browser.page.locator("table").all_inner_texts()
    facts = next(text for text in rows if "digest" in text)
    assert re.search(r"version 3, digest [0-9a-f]{16}", facts)
    cost = next(text for text in rows if "share" in text)
    assert re.search(r"rollout\s+\d+\.\d\d\s+\d+%", cost)
    assert f"--store {watched.store.uri} --endpoint {watched.store.endpoint}" in browser.shown()
    browser.keep("overview")
    link = browser.page.get_by_role("link", name="step 2", exact=True).get_attribute("href")
    browser.open(link, "committed run=watched step=2")


def test_a_step_report_shows_samples_and_leads_to_the_store(watched: Watched, browser: Browser):
    newest = max(watched.artifacts("report"), key=lambda each: each["created"])
    browser.open(
        f"{watched.ui_url}/artifacts/artifact/{newest['id']}",
        "Step 3 of watched",
        "In the store",
        "runs/watched/steps/00000003/commit.json",
    )
    assert browser.page.locator("pre").count() >= 2, "prompts and completions stand as blocks"
    browser.keep("step-report")


def test_advance_is_a_form_that_a_person_can_fill_in(watched: Watched, browser: Browser):
    deployment = deployed(watched)
    page = browser.page
    browser.open(f"{watched.ui_url}/deployments/deployment/{deployment}/run", "Name of the run.")
    for name in parameter_schema(advance).properties:
        assert page.get_by_text(re.compile(rf"^{name}( \(Optional\))?$")).count(), name
    # What the UI cannot draw as fields it shows as an editor for JSON.
    assert page.locator(".cm-editor, .monaco-editor").count() == 0
    field = page.locator("textarea").first
    field.fill("from-the-form")
    browser.keep("form")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(lambda url: url.endswith("/run") is False, timeout=PATIENCE_MS)
    made = watched.rows("/flow_runs/filter", deployments={"id": {"any_": [deployment]}})
    try:
        assert [each["parameters"]["run"] for each in made] == ["from-the-form"]
    finally:
        for each in made:
            httpx.delete(f"{watched.api_url}/flow_runs/{each['id']}").raise_for_status()
        httpx.delete(f"{watched.api_url}/deployments/{deployment}").raise_for_status()


def deployed(watched: Watched) -> str:
    """Registers `advance` as `prefect deploy` does, without a work pool; returns its id."""
    with httpx.Client(base_url=watched.api_url, timeout=60) as client:
        flow = client.post("/flows/", json={"name": advance.name}).json()
        body = {
            "name": "form",
            "flow_id": flow["id"],
            "parameter_openapi_schema": parameter_schema(advance).model_dump(),
            "enforce_parameter_schema": True,
        }
        answer = client.post("/deployments/", json=body)
        answer.raise_for_status()
        return answer.json()["id"]
