"""Character tokenizers that are made on the spot."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<bos>", "<eos>", "<user>", "<system>", "<assistant>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
TEMPLATE = "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}{% endfor %}"


def save_tokenizer(directory: Path, *, bos: bool, template: str | None = TEMPLATE) -> Path:
    """Writes a tokenizer; with `bos`, both its template and its post-processor put a BOS."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>" if bos else None,
        eos_token="<eos>",
        additional_special_tokens=SPECIAL[2:],
    )
    if template is not None:
        fast.chat_template = (
            ("{{ bos_token }}" if bos else "")
            + template
            + ("{% if add_generation_prompt %}<assistant>{% endif %}")
        )
    fast.save_pretrained(directory)
    return directory
