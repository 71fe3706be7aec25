"""From rows to prompt token ids: the chat template, then the tokenizer, and nothing added."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from tasks.prompts.contract import PromptsConfig
from tasks.prompts.rows import Message, Row

# transformers reads this when it is imported, and else warns that torch, unused here, is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import AutoTokenizer, PreTrainedTokenizerBase

Encode = Callable[[Sequence[Row]], list[list[int]]]


def open_encoder(tokenizer_dir: Path, *, config: PromptsConfig) -> Encode:
    """Returns the function from rows to prompt token ids.

    With a template the ids are those of `apply_chat_template(..., add_generation_prompt=True)`;
    without, those of the text alone. Neither adds special tokens, so a BOS comes from the template
    or not at all.

    Raises:
        ValueError: no usable tokenizer, or a template is asked for and there is none. The
            function raises it for a row that the template refuses, or whose ids are unusable.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The model directory {tokenizer_dir} has no tokenizer that can be read: "
            f"{' '.join(str(error).split())} Expected tokenizer.json and tokenizer_config.json "
            "beside the weights."
        ) from error
    if not config.template:
        return lambda rows: _checked(rows, _encode_texts(rows, tokenizer), tokenizer)
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer in {tokenizer_dir} has no chat template, and prompts.template asks for "
            "one. Set prompts.template=false to train on the prompt text as it is, or add "
            "chat_template.jinja to the model directory."
        )
    system = config.system_prompt
    return lambda rows: _checked(rows, _encode_turns(rows, tokenizer, system=system), tokenizer)


def _encode_texts(rows: Sequence[Row], tokenizer: Any) -> list[list[int]]:
    for row in rows:
        if not isinstance(row.prompt, str):
            raise ValueError(
                f"{row.where}: the prompt is a list of turns, which only a chat template can turn "
                "into tokens. Expected a text, or set prompts.template=true."
            )
    return tokenizer([row.prompt for row in rows], add_special_tokens=False)["input_ids"]


def _encode_turns(rows: Sequence[Row], tokenizer: Any, *, system: str | None) -> list[list[int]]:
    return [_templated(row, tokenizer, turns=_turns(row, system=system)) for row in rows]


def _templated(row: Row, tokenizer: Any, *, turns: list[Message]) -> list[int]:
    try:
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        roles = [turn["role"] for turn in turns]
        raise ValueError(
            f"{row.where}: the model's chat template refuses the turns {roles}: {error}. Expected "
            "turns that it knows; prompts.system_prompt and the data decide them."
        ) from error


def _turns(row: Row, *, system: str | None) -> list[Message]:
    turns = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    if system is None or turns[0]["role"] == "system":
        return turns
    return [{"role": "system", "content": system}, *turns]


def _checked(
    rows: Sequence[Row], ids_P_T: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    bos = tokenizer.bos_token_id
    for row, ids_T in zip(rows, ids_P_T, strict=True):
        if not ids_T:
            raise ValueError(
                f"{row.where}: the prompt has no tokens. Expected at least one; does the tokenizer "
                "know these characters?"
            )
        if bos is not None and ids_T[:2] == [bos, bos]:
            raise ValueError(
                f"{row.where}: the prompt starts with two {tokenizer.bos_token!r} tokens. Expected "
                "one, from the chat template: remove it from the prompt, or from the template."
            )
    return ids_P_T
