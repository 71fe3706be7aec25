"""A base model from a Hugging Face directory or, where there is a network, by its hub name."""

import shutil
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from tasks.errors import Permanent

_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]


def make(name: str, directory: Path, *, threads: int, say: Callable[[str], None]) -> None:
    """Copies a local directory, or downloads a model from the hub.

    Raises:
        Permanent: neither a directory nor within reach.
    """
    del threads
    local = Path(name).expanduser()
    if local.is_dir():
        shutil.copytree(local, directory)
        return
    say(f"downloading {name}")
    try:
        snapshot_download(name, local_dir=directory, allow_patterns=_WANTED)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise Permanent(
            f"{name!r} is no directory here and cannot be had from the hub "
            f"({type(error).__name__}). Expected a Hugging Face directory, builtin:<name>, or a "
            "network on which the model's name resolves. Set model.path."
        ) from error
    shutil.rmtree(directory / ".cache", ignore_errors=True)
