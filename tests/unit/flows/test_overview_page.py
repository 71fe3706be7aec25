"""The overview of a run and the status of a service say what is so, and stay whole markdown."""

from datetime import UTC, datetime

import pytest

from flows.overview_page import Overview, duration, overview_markdown
from flows.service_pages import status_markdown
from storage.records import EvalRecord
from tasks.service_contract import ErrorBody, Health
from tests.unit.flows.test_report_pages import commit

NOON = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def overview(*, steps: int, last: int = 10, **changes: object) -> Overview:
    """A run whose steps came every 4 s, of which rollout took 2 and train 1."""
    made = Overview(run="mine", first=1, last=last, store_uri="s3://b/p", **changes)
    for step in range(1, steps + 1):
        found = commit(rollout_s=2.0, train_s=1.0, reward_mean=0.25).model_copy(
            update={"step": step, "policy_version": step}
        )
        made.add_step(found, digest="c" * 64, flow_run_id=f"flow-{step}", at=100.0 + 4 * step)
    return made


def page(made: Overview, image: str | None = None) -> str:
    return overview_markdown(
        made, image=image, now=NOON, link=lambda id: f"http://ui/{id}" if id else None
    )


def test_the_rest_takes_as_long_as_the_steps_before_did():
    # Steps 1 to 4 came 4 s apart, 6 more are to come: 6 x 4 s.
    assert overview(steps=4).seconds_left() == 24
    assert "24 s left, until about 12:00 UTC" in page(overview(steps=4))


def test_one_step_does_not_say_how_long_a_step_takes():
    # It waited for engines to start.
    assert overview(steps=1).seconds_left() is None
    assert "left" not in page(overview(steps=1))


def test_stages_share_a_step_with_what_lies_between():
    # 4 s from commit to commit = rollout 2 + train 1 + 1 that no stage took.
    assert overview(steps=4).stage_seconds() == {"rollout": 2, "train": 1, "between": 1}
    text = page(overview(steps=4))
    assert "| rollout | 2.00 | 50% |" in text
    assert "| between | 1.00 | 25% |" in text
    assert "| **all** | **4.00** | |" in text


def test_the_newest_step_comes_first_with_a_link_to_its_flow_run():
    text = page(overview(steps=7))
    listed = [line for line in text.splitlines() if line.startswith("| [step ")]
    assert listed[0].startswith("| [step 7](http://ui/flow-7) | 0.250 |")
    assert len(listed) == 5


def test_commands_lead_to_the_store_and_survive_a_shell():
    text = page(overview(steps=3, store_options=["--store", "s3://b/my prefix"]))
    assert "rollbook samples mine@3 --worst 5 --store 's3://b/my prefix'" in text


def test_an_overview_without_steps_says_what_is_waited_for():
    text = page(overview(steps=0))
    assert text.startswith("# mine: no step yet")
    assert "engines start" in text
    assert "| stage |" not in text


def test_an_ended_run_promises_no_end():
    made = overview(steps=4)
    made.ended = "stopped: LeaseHeld; the flow run's state says more"
    assert "LeaseHeld" in page(made)
    assert " left" not in page(made)


def test_held_out_accuracy_is_told_from_first_to_last():
    made = overview(steps=3)
    for version, accuracy in ((0, 0.25), (2, 0.5), (3, 0.75)):
        made.evaluations.append(
            EvalRecord(
                run="mine",
                suite="held_out",
                policy_version=version,
                policy_digest="d",
                accuracy=accuracy,
                low=None,
                high=None,
                num_prompts=64,
                num_samples=64,
                num_graded=64,
                reward_mean=accuracy,
                records=[],
                metrics={},
            )
        )
    assert "0.250 (version 0) → 0.750 (version 3)" in page(made)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (89, "89 s"), (90, "2 min"), (5400, "1.5 h")]
)
def test_durations_read_as_people_say_them(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_service_says_what_it_serves_and_how_busy_it_is():
    health = Health(
        status="ready",
        message="ready",
        policy_version=12,
        policy_digest="e" * 64,
        num_calls=9,
        queue=2,
        busy_s=3.25,
        tokens_per_s=1234.5,
        environment={"vllm": "0.32.0"},
    )
    text = status_markdown(health, run="mine", run_url="http://ui/1", address="http://host:1")
    assert "policy version **12**, `eeeeeeeeeeeeeeee`" in text
    assert "| run | [mine](http://ui/1) |" in text
    assert "| tokens a second | 1234 |" in text
    assert "| calls waiting | 2 |" in text
    assert "| call in hand | for 3.2 s |" in text
    assert "| vllm | `0.32.0` |" in text


def test_an_error_with_bars_and_tags_breaks_no_page():
    error = ErrorBody(kind="permanent", type="ValueError", message="a|b\n<script>x</script>")
    health = Health(status="failed", message=error.message, error=error)
    text = status_markdown(health, run="mine", run_url=None, address="http://host:1")
    assert "<script>" not in text
    assert "a\\|b &lt;script>" in text
    assert "no policy yet" in text
