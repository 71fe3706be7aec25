"""From completion token ids to the text that is graded."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# transformers reads this when it is imported, and else warns that torch, unused here, is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import AutoTokenizer

Decode = Callable[[Sequence[int]], str]

KEPT_MARKS = ("</answer>", "</think>")
"""Marks that close something: they stay even where they are the token that ends a completion."""


@functools.lru_cache(maxsize=4)
def open_decoder(tokenizer_dir: Path) -> Decode:
    """Returns the function from ids to text that keeps special tokens; loaded once per directory.

    Raises:
        ValueError: no usable tokenizer in `tokenizer_dir`.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The model directory {tokenizer_dir} has no tokenizer that can be read: "
            f"{' '.join(str(error).split())} Expected tokenizer.json and tokenizer_config.json."
        ) from error

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    return decode


def completion_text(token_ids: Sequence[int], *, stop_token_id: int | None, decode: Decode) -> str:
    """Returns a completion as graders see it: special tokens stay, the end mark goes.

    Think and answer tags may be special tokens, so nothing special is skipped; only the token
    that ended the completion is left out, unless it closes a tag.
    """
    ended = bool(token_ids) and stop_token_id is not None and token_ids[-1] == stop_token_id
    if ended and decode(token_ids[-1:]).strip() not in KEPT_MARKS:
        token_ids = token_ids[:-1]
    return decode(token_ids) if token_ids else ""
