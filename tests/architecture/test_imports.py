"""Who may import what, as a table; import-linter holds the layers (`make lint`)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("flows", "tasks", "storage", "rewards", "infra")
SOURCES = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))

ALLOWED = {
    "prefect": ["flows/*", "tasks/*/task.py"],
    "boto3": ["storage/backends/s3*.py"],
    "botocore": ["storage/backends/s3*.py"],
    "vllm": ["tasks/rollout/vllm_engine.py"],
    "torch": ["tasks/train/*", "tasks/rollout/vllm_engine.py"],
    "deepspeed": ["tasks/train/*"],
    "prometheus_client": ["tasks/service_metrics.py"],
    "transformers": ["tasks/train/*", "tasks/prompts/tokens.py", "tasks/reward/decoding.py"],
}
STAGES = ("prompts", "rollout", "reward", "train", "checkpoint")
HEAVY = ("torch", "vllm", "deepspeed", "transformers")


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def is_one_of(path: Path, patterns: list[str]) -> bool:
    return any(fnmatch(relative(path), pattern) for pattern in patterns)


@pytest.mark.parametrize("library", ALLOWED)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    strangers = {
        relative(path)
        for path in SOURCES
        for module, _ in imports(ast.parse(path.read_text()))
        if module.split(".")[0] == library and not is_one_of(path, ALLOWED[library])
    }
    assert strangers == set()


def test_algorithm_files_import_torch_for_typing_only() -> None:
    eager = {
        relative(path)
        for path in SOURCES
        if is_one_of(path, ["tasks/train/algorithms/*"])
        for statement in ast.parse(path.read_text()).body
        for module, _ in imports(statement)
        if not isinstance(statement, ast.If) and module.split(".")[0] == "torch"
    }
    assert eager == set()


@pytest.mark.parametrize(
    "module",
    ["flows.step", "flows.config", "flows.cli", "tasks.client", "tasks.service_contract"],
)
def test_the_controller_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


def test_contracts_load_neither_engines_nor_prefect_nor_boto3() -> None:
    modules = [f"tasks.{room}.contract" for room in STAGES]
    unwanted = (*HEAVY, "prefect", "boto3")
    code = f"import sys, {', '.join(modules)}; print([m for m in {unwanted!r} if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


def test_the_local_setup_needs_only_the_standard_library() -> None:
    strangers = {
        (relative(path), module)
        for path in SOURCES
        if relative(path).startswith("infra/")
        # Not part of the local setup: the worker's default, from which templates are made.
        and relative(path) != "infra/kubernetes/templates.py"
        for module, _ in imports(ast.parse(path.read_text()))
        if module.split(".")[0] not in sys.stdlib_module_names | {"infra"}
    }
    assert strangers == set()
