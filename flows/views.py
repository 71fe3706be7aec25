"""The views that `rollbook sql` offers, as DuckDB statements over the lazy tables of `storage`.

Every derived column costs only the query that names it.
"""

import pyarrow as pa

from storage.policy_tables import POLICIES
from storage.sample_tables import EVAL_SAMPLE_ROWS, POOL_ROWS, PROMPT_ROWS, SAMPLE_ROWS
from storage.tables import EVALS, RUNS, STEPS

SCHEMAS: dict[str, pa.Schema] = {
    "samples": SAMPLE_ROWS,
    "steps": STEPS,
    "prompts": PROMPT_ROWS,
    "policies": POLICIES,
    "evals": EVALS,
    "eval_samples": EVAL_SAMPLE_ROWS,
    "pool": POOL_ROWS,
    "runs": RUNS,
}
"""What lies below each view, registered under the view's name with `stored_` before it."""

MEANINGS = {
    "samples": "a row per sample: what sampler, graders and algorithm said, and what was asked",
    "steps": "a row per commit: its figures as columns, all of them in the map `metrics`",
    "prompts": "a row per prompt group of a step",
    "policies": "a row per policy version: size, snapshot, and whether the files are still there",
    "evals": "a row per evaluated version and suite: accuracy with its 95% interval",
    "eval_samples": "a row per sample of an evaluation",
    "pool": "a row per prompt that a run can draw (split train) or be measured by (held_out)",
    "runs": "a row per run: recipe, parent of a fork, config as JSON",
}

STEP_METRICS = (
    "reward_mean",
    "reward_std",
    "accuracy",
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "clip_fraction",
    "logprob_gap_mean",
    "rollout_kl",
    "ratio_max",
    "completion_tokens_mean",
    "completion_tokens",
    "truncated_share",
    "zero_std_share",
    "num_samples",
    "num_graded",
    "samples_kept",
    "samples_dropped",
    "plan_s",
    "rollout_s",
    "reward_s",
    "train_s",
)
"""Metrics that are columns of `steps`; null where a step has none of that name."""

_GAPS = """list_transform(
    list_zip(learner_logprobs, rollout_logprobs), lambda pair: pair[1] - pair[2])"""
_VERSION = "list_min(list_transform(version_spans, lambda span: span.policy_version))"
_TEXTS = """
    text_of(run, prompt_token_ids) as prompt,
    text_of(run, completion_token_ids) as completion,
    len(prompt_token_ids) as prompt_tokens,
    len(completion_token_ids) as completion_tokens"""
_SAMPLER = """
    prompt_token_ids, completion_token_ids, completion_mask, rollout_logprobs, stop_token_id,
    seed, temperature, top_p, top_k, max_tokens, version_spans"""

VIEWS = {
    "samples": f"""
        select run, step, shard, sample_id, group_id, sample_index, prompt_id, domain, answer,
            reward, status, reward_reason, parts, advantage, kept, drop_reason, finish_reason,
            {_TEXTS}, {_VERSION} as policy_version, step - 1 - {_VERSION} as staleness,
            list_avg({_GAPS}) as logprob_gap_mean,
            list_max(list_transform({_GAPS}, lambda gap: abs(gap))) as logprob_gap_max,
            learner_logprobs, {_SAMPLER}, extra
        from stored_samples""",
    "steps": f"""
        select run, step, kind, policy_version, committed_at,
            {", ".join(f"metrics['{name}'] as {name}" for name in STEP_METRICS)},
            metrics, prompts_drawn, policy_digest, revision, reason, rebased_steps,
            rebased_max_abs_diff, parent_run, signed_by, state_id, attempt, previous, digest
        from stored_steps""",
    "prompts": """
        select run, step, group_id, prompt_id, domain, answer,
            text_of(run, prompt_token_ids) as prompt, len(prompt_token_ids) as prompt_tokens,
            prompt_token_ids, extra
        from stored_prompts""",
    "policies": "select * from stored_policies",
    "evals": "select * from stored_evals",
    "eval_samples": f"""
        select run, version, suite, shard, sample_id, group_id, sample_index, prompt_id, domain,
            answer, reward, status, reward_reason, parts, finish_reason, {_TEXTS}, {_SAMPLER},
            extra
        from stored_eval_samples""",
    "pool": """
        select run, split, prompt_id, domain, answer,
            text_of(run, prompt_token_ids) as prompt, len(prompt_token_ids) as prompt_tokens,
            prompt_token_ids, extra
        from stored_pool""",
    "runs": "select * from stored_runs",
}
