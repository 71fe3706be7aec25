"""Functions of users: found by name, called as TRL and verl call them, and judged by what comes."""

import hashlib
import os
import pickle
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rewards import python
from rewards.contract import RewardInput, Score
from rewards.python_loading import code_digest
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.reward.pool import RewardPool

FILE = Path(__file__).with_name("functions_of_users.py")
ROOT = Path(__file__).parents[3]


def config(function: str, **options: Any) -> python.Config:
    return python.Config(function=f"{FILE}:{function}", **options)


def score(function: str, item: RewardInput, **options: Any) -> Score:
    return python.score(item, config(function, **options))


def seen(function: str) -> Any:
    """What the function was given; functions are run once per version of their file."""
    return python._opened(config(function)).call.seen


def test_trl_functions_get_columns_in_lists_and_only_what_they_take():
    item = RewardInput("4", answer="4", extra={"level": 3, "unused": "x"}, prompt="2 + 2?")
    assert score("takes_three", item) == Score(3.0)
    assert score("twice", item) == Score(6.0)
    assert score("Graders.strict", item) == Score(1.0)


def test_trl_functions_with_kwargs_get_all_that_trl_passes():
    extra = {"level": 3, "my column": None, "completions": "a column of that name"}
    item = RewardInput("4", answer="4", extra=extra, prompt="2 + 2?", token_ids=(7, 8))
    assert score("everything", item) == Score(1.0)
    given = seen("everything")
    logs = {given.pop("log_extra"), given.pop("log_metric")}
    assert all(callable(log) for log in logs)
    assert given == {
        "prompts": ["2 + 2?"],
        "completions": ["4"],
        "completion_ids": [[7, 8]],
        "answer": ["4"],
        "level": [3],
        "my column": [None],
    }


def test_the_gold_answer_goes_by_another_name_where_the_function_wants_one():
    item = RewardInput("4", answer="4")
    assert score("accuracy", item, answer_column="solution") == Score(1.0)
    assert score("accuracy", RewardInput("4", extra={"solution": "4"})) == Score(1.0)
    own = RewardInput("4", answer="5", extra={"answer": "4", "level": 1})
    assert score("takes_three", own) == Score(1.0), "a column named answer is the row's own"


def test_turns_of_the_row_make_prompt_and_completion_a_conversation():
    turns = [{"role": "system", "content": ""}, {"role": "user", "content": "2 + 2?"}]
    item = RewardInput("4", prompt="<|im_start|>user 2 + 2?", extra={"prompt": turns})
    assert score("conversation", item) == Score(1.0)
    assert score("chat_only", RewardInput("4"), conversational=True) == Score(1.0)
    score("everything", item, conversational=False)
    assert seen("everything")["prompts"] == ["<|im_start|>user 2 + 2?"]
    score("everything", RewardInput("4", prompt="templated", extra={"prompt": "raw"}))
    assert seen("everything")["prompts"] == ["raw"]


def test_a_templated_text_never_stands_for_turns_that_the_row_lacks():
    settings = config("conversation", conversational=True)
    problem = python.check_gold(None, {"prompt": "2 + 2?"}, settings)
    assert problem is not None
    assert "extra_fields=['prompt']" in problem
    found = python.score(RewardInput("4", prompt="<|im_start|>user 2 + 2?"), settings)
    assert found == Score(None, "grader_error", problem)


def test_what_a_function_logs_is_the_reason():
    assert score("logs", RewardInput("x")) == Score(0.5, reason="extracted=a b, acc=1")


def test_async_functions_are_run_to_their_end():
    assert score("slow", RewardInput("x")) == Score(0.25)
    assert score("asks_a_model", RewardInput("x", answer="y")) == Score(0.75)


def test_none_of_trl_says_that_the_function_does_not_apply():
    found = score("returns", RewardInput("x", extra={"what": "none"}))
    assert (found.value, found.status) == (None, "not_applicable")
    assert found.reason is not None
    assert found.reason.endswith(":returns returned None")


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("true", 1.0),
        ("integer", 3.0),
        ("tuple", 0.5),
        ("numpy scalar", 0.5),
        ("numpy truth", 1.0),
        ("numpy array", 0.25),
        ("numpy zero", 0.25),
        ("fraction", 0.25),
    ],
)
def test_every_kind_of_number_is_a_number(what: str, value: float):
    found = score("returns", RewardInput("x", extra={"what": what}))
    assert found == Score(value)
    assert type(found.value) is float


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan", r"returned nan \(float\). Expected a finite number"),
        ("infinite", r"returned -inf \(float\). Expected a finite number"),
        ("huge", r"returned 10{38}… \(int\). Expected a finite number"),
        ("two", r"returned 2 scores for one completion"),
        ("empty", r"returned 0 scores for one completion"),
        ("bare", r"returned 1\.0 \(float\). Expected a list"),
        ("nothing", r"returned None \(NoneType\). Expected a list"),
        ("text", r"returned '1\.0' \(str\). Expected a number"),
        ("complex", r"returned 1j \(complex\). Expected a number"),
        ("nested", r"returned \[1\.0\] \(list\). Expected a number"),
        ("exit", r"raised SystemExit\(3\)"),
        ("cancel", r"raised CancelledError\(\)"),
    ],
)
def test_what_is_no_score_is_an_error_that_names_function_and_value(what: str, message: str):
    with pytest.raises(ValueError, match=r"functions_of_users\.py:returns " + message):
        score("returns", RewardInput("x", extra={"what": what}))


def test_what_a_function_raises_passes():
    with pytest.raises(ZeroDivisionError):
        score("returns", RewardInput("x", extra={"what": "raise"}))


GSM8K = {
    "data_source": "openai/gsm8k",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "question": "How many?"},
}


def test_verl_functions_get_the_row_as_verl_passes_it():
    truth = {"target": 98, "numbers": [44, 19, 35]}
    extra = GSM8K | {"reward_model": {"style": "rule", "ground_truth": truth}}
    score("whole_row", RewardInput("72", answer="{}", extra=extra, domain="mine"))
    # numbers: the function appended the last one to its own copy.
    assert seen("whole_row")[:3] == ("openai/gsm8k", "72", truth | {"numbers": [44, 19, 35, 0]})
    info = {**GSM8K["extra_info"], "num_turns": None, "rollout_reward_scores": {}, "calls": 1}
    assert seen("whole_row")[3] == info


def test_rows_without_verls_columns_are_graded_by_domain_and_answer():
    score("whole_row", RewardInput("72", answer="72", domain="mine"))
    assert seen("whole_row")[:3] == ("mine", "72", "72")
    score("whole_row", RewardInput("72", answer="72", extra={"reward_model": None}))
    assert seen("whole_row")[2] == "72"


def test_what_a_function_does_to_its_arguments_reaches_no_other_sample():
    truth = {"target": 98, "numbers": [44]}
    extra = GSM8K | {"reward_model": {"ground_truth": truth}}
    item = RewardInput("72", extra=extra)
    assert [score("whole_row", item).value for _ in range(3)] == [1.0, 1.0, 1.0]
    assert truth == {"target": 98, "numbers": [44]}


def test_verls_dictionary_gives_score_and_reason():
    found = score("compute_score", RewardInput("72", extra=GSM8K))
    assert found == Score(1.0, reason="acc=1, pred=72")
    long = score("compute_score", RewardInput("9" * 5000, extra=GSM8K))
    assert (long.value, long.reason) == (0.0, f"acc=1, pred={'9' * 39}…")


def test_a_batch_function_is_given_batches_of_one():
    found = score("batch", RewardInput("abc", answer="y", domain="here"))
    assert found == Score(3.0, reason="where=here")


def test_kwargs_come_before_what_is_passed():
    options = {"names": ["a", "b"], "bonus": 5}
    assert score("with_options", RewardInput("x", answer="y"), kwargs=options) == Score(7.0)
    given = score(
        "needs_a_model", RewardInput("x", answer="y"), kwargs={"reward_router_address": 1}
    )
    assert given == Score(1.0)


@pytest.mark.parametrize("function", ["no_score", "returns_none"])
def test_a_verl_function_without_a_score_is_an_error(function: str):
    with pytest.raises(ValueError, match=rf":{function} returned"):
        score(function, RewardInput("x", extra=GSM8K))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("no_such", {}, r"functions_of_users\.py has no 'no_such'. Did you mean no_score"),
        ("NOT_CALLABLE", {}, "is no function: it is int"),
        ("neither", {}, r"takes \(gold, text\): no shape that is known. Expected TRL's .* verl's"),
        ("both", {}, "more than one shape"),
        ("anything", {}, "no shape that is known"),
        ("neither", {"shape": "verl"}, "takes no argument 'solution_str'"),
        ("accuracy", {"shape": "guess"}, "shape.*: Input should be"),
        ("takes_three", {"kwargs": {"scale": 2}}, "takes no argument 'scale'"),
        ("progress", {}, "requires 'trainer_state', the state of a trainer"),
        ("needs_a_model", {}, "requires 'reward_router_address'"),
        ("needs_a_stranger", {}, "requires 'stranger', which verl does not pass"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_launch(
    function: str, options: dict[str, Any], message: str
):
    part = RewardPart(kind="python", options={"function": f"{FILE}:{function}", **options})
    with pytest.raises(ValueError, match=message):
        part.check_code()


def test_a_shape_may_be_said_where_the_arguments_do_not_tell():
    assert score("anything", RewardInput("x"), shape="trl") == Score(1.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "names no function"),
        ("module.function", "names no function"),
        ("module:", "names no function"),
        (":function", "names no function"),
        ("a module:function", "names no function"),
        ("module:1", "names no function"),
        ("__main__:function", "notebook"),
        ("no_such_module:function", "There is no module 'no_such_module' in .* or in "),
        ("json.no_such:function", r"There is no module 'json\.no_such'.*'json' is .*__init__\.py"),
        ("json:no_such", "has no 'no_such'"),
        ("no/such/file.py:function", r"The file .*no/such/file\.py cannot be read: No such file"),
        ("builtins:min", "does not name its arguments|no shape"),
    ],
)
def test_a_name_that_names_nothing_says_what_was_looked_for(name: str, message: str):
    with pytest.raises(ValidationError, match=message):
        python.Config(function=name)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_library", r"ModuleNotFoundError: .*no_such_library.* line 1\)"),
        ("x = 1\n1 / 0", r"ZeroDivisionError: division by zero \(.*reward_\w+\.py line 2\)"),
        ("import sys\nsys.exit(2)", "SystemExit: 2"),
        ("def f(:", "SyntaxError"),
        ("x = '\0'", "SyntaxError|null bytes"),
    ],
)
@pytest.mark.parametrize("by_path", [True, False])
def test_code_that_does_not_import_is_refused_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str, by_path: bool
):
    name = f"reward_{abs(hash(tmp_path)):x}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValidationError, match=f"does not import: .*({message})"):
        python.Config(function=f"{name}.py:f" if by_path else f"{name}:f")


def test_a_file_that_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "mine.py"
    digests = []
    for value in (0.25, 0.5, 0.25):
        path.write_text(f"def f(completions):\n    return [{value:.2f}]\n")
        settings = python.Config(function=f"{path}:f")
        assert python.score(RewardInput("x"), settings) == Score(value)
        digests.append(python.describe(settings)[f"reward:{path}:f"])
    assert digests[0] == digests[2] != digests[1]
    assert re.fullmatch("sha256:[0-9a-f]{64}", digests[0])


def test_a_file_may_import_its_neighbours_and_hold_dataclasses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_mine.py").write_text("BONUS = 2.0\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\nfrom neighbour_of_mine import BONUS\n"
        "@dataclass\nclass Verdict:\n    value: float = BONUS\n"
        "def f(completions: list[str]) -> list[float]:\n    return [Verdict().value]\n"
    )
    settings = python.Config(function=f"{tmp_path}/mine.py:f")
    assert python.score(RewardInput("x"), settings) == Score(2.0)
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_the_digest_of_a_package_covers_all_of_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    package = tmp_path / "package_of_mine" / "deep"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text("def f(completions):\n    return [1.0]\n")
    settings = python.Config(function="package_of_mine.deep.rewards:f")
    before = python.describe(settings)
    (package.parent / "notes.txt").write_text("no code")
    assert python.describe(settings) == before
    (package.parent / "algebra.py").write_text("ZERO = 0")
    assert python.describe(settings) != before
    assert list(before) == ["reward:package_of_mine.deep.rewards:f"]


def test_the_digest_of_a_module_without_package_is_that_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "namespace_of_mine").mkdir()
    code = b"def f(completions):\n    return [1.0]\n"
    for name in ("alone_of_mine.py", "namespace_of_mine/inner.py"):
        (tmp_path / name).write_bytes(code)
    digest = f"sha256:{hashlib.sha256(code).hexdigest()}"
    assert code_digest("alone_of_mine:f") == digest
    assert code_digest("namespace_of_mine.inner:f") == digest
    assert code_digest("time:sleep") == f"python {platform.python_version()}"
    (tmp_path / "alone_of_mine.py").unlink()
    with pytest.raises(ValueError, match="The code of alone_of_mine:f cannot be read"):
        code_digest("alone_of_mine:f")


def test_missing_columns_are_named_at_launch():
    assert python.check_gold("4", {"level": 1}, config("takes_three")) is None
    problem = python.check_gold("4", {}, config("takes_three"))
    assert problem is not None
    assert "takes_three requires 'level', which the row does not have" in problem
    assert score("takes_three", RewardInput("4", answer="4")).reason == problem
    no_truth = python.check_gold(None, {"reward_model": {"style": "rule"}}, config("whole_row"))
    assert no_truth is not None
    assert "ground_truth" in no_truth
    null = {"reward_model": {"ground_truth": None}}
    assert python.check_gold(None, null, config("whole_row")) is None


def grade(pool: RewardPool, options: dict[str, Any], *items: RewardInput) -> list[Score]:
    settings = RewardConfig(
        parts=[RewardPart(kind="python", name="mine", options=options)], cpu_limit_s=20.0
    )
    return [parts[0] for parts in pool.grade(items, config=settings)]


def test_a_function_that_ends_its_process_costs_its_own_sample_only(tmp_path: Path):
    words = ["integer", "exit", "raise", "none", "exit at once", "integer"]
    items = [RewardInput("x", sample_id=word, extra={"what": word}) for word in words]
    with RewardPool(["python"], workers=1, log_dir=tmp_path) as pool:
        scores = grade(pool, {"function": f"{FILE}:returns"}, *items)
    assert [found.value for found in scores] == [3.0, None, None, None, None, 3.0]
    assert [found.status for found in scores[1:5]] == [
        *["grader_error", "grader_error", "not_applicable", "grader_error"],
    ]
    assert "SystemExit(3)" in (scores[1].reason or "")
    assert "ZeroDivisionError on sample 'raise'" in (scores[2].reason or "")
    assert "worker died (exit status 0)" in (scores[4].reason or "")


GRADE_HERE = """
import sys
from pathlib import Path
from rewards.contract import RewardInput
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.reward.pool import RewardPool

config = RewardConfig(
    parts=[
        RewardPart(kind="python", name=name, options={"function": name}) for name in sys.argv[1:]
    ],
    workers=1,
)
with RewardPool(["python"], workers=1, log_dir=Path(".")) as pool:
    (scores,) = pool.grade([RewardInput("4", answer="4")], config=config)
print([score.value for score in scores], [score.reason for score in scores])
"""


def test_a_module_in_the_current_directory_grades_in_every_process(tmp_path: Path):
    (tmp_path / "my_rewards.py").write_text(
        "def accuracy(completions, answer, **kwargs):\n"
        "    print('noise')\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    # -P, because the installed command does not look into the current directory either.
    child = subprocess.run(
        [sys.executable, "-P", "-c", GRADE_HERE, "my_rewards:accuracy", "my_rewards.py:accuracy"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.stdout == "[1.0, 1.0] [None, None]\n", child.stderr
