"""Drives a real rollout engine for tests: one JSON call a line in, one answer a line out.

Runs in the engines' environment: `python rollout_child.py SPEC.json`.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import tasks.rollout.stage as stage
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import PolicyRef, Probe, SamplingPolicy
from storage.store_config import StoreConfig
from tasks.rollout import engine as engine_module
from tasks.rollout.contract import PromptGroup, ReplayRequest, RolloutRequest
from tasks.workspace import Workspace, open_workspace


class DyingStore:
    """The real store, except that the process is killed as it is about to create a record."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_if_absent(self, key: str, payload: bytes) -> str:
        os.kill(os.getpid(), 9)
        raise AssertionError("unreachable")


class Calls:
    def __init__(self, spec: dict, workspace: Workspace) -> None:
        self._spec = spec
        self._workspace = workspace
        begun = time.perf_counter()
        self._engine = engine_module.start(
            spec["config"], model_dir=Path(spec["model_dir"]), workspace=workspace
        )
        self.started_s = time.perf_counter() - begun
        # Only now: it loads vLLM, and the environment had to be set up first.
        import tasks.rollout.vllm_engine as loaded

        self._loaded = loaded
        self._intact = {
            name: getattr(loaded, name) for name in ("repack_tied_head", "policy_digest")
        }

    def close(self) -> None:
        self._engine.close()

    def load(self, policy: dict, directory: str, probe: dict) -> dict:
        proof = self._engine.load(
            PolicyRef.model_validate(policy),
            directory=Path(directory),
            probe=Probe.model_validate(probe),
        )
        return proof.model_dump(mode="json")

    def submit(self, groups: list, sampling: dict) -> list:
        wanted = [PromptGroup(*group) for group in groups]
        finished = self._engine.submit(wanted, sampling=SamplingPolicy.model_validate(sampling))
        return [[dataclasses.asdict(one) for one in group.completions] for group in finished]

    def stage(self, request: dict, store: str, dies: bool = False) -> dict:
        opened = open_store(StoreConfig(uri=store), writing=True)
        result = stage.run(
            RolloutRequest.model_validate(request),
            DyingStore(opened) if dies else opened,
            self._engine,
            workspace=self._workspace,
        )
        return result.model_dump(mode="json")

    def replay(self, request: dict, store: str) -> dict:
        result = stage.run(
            ReplayRequest.model_validate(request),
            open_store(StoreConfig(uri=store), writing=False),
            self._engine,
            workspace=self._workspace,
        )
        return result.model_dump(mode="json")

    def holds(self) -> str | None:
        return self._engine.policy_digest

    def learner(self, weights: str, rows: list, temperature: float) -> list:
        import rollout_models

        return rollout_models.completion_logprobs(
            Path(self._spec["model_dir"]), Path(weights), rows, temperature=temperature
        )

    def sabotage(self, what: str) -> None:
        """Takes one safeguard out, so that its absence must be noticed elsewhere."""
        if what == "tied head":
            self._loaded.repack_tied_head = lambda model: None
        elif what == "prefix cache":
            self._engine._forget_prefixes = lambda: None
        elif what == "swap":
            self._engine._swap = lambda policy, directory: self._engine._forget_prefixes()
        else:
            raise ValueError(what)

    def claim_digest(self, digest: str) -> None:
        """Makes any weights pass for the policy `digest`, so that the probe alone must tell."""
        self._loaded.policy_digest = lambda directory: digest

    def repair(self) -> None:
        vars(self._loaded).update(self._intact)
        for name in ("_forget_prefixes", "_swap"):
            vars(self._engine).pop(name, None)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints.
    spec = json.loads(Path(sys.argv[1]).read_text())
    with open_workspace(Path(spec["home"])) as workspace:
        calls = Calls(spec, workspace)
        print(json.dumps({"value": calls.started_s}), file=answers, flush=True)
        for line in sys.stdin:
            call = json.loads(line)
            begun = time.perf_counter()
            try:
                answer = {"value": getattr(calls, call.pop("do"))(**call)}
            except Exception as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            answer["seconds"] = time.perf_counter() - begun
            print(json.dumps(answer), file=answers, flush=True)
        calls.close()


if __name__ == "__main__":
    main()
