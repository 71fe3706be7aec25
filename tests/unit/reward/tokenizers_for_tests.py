"""Two small tokenizers on disk: think and answer tags as special tokens, or spelt in characters."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
END = "<|im_end|>"


def write_tokenizer(directory: Path, *, special_tags: bool) -> Tokenizer:
    """Writes the files that a model directory has, and returns the tokenizer."""
    characters = [chr(code) for code in range(32, 127)] + ["\n", "\u202e", "�", "\x00", "\\"]
    vocabulary = {character: index for index, character in enumerate(dict.fromkeys(characters))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    special = [*TAGS, END] if special_tags else [END]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer
