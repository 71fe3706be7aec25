"""Starts the vLLM engine: sets up the process first, loads vLLM after.

Light to import. Nothing of the store, the stage or the layout is known here.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import Permanent
from tasks.rollout.contract import RolloutConfig
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from tasks.rollout.vllm_engine import VllmEngine


def environment(config: RolloutConfig, *, cache: Path) -> dict[str, str]:
    """Returns the environment variables that vLLM and its libraries read when they load."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        # In this process: a second one would add serialisation and another thing that can die.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(config.threads),
        # Idle threads that spin take the cores of the trainer beside them.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Bound threads of two engines on one machine would all begin at the first core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    if config.enforce_eager:
        # vLLM's sampler still compiles one helper, which needs a compiler and up to 15 s.
        settings["TORCH_COMPILE_DISABLE"] = "1"
    return settings


def start(config: dict[str, Any], *, model_dir: Path, workspace: Workspace) -> "VllmEngine":
    """Starts an engine without weights; it takes its first ones as it takes all later ones.

    Blocks for 5 to 20 seconds. One engine per process.

    Args:
        config: a RolloutConfig as plain values.
        model_dir: config and tokenizer of the model; no weights are read from it.
        workspace: compiled code goes to its cache.

    Raises:
        Permanent: torch is loaded already, so that thread settings would come too late.
        ValueError: vLLM cannot serve this model within these limits.
    """
    checked = RolloutConfig.model_validate(config)
    if "torch" in sys.modules:
        raise Permanent(
            "torch was loaded before the rollout engine started. Expected a fresh process, because "
            "threads are set up as torch loads. Run the engine as a child or a service."
        )
    os.environ.update(environment(checked, cache=workspace.cache))
    # Only now: these libraries read the environment as they load.
    from tasks.rollout.vllm_engine import open_engine

    return open_engine(checked, model_dir=model_dir)
