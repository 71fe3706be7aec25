"""Reads, checks, templates and tokenises all prompts of a run, once, at launch.

Apart from `stage`, because only this needs tokenizers.
"""

import hashlib
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from storage.experience import encode_shard, rows_to_table
from storage.inputs import put_input
from storage.object_store import ObjectStore
from storage.records import PromptInputs, PromptSet, canonical_json, sha256_hex
from storage.schemas import PROMPTS
from tasks.prompts.contract import DatasetConfig, PrepareRequest, PromptsConfig
from tasks.prompts.draw import most_draws
from tasks.prompts.opening import read_rows
from tasks.prompts.rows import Row
from tasks.prompts.tokens import Encode, open_encoder

logger = logging.getLogger(__name__)

NUM_NAMED = 5
"""Dropped prompts that a log line names; all are counted."""


@dataclass(frozen=True)
class _Prompt:
    """A row with its tokens; `prompt_id` is unique in the run."""

    row: Row
    domain: str
    prompt_id: str
    token_ids: list[int]


@dataclass
class _Set:
    """One data set on its way into the store."""

    config: DatasetConfig
    train: list[_Prompt]
    held_out: list[_Prompt]
    dropped: dict[str, int]


def prepare(
    request: PrepareRequest, store: ObjectStore, *, tokenizer_dir: Path, cache: Path
) -> PromptInputs:
    """Stores all prompts of a run as two shards, training and held out, under their digest.

    A second call with the same data writes nothing new. The training shard is ordered by set and
    then by row; the held-out shard is shuffled by the seed across sets, so that its first rows are
    a fair sample. No prompt stands in both, by its tokens.

    Args:
        request: the mixture, the seed that cuts held-out rows, and the longest prompt.
        store: where the shards go.
        tokenizer_dir: the model's directory; its tokenizer and chat template are used.
        cache: a directory for local files.

    Raises:
        ValueError: data are unreadable, empty or malformed (names file and row), the tokenizer
            cannot serve, or a step asks for more groups than there are prompts.
    """
    encode = open_encoder(tokenizer_dir, config=request.config)
    limit = min(request.max_prompt_tokens, request.config.max_prompt_tokens or 1 << 62)
    sets = [
        _load_set(dataset, encode=encode, limit=limit, seed=request.seed)
        for dataset in request.config.datasets
    ]
    _keep_apart(sets)
    _check_batch(request.config, sets)
    train = [prompt for found in sets for prompt in found.train]
    held_out = _shuffled([prompt for found in sets for prompt in found.held_out], seed=request.seed)
    tables = {
        "train.parquet": _table(train, group="undrawn"),
        "held_out.parquet": _table(held_out, group="held-out"),
    }
    return _put(store, tables, [_describe(found) for found in sets], cache=cache)


def _load_set(dataset: DatasetConfig, *, encode: Encode, limit: int, seed: int) -> _Set:
    rows = read_rows(dataset)
    label = dataset.label
    dropped = {reason: count for reason, count in rows.dropped.items() if count}
    train = _encoded(rows.train, encode, domain=label, prefix=label)
    train = _fitting(train, limit=limit, label=label)
    held_out: list[_Prompt] = []
    if rows.held_out is not None:
        # A file of its own may count its ids from the start again.
        held_out = _encoded(rows.held_out, encode, domain=label, prefix=f"{label}/held-out")
        held_out = _fitting(held_out, limit=limit, label=f"{label}, held out")
    too_long = len(rows.train) + len(rows.held_out or []) - len(train) - len(held_out)
    if too_long:
        dropped["too_long"] = too_long
    if dataset.held_out:
        train, held_out = _cut(train, dataset, seed=seed)
    return _Set(config=dataset, train=train, held_out=held_out, dropped=dropped)


def _encoded(rows: Sequence[Row], encode: Encode, *, domain: str, prefix: str) -> list[_Prompt]:
    return [
        _Prompt(row=row, domain=domain, prompt_id=f"{prefix}/{row.row_id}", token_ids=ids_T)
        for row, ids_T in zip(rows, encode(rows), strict=True)
    ]


def _fitting(prompts: list[_Prompt], *, limit: int, label: str) -> list[_Prompt]:
    long = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if long:
        named = "; ".join(
            f"{prompt.row.where} ({len(prompt.token_ids)} tokens)" for prompt in long[:NUM_NAMED]
        )
        more = f"; and {len(long) - NUM_NAMED} more" if len(long) > NUM_NAMED else ""
        logger.warning(
            "data set %s: dropped %d of %d prompts, longer than %d tokens, which leaves no room "
            "for an answer: %s%s",
            *(label, len(long), len(prompts), limit, named, more),
        )
    if len(long) == len(prompts):
        raise ValueError(
            f"Data set {label!r} has no prompt of at most {limit} tokens (of {len(prompts)}). "
            "Raise rollout.max_model_len or prompts.max_prompt_tokens, or lower "
            "rollout.max_tokens."
        )
    return [prompt for prompt in prompts if len(prompt.token_ids) <= limit]


def _cut(
    prompts: list[_Prompt], dataset: DatasetConfig, *, seed: int
) -> tuple[list[_Prompt], list[_Prompt]]:
    if dataset.held_out >= len(prompts):
        raise ValueError(
            f"Data set {dataset.label!r} has {len(prompts)} rows, and held_out asks for "
            f"{dataset.held_out}. Expected some to remain for training: lower held_out."
        )
    chosen = {prompt.prompt_id for prompt in _shuffled(prompts, seed=seed)[: dataset.held_out]}
    return (
        [prompt for prompt in prompts if prompt.prompt_id not in chosen],
        [prompt for prompt in prompts if prompt.prompt_id in chosen],
    )


def _shuffled(prompts: list[_Prompt], *, seed: int) -> list[_Prompt]:
    def key(prompt: _Prompt) -> bytes:
        return hashlib.sha256(f"{seed}/held-out/{prompt.prompt_id}".encode()).digest()

    return sorted(prompts, key=key)


def _keep_apart(sets: list[_Set]) -> None:
    """Drops training prompts that are held out, of whichever set, under whichever id."""
    held_out = {tuple(prompt.token_ids) for found in sets for prompt in found.held_out}
    for found in sets:
        kept = [prompt for prompt in found.train if tuple(prompt.token_ids) not in held_out]
        shared = len(found.train) - len(kept)
        if not shared:
            continue
        found.train, found.dropped = kept, found.dropped | {"held_out": shared}
        logger.warning(
            "data set %s: dropped %d training prompts that are held out too",
            *(found.config.label, shared),
        )
        if not kept:
            raise ValueError(
                f"Every training prompt of data set {found.config.label!r} is held out too. "
                "Expected two different sets of prompts; check held_out_path or held_out_split."
            )


def _check_batch(config: PromptsConfig, sets: list[_Set]) -> None:
    most_K = most_draws([found.config.weight for found in sets], num_groups=config.groups_per_step)
    for found, most in zip(sets, most_K, strict=True):
        if most > len(found.train):
            raise ValueError(
                f"prompts.groups_per_step is {config.groups_per_step}, of which up to {most} come "
                f"from data set {found.config.label!r}, which has {len(found.train)} training "
                "rows. Expected each prompt at most once in a step: lower groups_per_step or the "
                "set's weight, or give it more rows."
            )


def _describe(found: _Set) -> PromptSet:
    return PromptSet(
        name=found.config.label,
        weight=found.config.weight,
        train_rows=len(found.train),
        held_out_rows=len(found.held_out),
        dropped=found.dropped,
    )


def _table(prompts: list[_Prompt], *, group: str) -> pa.Table:
    rows = [
        {
            "prompt_id": prompt.prompt_id,
            "group_id": f"{group}-{index:08d}",
            "domain": prompt.domain,
            "prompt_token_ids": prompt.token_ids,
            "answer": prompt.row.answer,
            "extra": canonical_json(dict(prompt.row.extra)).decode("utf-8", "surrogatepass"),
        }
        for index, prompt in enumerate(prompts)
    ]
    return rows_to_table(rows, schema=PROMPTS)


def _put(
    store: ObjectStore, tables: dict[str, pa.Table], sets: list[PromptSet], *, cache: Path
) -> PromptInputs:
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        files = {name: Path(directory) / name for name in tables}
        for name, path in files.items():
            path.write_bytes(encode_shard(tables[name], schema=PROMPTS))
        stored = put_input(store, files)
    refs = {
        name: ref.model_copy(update={"rows": tables[name].num_rows})
        for name, ref in stored.files.items()
    }
    mixture = {
        "sets": [found.model_dump(mode="json", exclude={"dropped"}) for found in sets],
        "shards": {name: ref.sha256 for name, ref in refs.items()},
    }
    return PromptInputs(
        mixture_digest=sha256_hex(canonical_json(mixture)),
        sets=sets,
        train=refs["train.parquet"],
        held_out=refs["held_out.parquet"],
    )
