"""A 0.8M-parameter Qwen2 with a character tokenizer that has begun to add: `37+48=` -> `58`.

The supervised start of recipe `addition`: good enough that sampling finds right answers (about
0.29 of held-out ones), poor enough that reinforcement learning has something to do. About a
minute; the same bits on the same machine and thread count.
"""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = [PAD, EOS, *"0123456789+="]

NUM_HELD_OUT = 800
"""The first pairs of the shuffled list; the data set `addition` holds out the same ones."""

_LEARNING_RATE = 2e-3
_BATCH = 128
_SEED = 1
_STEPS = 345
_SAY_EVERY = 69
_IGNORED = -100


def make(name: str, directory: Path, *, threads: int, say: Callable[[str], None]) -> None:
    """Trains the model on the pairs that are not held out, and saves it with its tokenizer."""
    del name
    torch.set_num_threads(threads)
    torch.manual_seed(_SEED)
    tokenizer = make_tokenizer()
    model = Qwen2ForCausalLM(model_config())
    pairs = training_pairs()
    _learn(model, tokenizer, pairs, say)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def training_pairs() -> list[tuple[int, int]]:
    """Returns the 7,300 pairs of two-digit numbers that are not held out."""
    pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    random.Random(0).shuffle(pairs)
    return pairs[NUM_HELD_OUT:]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of one token per character; nothing is added to a text."""
    backend = Tokenizer(WordLevel({token: index for index, token in enumerate(VOCABULARY)}, PAD))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=PAD
    )


def model_config() -> Qwen2Config:
    """Returns the architecture: 4 layers of width 128."""
    return Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        bos_token_id=None,
    )


def _learn(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[tuple[int, int]],
    say: Callable[[str], None],
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    draw = random.Random(_SEED)
    model.train()
    for step in range(_STEPS):
        ids_ST, labels_ST = _batch(tokenizer, draw.sample(pairs, _BATCH))
        loss = model(input_ids=ids_ST, labels=labels_ST).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % _SAY_EVERY == 0:
            say(f"addition: supervised start, step {step}/{_STEPS}, loss {loss.item():.3f}")


def _batch(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Returns ids and labels [S, T]; only the answer and its end are learnt."""
    prompts = [tokenizer.encode(f"{left}+{right}=") for left, right in pairs]
    answers = [tokenizer.encode(str(left + right)[::-1]) for left, right in pairs]
    end = [tokenizer.eos_token_id]
    width = max(len(p) + len(a) + 1 for p, a in zip(prompts, answers, strict=True))
    ids_ST = torch.full((len(pairs), width), VOCABULARY.index(PAD))
    labels_ST = torch.full((len(pairs), width), _IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = torch.tensor([*prompt, *answer, *end])
        ids_ST[row, : len(text)] = text
        labels_ST[row, len(prompt) : len(text)] = text[len(prompt) :]
    return ids_ST, labels_ST
