"""How the samples of a step read in a terminal: prompts, completions, and what was said of them."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from flows.progress import number
from flows.samples import ShownGroup, ShownSample, ShownStep
from flows.token_texts import EXTREME, FAR, Piece, is_far
from flows.visible_text import visible, visible_line

COMPACT_PROMPT_LINES = 4
PROMPT_LINES = 20
"""Of a prompt beside samples of other prompts; the middle is left out."""
LISTED_TOKENS = 5
MAX_WHY = 28
AGREEMENT = 0.01
"""Ratios this close to 1 are said as one figure."""
BAR = "┃ "

_DIM = "dim"
_UNLIKELIER = ("black on yellow", "bold white on red")
_LIKELIER = ("black on cyan", "bold white on blue")
"""(far, extreme) styles of tokens that the learner finds less or more likely than the sampler."""
_NOT_SAMPLED = "dim italic"


def print_groups(step: ShownStep, console: Console) -> None:
    """Prints groups one after the other, a line per sample."""
    _print_header(step, console)
    for group in step.groups:
        _print_title(group, console)
        _print_prompt(group, console, max_lines=COMPACT_PROMPT_LINES)
        console.print(_sample_lines(group))
    _print_legend(step, console)
    note = "--group ID: one in full; --worst 5, --best 5: of the whole step"
    console.print(Text(f"{len(step.groups)} of {step.num_groups} groups; {note}", _DIM))


def print_samples(step: ShownStep, console: Console, *, prompt_lines: int | None = None) -> None:
    """Prints samples in full under their prompts, of which so many lines (None: all)."""
    _print_header(step, console)
    for group in step.groups:
        _print_title(group, console)
        _print_prompt(group, console, max_lines=prompt_lines)
        for sample in group.samples:
            _print_sample(sample, console)
    _print_legend(step, console)


def _print_header(step: ShownStep, console: Console) -> None:
    ungraded = f", {step.num_ungraded} without a reward" if step.num_ungraded else ""
    metrics = step.metrics
    console.print(
        Text.assemble(
            (f"{step.run}@{step.step}", "bold"),
            f"  {step.num_groups} groups, {step.num_samples} samples{ungraded}",
            f"  reward {number(metrics.get('reward_mean'))}",
            f"  tokens {number(metrics.get('completion_tokens_mean'), 1)}",
            f"  cut off {number(metrics.get('truncated_share'), 2)}",
        )
    )


def _print_title(group: ShownGroup, console: Console) -> None:
    shown = f"{len(group.samples)} of {group.num_samples} samples"
    facts = [
        *([f"answer {group.answer}"] if group.answer is not None else []),
        f"mean reward {number(group.reward_mean)}",
        *([shown] if len(group.samples) < group.num_samples else []),
    ]
    title = Text(visible_line("  ".join([group.group_id, group.prompt_id or ""])), "bold")
    said = Text(visible_line(" · ".join(facts)), _DIM)
    fits = title.cell_len + said.cell_len + 4 < console.width
    whole = Text.assemble(title, "  ", said) if fits else title
    console.print()
    console.print(Rule(whole, align="left", style=_DIM))
    if not fits:
        console.print(said)


def _print_prompt(group: ShownGroup, console: Console, *, max_lines: int | None) -> None:
    _print_block(Text(visible(group.prompt)), console, bar=_DIM, max_lines=max_lines)


def _print_block(text: Text, console: Console, *, bar: str, max_lines: int | None = None) -> None:
    """Prints text behind a bar; of too many lines the middle is left out."""
    text.rstrip()
    lines = list(text.wrap(console, max(console.width - len(BAR), 1), tab_size=4))
    if max_lines is not None and len(lines) > max_lines:
        half = max_lines // 2
        left_out = Text(f"... {len(lines) - 2 * half} lines ...", style=_DIM)
        lines = [*lines[:half], left_out, *lines[-half:]]
    for line in lines:
        console.print(Text.assemble((BAR, bar), line), no_wrap=True, crop=False)


def _sample_lines(group: ShownGroup) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style=_DIM)
    for name in ("#", "reward", "advantage", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("finish", no_wrap=True)
    table.add_column("completion", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("why", no_wrap=True, overflow="ellipsis", max_width=MAX_WHY)
    for sample in group.samples:
        table.add_row(
            Text(sample.sample_id.rpartition("-")[2], style=_DIM),
            Text(number(sample.reward), style=_colour(sample)),
            Text(_signed(sample.advantage), style=_colour(sample)),
            str(sample.num_tokens),
            _finish(sample),
            _completion(sample, on_one_line=True),
            Text(visible_line("; ".join(_why_in_short(sample))), style=_DIM),
        )
    return table


def _why_in_short(sample: ShownSample) -> list[str]:
    return [
        *([sample.status or "no reward"] if sample.status != "graded" else []),
        *([sample.reason] if sample.reason else []),
        *([f"dropped: {sample.drop_reason}"] if sample.kept is False else []),
    ]


def _print_sample(sample: ShownSample, console: Console) -> None:
    colour = _colour(sample)
    versions = ", ".join(str(version) for version in dict.fromkeys(sample.policy_versions))
    console.print()
    console.print(
        Text.assemble(
            (f"reward {number(sample.reward)}", f"bold {colour}"),
            (f"  advantage {_signed(sample.advantage)}", colour),
            f"  {sample.num_tokens} tokens, ",
            _finish(sample),
            (f"  policy {versions}  {sample.sample_id}", _DIM),
        )
    )
    for line in _why(sample):
        console.print(Text(f"  {visible_line(line)}"))
    completion = _completion(sample, on_one_line=False)
    _print_block(completion if sample.num_tokens else Text("(empty)", _DIM), console, bar=colour)
    if sample.ratio_min is not None and sample.ratio_max is not None:
        ratios = _range(sample.ratio_min, sample.ratio_max)
        console.print(Text("  ".join([ratios, *_listed(sample.pieces)]), style=_DIM))


def _range(low: float, high: float) -> str:
    apart = max(abs(low - 1), abs(high - 1))
    if apart < AGREEMENT:
        return f"learner and sampler agree within {apart:.1g}"
    return f"learner / sampler {low:.3g} to {high:.3g}"


def _listed(pieces: Sequence[Piece]) -> Iterator[str]:
    """Names marked tokens in words, for where no colours are shown."""
    marked = [piece for piece in pieces if piece.ratio is not None]
    marked.sort(key=lambda piece: max(piece.ratio or 1, 1 / (piece.ratio or 1)), reverse=True)
    for piece in marked[:LISTED_TOKENS]:
        yield f'"{visible_line(piece.text)}" x{piece.ratio:.3g} (token {piece.start})'
    if len(marked) > LISTED_TOKENS:
        yield f"and {len(marked) - LISTED_TOKENS} more"


def _why(sample: ShownSample) -> list[str]:
    """Returns what graders and algorithm said of a sample, a line each."""
    told: list[str] = []
    if sample.status != "graded" and not sample.parts:
        told.append(f"{sample.status or 'no reward'}: {sample.reason or 'no reason given'}")
    for part in sample.parts:
        value = number(part["value"]) if part["status"] == "graded" else part["status"]
        weight = "" if part["weight"] == 1 else f" x {part['weight']:g}"
        reason = f": {part['reason']}" if part["reason"] else ""
        told.append(f"{part['name']} {value}{weight}{reason}")
    if sample.kept is False:
        told.append(f"dropped: {sample.drop_reason}")
    return told


def _colour(sample: ShownSample) -> str:
    if sample.status != "graded" or sample.kept is False:
        return "yellow"
    if not sample.advantage:
        return "default"
    return "green" if sample.advantage > 0 else "red"


def _finish(sample: ShownSample) -> Text:
    cut = sample.finish_reason == "length"
    return Text("cut off" if cut else visible_line(sample.finish_reason), "yellow" if cut else "")


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _completion(sample: ShownSample, *, on_one_line: bool) -> Text:
    shown = visible_line if on_one_line else visible
    text = Text()
    for piece in sample.pieces:
        text.append(shown(piece.text), style=_style(piece))
    return text


def _style(piece: Piece) -> str:
    if piece.ratio is None:
        return "" if piece.sampled else _NOT_SAMPLED
    styles = _LIKELIER if piece.ratio > 1 else _UNLIKELIER
    return styles[is_far(piece.ratio, EXTREME)]


def _print_legend(step: ShownStep, console: Console) -> None:
    samples = [sample for group in step.groups for sample in group.samples]
    pieces = [piece for sample in samples for piece in sample.pieces]
    console.print()
    if any(not piece.sampled for piece in pieces):
        console.print(Text.assemble(("text like this", _NOT_SAMPLED), " was not sampled"))
    if not any(piece.ratio is not None for piece in pieces):
        console.print(
            Text(f"no token that learner and sampler see a factor of {FAR:g} apart", _DIM)
        )
        return
    console.print(
        Text.assemble(
            ("marked: a token's probability, learner over sampler  ", _DIM),
            *((f" above {FAR:g} ", _LIKELIER[0]), " ", (f" above {EXTREME:g} ", _LIKELIER[1])),
            "  ",
            *((f" below {1 / FAR:g} ", _UNLIKELIER[0]), " "),
            (f" below {1 / EXTREME:g} ", _UNLIKELIER[1]),
        )
    )
