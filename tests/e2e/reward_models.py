"""Makes a tiny classifier and a tiny chat model, and says what transformers computes.

`python reward_models.py OUT TEXTS`, in the engines' environment: writes `OUT/classifier`,
`OUT/chat` and `OUT/logits.json`, one row per text of the JSON list in the file TEXTS and a last
one for the turns `TURNS`.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

CHAT_TEMPLATE = (
    "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that any text has one and every JSON can be written."""
    symbols = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    bare = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token="<end>")
    made.chat_template = CHAT_TEMPLATE
    return made


def main() -> None:
    out, texts = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    words = tokenizer()
    config = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    torch.manual_seed(1)
    classifier = Qwen2ForSequenceClassification(Qwen2Config(**config, num_labels=2)).eval()
    for name, model in (
        ("classifier", classifier),
        ("chat", Qwen2ForCausalLM(Qwen2Config(**config))),
    ):
        model.float().save_pretrained(out / name)
        words.save_pretrained(out / name)
    rendered = words.apply_chat_template(TURNS, tokenize=False)
    rows = [words(text, return_tensors="pt")["input_ids"] for text in [*texts, rendered]]
    with torch.no_grad():
        logits = [classifier(input_ids=ids).logits[0].tolist() for ids in rows]
    (out / "logits.json").write_text(json.dumps(logits))


if __name__ == "__main__":
    main()
