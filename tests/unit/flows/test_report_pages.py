from flows.posting import artifact_key
from flows.report_pages import Curve, curve_image, step_markdown, table_rows
from storage.records import Cursor, ObjectRef, PolicyRef, StepCommit

EMPTY = ObjectRef(key="", sha256="", num_bytes=0)


def commit(**metrics: float | None) -> StepCommit:
    return StepCommit(
        run="addition-1",
        step=3,
        kind="train",
        plan=EMPTY,
        records=[],
        policy_version=3,
        policy_digest="d" * 64,
        policy=PolicyRef(version=3, digest="d" * 64, dtype="float32", files=[], probe=EMPTY),
        state_id="s",
        cursor=Cursor(),
        metrics=metrics,
        previous="p" * 64,
        attempt="a",
        committed_at="",
    )


def row(**changes: object) -> dict[str, object]:
    return {
        "sample": "group-1-0",
        "prompt": "What?",
        "completion": "<answer>k</answer>",
        "answer": "k",
        "reward": 1.0,
        "reason": "exact 1.000",
        "tokens": 8,
        "finish": "stop",
    } | changes


def test_report_shows_small_numbers_and_leaves_out_missing_ones():
    text = step_markdown(commit(learning_rate=2e-5, reward_mean=0.5, loss=None), [row()])
    assert "| learning rate | 2e-05 |" in text
    assert "| reward | 0.5 |" in text
    assert "loss" not in text
    assert all(line.count("|") in (0, 3) for line in text.splitlines())


def test_a_completion_with_a_fence_does_not_end_its_block():
    text = step_markdown(commit(), [row(completion="```python\nprint(1)\n```")])
    assert "````text\n```python" in text


def test_table_cells_keep_tags_visible():
    assert table_rows([row()])[0]["completion"] == "&lt;answer&gt;k&lt;/answer&gt;"
    assert table_rows([row()])[0]["tokens"] == 8


def test_curve_draws_with_gaps():
    curve = Curve()
    curve.add_step(commit(reward_mean=None))
    curve.add_step(commit(reward_mean=0.5))
    assert curve_image(curve, "addition-1").startswith("data:image/png;base64,iVBOR")


def test_artifact_keys_are_what_prefect_accepts():
    assert artifact_key("My_Run.2", "curve") == "my-run-2-curve"
