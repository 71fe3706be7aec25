"""Templates and tokenizers: what becomes of a prompt before it is stored."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tasks.prompts.contract import PromptsConfig
from tasks.prompts.rows import Row
from tasks.prompts.tokens import open_encoder
from tests.unit.prompts.tiny_tokenizer import save_tokenizer

ANY_SET: list[dict[str, Any]] = [{"kind": "addition"}]


def config(**settings: Any) -> PromptsConfig:
    return PromptsConfig.model_validate({"datasets": ANY_SET, **settings})


def row(prompt: str | list[dict[str, str]]) -> Row:
    return Row(prompt=prompt, answer=None, row_id="1", where="data.jsonl line 1")


def test_t03_a_template_with_bos_gives_exactly_one(bos_tokenizer: Path):
    ids = open_encoder(bos_tokenizer, config=config())([row("hi")])[0]
    tokenizer = AutoTokenizer.from_pretrained(bos_tokenizer)
    text = "<bos><user>hi<assistant>"
    assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 2, "the trap is there"
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "<user>", "h", "i", "<assistant>"]


@pytest.mark.parametrize("bos", [False, True])
def test_t04_all_ways_to_tokenise_a_chat_agree(bos: bool, tmp_path: Path):
    directory = save_tokenizer(tmp_path, bos=bos)
    turns = [{"role": "user", "content": "hi there"}]
    ids = open_encoder(directory, config=config())([row("hi there"), row(turns)])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    direct = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    from_text = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == [direct, direct]
    assert direct == from_text
    assert ids[0].count(0) == int(bos), "the id of <bos> is 0"


@pytest.mark.parametrize("bos", [False, True])
def test_without_a_template_the_text_is_tokenised_as_it_is(bos: bool, tmp_path: Path):
    directory = save_tokenizer(tmp_path, bos=bos, template=None)
    ids = open_encoder(directory, config=config(template=False))([row("37+48=")])[0]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.convert_ids_to_tokens(ids) == list("37+48=")


def test_a_doubled_bos_is_refused_with_its_row(bos_tokenizer: Path):
    encode = open_encoder(bos_tokenizer, config=config(template=False))
    assert len(encode([row("<bos>hi")])[0]) == 3
    with pytest.raises(ValueError, match=r"line 1: the prompt starts with two '<bos>' tokens"):
        encode([row("<bos><bos>hi")])


@pytest.mark.parametrize(
    ("system", "prompt", "expected"),
    [
        (None, "a", "<user>a<assistant>"),
        ("", "a", "<system><user>a<assistant>"),
        ("be", "a", "<system>be<user>a<assistant>"),
        (
            "be",
            [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}],
            "<system>own<user>a<assistant>",
        ),
        (
            None,
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ],
            "<user>a<assistant>b<user>c<assistant>",
        ),
    ],
)
def test_the_system_turn_comes_first_and_once(
    plain_tokenizer: Path, system: str | None, prompt: Any, expected: str
):
    ids = open_encoder(plain_tokenizer, config=config(system_prompt=system))([row(prompt)])[0]
    assert "".join(AutoTokenizer.from_pretrained(plain_tokenizer).convert_ids_to_tokens(ids)) == (
        expected
    )


def test_turns_without_a_template_are_refused(plain_tokenizer: Path):
    encode = open_encoder(plain_tokenizer, config=config(template=False))
    with pytest.raises(ValueError, match=r"line 1: the prompt is a list of turns"):
        encode([row([{"role": "user", "content": "a"}])])


def test_a_prompt_of_unknown_characters_is_refused(plain_tokenizer: Path):
    encode = open_encoder(plain_tokenizer, config=config(template=False))
    with pytest.raises(ValueError, match=r"line 1: the prompt has no tokens"):
        encode([row("你好")])


def test_turns_that_the_template_refuses_are_named(tmp_path: Path):
    refusing = "{{ raise_exception('no system turn') if messages[0]['role'] == 'system' }}"
    directory = save_tokenizer(tmp_path, bos=False, template=refusing)
    encode = open_encoder(directory, config=config(system_prompt=""))
    with pytest.raises(ValueError, match=r"\['system', 'user'\]: no system turn"):
        encode([row("a")])


def test_a_missing_template_is_named(tmp_path: Path):
    directory = save_tokenizer(tmp_path, bos=False, template=None)
    with pytest.raises(ValueError, match=r"has no chat template.*prompts.template=false"):
        open_encoder(directory, config=config())


def test_a_directory_without_tokenizer_is_named_in_one_line(tmp_path: Path):
    with pytest.raises(ValueError, match="has no tokenizer that can be read") as caught:
        open_encoder(tmp_path, config=config())
    assert "\n" not in str(caught.value)


def test_a_system_prompt_without_template_is_refused():
    with pytest.raises(ValueError, match=r"prompts.system_prompt needs prompts.template"):
        config(template=False, system_prompt="")
