"""Sizes, names and documents that STYLE promises and ruff cannot see."""

import ast
import re
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("flows", "tasks", "storage", "rewards", "infra")
SOURCES = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))
DOORS = {
    "prompts": {"contract.py", "stage.py", "task.py"},
    "rollout": {"contract.py", "stage.py", "engine.py", "task.py"},
    "reward": {"contract.py", "stage.py", "pool.py", "task.py"},
    "train": {"contract.py", "stage.py", "engine.py", "task.py"},
    "checkpoint": {"contract.py", "stage.py", "task.py"},
}
MAY_DEFER_IMPORTS = [
    "tasks/*/task.py",
    "flows/cli.py",
    "flows/cli_ledger.py",
    "flows/cli_rewards.py",
    # The engine's heavy import comes after its process's environment is set.
    "tasks/rollout/engine.py",
]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def name(path: Path, function: Function | None = None) -> str:
    where = str(path.relative_to(REPOSITORY))
    return f"{where}:{function.lineno} {function.name}" if function else where


def test_no_file_is_longer_than_500_lines() -> None:
    long = [name(path) for path in SOURCES + TESTS if path.read_text().count("\n") > 500]
    assert long == []


def test_no_function_is_longer_than_80_lines_and_most_are_short() -> None:
    sizes = {name(path, each): lines(each) for path in SOURCES for each in functions(path)}
    assert {where: size for where, size in sizes.items() if size > 80} == {}
    assert statistics.median(sizes.values()) <= 12
    assert statistics.quantiles(sizes.values(), n=10)[-1] <= 40


def test_nothing_is_a_drawer_for_everything() -> None:
    drawers = re.compile(r"(^|/)(utils?|common|core|helpers?|misc)(\.py|/)")
    assert [name(path) for path in SOURCES if drawers.search(name(path))] == []


def test_names_say_what_a_thing_is() -> None:
    vague = re.compile(r"^(Base[A-Z]\w*|\w*(Manager|Handler))$")
    classes = [
        f"{name(path)} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and vague.match(node.name)
    ]
    assert classes == []


@pytest.mark.parametrize("room", DOORS)
def test_every_stage_has_the_same_doors(room: str) -> None:
    present = {path.name for path in (REPOSITORY / "tasks" / room).glob("*.py")}
    assert DOORS[room] - present == set()


def test_a_task_is_short_and_decides_nothing() -> None:
    for path in (REPOSITORY / "tasks").glob("*/task.py"):
        assert path.read_text().count("\n") <= 60, name(path)
        branches = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.If)
        ]
        assert branches == [], name(path)


def test_every_folder_opens_with_a_short_readme() -> None:
    for room in (*ROOMS, "tests"):
        readme = REPOSITORY / room / "README.md"
        assert readme.is_file(), room
        assert 5 <= readme.read_text().count("\n") <= 30, room


def test_package_files_are_empty_except_dictionaries_of_extensions() -> None:
    for path in SOURCES:
        if path.name != "__init__.py" or not path.read_text().strip():
            continue
        tables = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        ]
        assert tables, f"{name(path)} holds something else than a dictionary"


def test_imports_inside_functions_stay_where_they_are_allowed() -> None:
    deferred = {
        name(path)
        for path in SOURCES
        for function in functions(path)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    strangers = {
        where for where in deferred if not any(Path(where).match(p) for p in MAY_DEFER_IMPORTS)
    }
    assert strangers == set()


def test_engine_files_are_type_checked_once_against_the_environment_that_runs_them() -> None:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        left_out = tomllib.load(file)["tool"]["pyright"]["exclude"]
    engines = ast.literal_eval((REPOSITORY / "infra" / "pyright-engines.json").read_text())
    assert [f"../{path}" for path in left_out] == engines["include"]


def test_tests_are_named_as_sentences() -> None:
    short = [
        name(path, each)
        for path in TESTS
        for each in functions(path)
        if each.name.startswith("test_") and each.name.count("_") < 3
    ]
    assert short == []
