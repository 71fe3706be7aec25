"""From completion token ids to the text that is graded."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

# Not transformers: its import costs seconds in every process that may grade, and a fast
# tokenizer decodes with nothing but this file.
from tokenizers import Tokenizer

Decode = Callable[[Sequence[int]], str]

KEPT_MARKS = ("</answer>", "</think>")
"""Marks that close something: they stay even where they are the token that ends a completion."""


@functools.lru_cache(maxsize=4)
def open_decoder(tokenizer_dir: Path) -> Decode:
    """Returns the function from ids to text that keeps special tokens; loaded once per directory.

    Raises:
        ValueError: no usable tokenizer.json in `tokenizer_dir`.
    """
    path = tokenizer_dir / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"The model directory {tokenizer_dir} has no tokenizer.json. Expected one, to decode "
            "completions: load the tokenizer with transformers' AutoTokenizer and save it there "
            "with save_pretrained."
        )
    tokenizer = Tokenizer.from_file(str(path))

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

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
