"""Samples with vLLM in this process, from weights that it has proven to hold.

Loads torch and vLLM, whose libraries read the environment as they load: `engine.start` sets that
up and then imports this file. The GPU path is not yet run on a GPU.

`R` probe rows, `T` tokens of a row, `G` completions of a group.
"""

import gc
import json
import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm import LLM, ModelRegistry, RequestOutput, SamplingParams, TokensPrompt
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform

from storage.policies import policy_digest
from storage.records import PolicyRef, Probe, SamplingPolicy, WeightProof
from tasks.errors import Permanent
from tasks.rollout.contract import (
    Completion,
    FinishedGroup,
    GivenCompletion,
    PromptGroup,
    RolloutConfig,
    max_new_tokens,
)
from tasks.rollout.proof import UNPROVEN, NextToken, ProbeReading, Proven, prove

CPU_BLOCK_TOKENS = 32
"""Tokens of a cache block: the least that vLLM's CPU kernels like, so that short prompts share."""

MIN_BATCHED_TOKENS = 8192
"""Least token budget of one engine step; part of what the bits depend on."""

MIN_TEMPERATURE = 0.01
"""vLLM raises any temperature between 0 and this to this, without an error."""

NEXT_CANDIDATES = 4
"""How many of its best tokens the engine reports after a probe row, so that ties can be seen."""

NOISY_LOGGERS = (
    # At every reload, layers that store no weights of their own; the probe tells better.
    "vllm.model_executor.model_loader.reload.layerwise",
    # At the start, a traceback because no tokenizer is there to warm up.
    "vllm.renderers.base",
)
"""What of vLLM warns about things that are as they should be."""


def open_engine(config: RolloutConfig, *, model_dir: Path) -> "VllmEngine":
    """Starts vLLM without weights, within the limits of `config`."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    _import_model_class(model_dir)
    llm = LLM(str(model_dir), **_limits(config), **_platform_limits(config))
    threads = torch.get_num_threads()
    if current_platform.is_cpu() and threads != config.threads:
        raise Permanent(
            f"The rollout engine runs {threads} threads, expected {config.threads}: results "
            "depend on it. Start it in a fresh process without thread settings of its own."
        )
    return VllmEngine(llm, config)


def _import_model_class(model_dir: Path) -> None:
    """Imports the model's class here, once.

    Otherwise vLLM asks a second process about it, which imports everything again (10 s and more)
    only to keep CUDA untouched before a fork that one process never makes.
    """
    config = json.loads((model_dir / "config.json").read_text())
    for architecture in config.get("architectures") or []:
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def _limits(config: RolloutConfig) -> dict[str, Any]:
    return {
        # Config only; every set of weights comes by `load`.
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": config.dtype,
        "enforce_eager": config.enforce_eager,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        # A seeded request whose prefill is cut crashes vLLM 0.32 on CPU ("CPU Generator does not
        # use offset"), so prefills are never cut and the budget holds the longest one.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(
            config.max_model_len, config.max_num_seqs, MIN_BATCHED_TOKENS
        ),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
        "disable_log_stats": True,
    }


def _platform_limits(config: RolloutConfig) -> dict[str, Any]:
    if not current_platform.is_cpu():
        return {"gpu_memory_utilization": config.gpu_memory_fraction}
    return {
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "block_size": CPU_BLOCK_TOKENS,
        "distributed_executor_backend": "uni",
    }


class VllmEngine:
    """A warm vLLM, keyed by the digest of the policy that it has proven to hold.

    For one thread: the one that started it.
    """

    def __init__(self, llm: LLM, config: RolloutConfig) -> None:
        self._llm: LLM | None = llm
        self._config = config
        self._proof: WeightProof | None = None
        self._previous: Proven | None = None
        self._num_steps = 0
        self._count_steps(llm)

    @property
    def config(self) -> RolloutConfig:
        """What the engine was started with."""
        return self._config

    @property
    def proof(self) -> WeightProof | None:
        """How the engine showed what it holds, or None."""
        return self._proof

    @property
    def policy_digest(self) -> str | None:
        """What the engine holds and has proven, or None."""
        return self._proof.policy_digest if self._proof else None

    def progress(self) -> int:
        """Returns how many steps of vLLM's scheduler this engine has made."""
        return self._num_steps

    def serves(self) -> tuple[int, str] | None:
        """Returns version and digest of the proven policy."""
        proof = self._proof
        return (proof.policy_version, proof.policy_digest) if proof else None

    def environment(self) -> dict[str, str]:
        """Returns what the bits depend on besides the request and the installed packages."""
        if current_platform.is_cpu():
            return {"device": "cpu", "instructions": torch.backends.cpu.get_cpu_capability()}
        return {"device": current_platform.get_device_name()}

    def load(self, policy: PolicyRef, *, directory: Path, probe: Probe) -> WeightProof:
        """Loads the safetensors in `directory` and proves them against `probe`.

        After an error the engine holds nothing and refuses to sample.

        Raises:
            Permanent: other tensors than `policy` names, or the engine does not reproduce the
                learner's logprobs.
        """
        self._proof = None
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as hasher:
            # Beside the swap, because it costs as long as reading the weights.
            digest = hasher.submit(policy_digest, directory)
            self._swap(policy, directory)
            reading = self._read(probe)
        # Whatever comes of it, this is what the engine's weights say now.
        previous, self._previous = self._previous, Proven(UNPROVEN, reading)
        if digest.result() != policy.digest:
            raise Permanent(
                f"The tensors in {directory} have digest {digest.result()}. Expected "
                f"{policy.digest}, policy {policy.version}. The engine holds nothing now. Remove "
                "the directory from the cache and run again."
            )
        proof = prove(
            policy,
            probe=probe,
            reading=reading,
            previous=previous,
            dtype=self._config.dtype,
            tolerance=self._config.probe_tolerance,
        )
        self._previous = Proven(policy.digest, reading)
        self._proof = proof
        return proof

    def submit(
        self, groups: Sequence[PromptGroup], *, sampling: SamplingPolicy
    ) -> Iterator[FinishedGroup]:
        """Samples all groups in one call, in their order, so that bits follow the request.

        Raises:
            Permanent: no proven policy is held.
            ValueError: a prompt leaves no room for an answer, or the temperature is not usable.
        """
        prompts = [TokensPrompt(prompt_token_ids=group.prompt_token_ids) for group in groups]
        params = [sampling_params(group, sampling, config=self._config) for group in groups]
        outputs = self._generate(prompts, params)
        return iter([_finished(*pair) for pair in zip(groups, outputs, strict=True)])

    def score(
        self, completions: Sequence[GivenCompletion], *, temperature: float
    ) -> list[list[float]]:
        """Returns each completion's logprobs, teacher-forced: one forward pass, nothing sampled.

        Raises:
            Permanent: no proven policy is held.
        """
        possible = [one for one in completions if self._is_possible(one)]
        prompts = [
            TokensPrompt(prompt_token_ids=[*one.prompt_token_ids, *one.token_ids[:-1]])
            for one in possible
        ]
        # The last token is scored as one that might come next: as a prompt's last one, it would
        # find no room behind it in a full context.
        params = [_scoring(logprob_token_ids=one.token_ids[-1:]) for one in possible]
        with divided_logits(self._engine(), temperature or 1.0):
            outputs = self._generate(prompts, params)
        scored = iter([_scores(*pair) for pair in zip(possible, outputs, strict=True)])
        return [
            next(scored) if self._is_possible(one) else [-math.inf] * len(one.token_ids)
            for one in completions
        ]

    def close(self) -> None:
        """Ends vLLM and frees its memory; the engine is of no use afterwards."""
        self._proof = None
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()

    def _count_steps(self, llm: LLM) -> None:
        step = llm.llm_engine.step

        def counted() -> Any:
            self._num_steps += 1
            return step()

        # vLLM's offline API calls nothing of ours between two steps.
        llm.llm_engine.step = counted  # type: ignore[method-assign]

    def _generate(
        self, prompts: list[TokensPrompt], params: list[SamplingParams]
    ) -> list[RequestOutput]:
        """Runs one call of vLLM that no earlier one can have left a trace in."""
        if self._proof is None:
            raise Permanent(
                "The rollout engine holds no proven policy and will not sample. Load one first."
            )
        held, self._proof = self._proof, None
        # A prefix that an earlier call computed in another batch has other last bits.
        self._forget_prefixes()
        outputs = self._engine().generate(prompts, params, use_tqdm=False) if prompts else []
        # Not reached after an error: vLLM may then still hold requests, so the engine is no good.
        self._proof = held
        return outputs

    def _is_possible(self, completion: GivenCompletion) -> bool:
        ids = [*completion.prompt_token_ids, *completion.token_ids]
        vocabulary = self._engine().llm_engine.model_config.get_vocab_size()
        if not (completion.prompt_token_ids and completion.token_ids):
            return False
        fits = len(ids) <= self._config.max_model_len
        return fits and min(ids) >= 0 and max(ids) < vocabulary

    def _engine(self) -> LLM:
        if self._llm is None:
            raise Permanent("The rollout engine is closed. Start another.")
        return self._llm

    def _swap(self, policy: PolicyRef, directory: Path) -> None:
        llm = self._engine()
        weights = {"weights_iterator": stored_tensors(directory)}
        try:
            llm.collective_rpc("reload_weights", kwargs=weights)
        except Exception as error:
            # vLLM has no error class of its own for this: KeyError, ValueError, AssertionError...
            raise Permanent(
                f"vLLM could not load policy {policy.version} ({policy.digest[:12]}): "
                f"{type(error).__name__}: {error}. Expected the tensors of the model that the "
                "engine was started with. The engine holds nothing now; start it again."
            ) from error
        if current_platform.is_cpu():
            llm.apply_model(repack_tied_head)
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        if not self._engine().reset_prefix_cache():
            raise Permanent(
                "vLLM did not empty its prefix cache, so requests of a failed call still run. The "
                "engine holds nothing now; start it again."
            )

    def _read(self, probe: Probe) -> ProbeReading:
        """Decodes after every probe row the way samples are drawn, then scores the rows.

        In this order, because scoring fills the prefix cache that decoding must find empty.
        """
        prompts = [TokensPrompt(prompt_token_ids=row) for row in probe.token_ids]
        decode = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=NEXT_CANDIDATES,
            ignore_eos=True,
            detokenize=False,
        )
        decoded = self._engine().generate(prompts, decode, use_tqdm=False)
        scored = self._engine().generate(prompts, _scoring(), use_tqdm=False)
        return ProbeReading(
            logprobs_R_T=[_prompt_logprobs(output) for output in scored],
            next_R=[_next_token(*pair) for pair in zip(decoded, probe.next_token_ids, strict=True)],
        )


@contextmanager
def divided_logits(llm: LLM, temperature: float) -> Iterator[None]:
    """Divides all logits within the block, as the sampler does.

    vLLM 0.32 scores prompts at temperature 1, whatever `logprobs_mode` says.
    """

    def divide(model: Any) -> None:
        plain = model.compute_logits
        model.compute_logits = lambda *states: plain(*states).float() / temperature

    def restore(model: Any) -> None:
        del model.compute_logits

    llm.apply_model(divide)
    try:
        yield
    finally:
        llm.apply_model(restore)


def stored_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of the safetensors in `directory`, mapped from the file, not copied."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                yield name, file.get_tensor(name)


def repack_tied_head(model: torch.nn.Module) -> None:
    """Rebuilds the packed copy of a tied output head, which vLLM 0.32 leaves stale on CPU.

    `reload_weights` repacks the layers that it loads; a tied head shares the embedding's weight
    and is never loaded itself.
    """
    embeddings = [
        module.weight
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    for head in model.modules():
        if isinstance(head, ParallelLMHead) and any(head.weight is each for each in embeddings):
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def sampling_params(
    group: PromptGroup, sampling: SamplingPolicy, *, config: RolloutConfig
) -> SamplingParams:
    """Returns vLLM's words for `sampling`, every field that matters given.

    Raises:
        ValueError: the prompt leaves no room for an answer, or the temperature is not usable.
    """
    _check_temperature(sampling)
    room = max_new_tokens(group, sampling, config=config)
    if room < 1 or not group.prompt_token_ids:
        raise ValueError(
            f"Prompt group {group.group_id} has {len(group.prompt_token_ids)} prompt tokens. "
            f"Expected 1 to {config.max_model_len - 1} (rollout.max_model_len less one)."
        )
    return SamplingParams(
        n=sampling.group_size,
        seed=group.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        max_tokens=room,
        min_tokens=0,
        stop_token_ids=list(sampling.stop_token_ids),
        # The stop ids are given; what the model's files call an end is not asked again.
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        skip_special_tokens=False,
    )


def _check_temperature(sampling: SamplingPolicy) -> None:
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"Temperature {sampling.temperature} is below what vLLM samples at. Expected 0 "
            f"(greedy) or at least {MIN_TEMPERATURE}."
        )
    if sampling.temperature == 0 and sampling.group_size > 1:
        raise ValueError(
            f"Greedy sampling (temperature 0) of {sampling.group_size} completions would draw the "
            "same one each time. Expected group_size 1."
        )


def _finished(group: PromptGroup, output: RequestOutput) -> FinishedGroup:
    assert output.prompt_token_ids == group.prompt_token_ids, "outputs come in request order"
    ordered_G = sorted(output.outputs, key=lambda one: one.index)
    return FinishedGroup(group=group, completions=[_completion(one) for one in ordered_G])


def _completion(output: CompletionOutput) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion with {output.finish_reason!r}.")
    assert output.logprobs is not None
    token_ids = list(output.token_ids)
    by_position = [at for at in output.logprobs if at is not None]
    stopped = output.finish_reason == "stop"
    return Completion(
        token_ids=token_ids,
        # By id: the first entry of a position's map is not always the sampled token.
        logprobs=[at[token].logprob for at, token in zip(by_position, token_ids, strict=True)],
        finish_reason=output.finish_reason,
        stop_token_id=token_ids[-1] if stopped else None,
    )


def _prompt_logprobs(output: RequestOutput) -> list[float]:
    assert output.prompt_logprobs is not None
    assert output.prompt_token_ids is not None
    pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return [at[token].logprob for at, token in pairs if at is not None]


def _scoring(logprob_token_ids: list[int] | None = None) -> SamplingParams:
    """Returns vLLM's words for scoring a prompt, and perhaps one token that might come next."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        logprob_token_ids=logprob_token_ids,
        ignore_eos=True,
        detokenize=False,
    )


def _scores(completion: GivenCompletion, output: RequestOutput) -> list[float]:
    start = len(completion.prompt_token_ids) - 1
    next_logprobs = output.outputs[0].logprobs
    assert next_logprobs is not None
    last = next_logprobs[0][completion.token_ids[-1]].logprob
    return [*_prompt_logprobs(output)[start:], last]


def _next_token(output: RequestOutput, learner_token_id: int) -> NextToken:
    decoded = output.outputs[0]
    assert decoded.logprobs is not None
    candidates = decoded.logprobs[0]
    learner = candidates.get(learner_token_id)
    return NextToken(
        token_id=decoded.token_ids[0],
        logprob=candidates[decoded.token_ids[0]].logprob,
        learner_logprob=None if learner is None else learner.logprob,
        num_cached_tokens=output.num_cached_tokens or 0,
    )
