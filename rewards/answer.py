"""Finds the final answer of a completion: the last marked one, never inside `<think>`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rewards.contract import RewardInput, Score, ScorerConfig

Mark = Literal["box", "tag", "line"]

NO_FINAL_ANSWER = "no_final_answer"

_THINK = re.compile(r"</?think>")
_TOKEN = re.compile(
    r"\\(?:boxed|fbox|framebox)\s*\{|\\.|[{}]|<\s?(/?)\s?answer\s?>", re.DOTALL | re.IGNORECASE
)
_LINE_NOISE = " \t#*_>`-"
_RULE = re.compile(r"\s*(?:[-*_=]\s?){3,}$")
_BULLET = re.compile(r"[-*+•]\s+(?=\S)")
_DISPLAYS = (("$$", "$$"), ("\\[", "\\]"))
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n\s*\n")
_OR = re.compile(r"\bor\b", re.IGNORECASE)


class AnswerConfig(ScorerConfig):
    """Which marks count as a final answer."""

    marks: tuple[Mark, ...] = ("box", "tag", "line")
    r"""`box`: `\boxed{...}`; `tag`: `<answer>...</answer>`; `line`: a line that starts with
    `line_prefix`."""
    line_prefix: str = "Final answer"
    """How the recipe's format opens the answer line; case and Markdown around it are ignored."""


class TextConfig(AnswerConfig):
    """The same, for functions that can do without marks."""

    whole: bool = False
    """Read the whole completion outside `<think>` as the answer, for tasks whose output it is."""


@dataclass(frozen=True)
class Answer:
    """A marked answer; `alternatives` holds all candidates if it was offered as "a or b"."""

    text: str
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Marked:
    start: int
    end: int
    text: str


def final_answer(item: RewardInput, config: AnswerConfig) -> Answer | None:
    """Returns the last marked answer outside the thinking, or None if nothing is marked.

    If a tag and a box disagree, the one that begins last counts. An unclosed box or tag is no
    mark; the last number of a text is never taken instead. Linear in the length of the text.
    """
    text = visible_text(item.completion, prompt=item.prompt)
    marked = sorted(_all_marked(text, config), key=lambda mark: mark.start)
    if not marked:
        return None
    last = marked.pop()
    candidates = [last.text]
    for mark in reversed(marked):
        between = text[mark.end : last.start]
        if mark.end > last.start or not _joins_alternatives(between):
            break
        candidates.append(mark.text)
        last = mark
    different = len(set(candidates)) > 1
    return Answer(candidates[0], tuple(reversed(candidates)) if different else ())


def answer_text(item: RewardInput, config: AnswerConfig) -> str | Score:
    """Returns the final answer's text, or the zero of a completion that has none or several."""
    found = final_answer(item, config)
    if found is None:
        return Score(0.0, reason=NO_FINAL_ANSWER)
    return Score(0.0, reason="hedged") if found.alternatives else found.text


def answer_or_whole(item: RewardInput, config: TextConfig) -> str | Score:
    """Returns what `answer_text` does, or with `whole` what stands outside `<think>`."""
    if config.whole:
        return visible_text(item.completion, prompt=item.prompt)
    return answer_text(item, config)


def visible_text(completion: str, *, prompt: str | None = None) -> str:
    """Returns what stands outside `<think>`; an unclosed one hides all that follows.

    A chat template may have opened the thinking in the prompt: then, and also where a
    `</think>` comes without its opening, what stands before it is thought.
    """
    opened = [tag.group() for tag in _THINK.finditer(prompt or "")]
    thinking = bool(opened) and opened[-1] == "<think>"
    visible: list[str] = []
    position = 0
    for tag in _THINK.finditer(completion):
        if tag.group() == "<think>":
            if not thinking:
                visible.append(completion[position : tag.start()])
            thinking = True
        else:
            if not thinking:
                visible.clear()
            thinking = False
            position = tag.end()
    if not thinking:
        visible.append(completion[position:])
    return "\n".join(visible)


def _all_marked(text: str, config: AnswerConfig) -> Iterator[_Marked]:
    yield from _bracketed(text, config)
    if "line" in config.marks:
        yield from _lines(text, config.line_prefix)


def _bracketed(text: str, config: AnswerConfig) -> Iterator[_Marked]:
    """Yields closed boxes and tags in one pass; braces are matched, escaped ones skipped."""
    braces: list[tuple[bool, int, int]] = []
    tag: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text):
        word = token.group()
        if word[0] == "<" and not token[1]:
            tag = token.span()
        elif word[0] == "<":
            if tag is not None and "tag" in config.marks:
                yield _Marked(tag[0], token.end(), text[tag[1] : token.start()].strip())
            tag = None
        elif word == "}":
            if braces:
                is_box, start, inner = braces.pop()
                if is_box and "box" in config.marks:
                    yield _Marked(start, token.end(), text[inner : token.start()].strip())
        elif word.endswith("{") and word != "\\{":
            braces.append((len(word) > 1, *token.span()))


def _lines(text: str, prefix: str) -> Iterator[_Marked]:
    """Yields the rest of each line that opens with the prefix, or what stands below its heading."""
    # A prefix like `####` ends in no word, so nothing keeps it apart from what follows.
    end = r"\b" if prefix[-1:].isalnum() else ""
    opening = re.compile(
        rf"^(?:\d+[.)])?[^\w\n\\$(<]*{re.escape(prefix)}{end}(?:[ \t]+is\b)?[ \t]*[:*_#]*",
        re.I | re.M,
    )
    for match in opening.finditer(text):
        end = _line_end(text, match.end())
        content = text[match.end() : end]
        if not content.strip(_LINE_NOISE + ":"):
            content, end = _below(text, end)
        content = content.strip(_LINE_NOISE.replace("-", "") + ":")
        if content.count("**") % 2:  # One of the pair was stripped, or stands before the prefix.
            content = content.replace("**", "")
        if content:
            yield _Marked(match.start(), end, content)


def _below(text: str, position: int) -> tuple[str, int]:
    """Returns the first line that says something, a displayed formula as a whole, and its end."""
    for _ in range(10):
        found = re.compile(r"\S").search(text, position)
        if found is None:
            return "", position
        for opening, closing in _DISPLAYS:
            close = text.find(closing, found.start() + 2)
            if text.startswith(opening, found.start()) and close >= 0:
                return text[found.start() + 2 : close].strip(), close + 2
        end = _line_end(text, found.start())
        line = text[found.start() : end]
        if not _RULE.fullmatch(line):
            return _BULLET.sub("", line, count=1) if _BULLET.match(line) else line, end
        position = end
    return "", position


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _joins_alternatives(between: str) -> bool:
    return bool(_OR.search(between)) and not _SENTENCE_END.search(between)
