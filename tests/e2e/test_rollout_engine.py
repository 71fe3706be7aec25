"""Real vLLM: weights are proven before the first sample, and samples are what was drawn."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from tests.e2e.rollout_lab import Child, EngineSaid, Stored, child, make_models, put_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STOP = 1
SAMPLING = {"group_size": 4, "temperature": 1.0, "max_tokens": 8, "stop_token_ids": [STOP]}
GREEDY = {"temperature": 0.0, "group_size": 1}
GROUPS = [[f"g{row}", [3 + row, 20, 7 + row], 1000 + 4 * row] for row in range(16)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all children, as on a user's machine."""
    return tmp_path_factory.getbasetemp() / "rollout-home"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.getbasetemp() / "rollout-models")


@pytest.fixture(scope="module")
def tied(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return put_model(models, "llama-tied", uri=tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def warm(tied: Stored, home: Path) -> Iterator[Child]:
    with child(tied, home) as engine:
        yield engine


@pytest.fixture
def engine(warm: Child) -> Iterator[Child]:
    """The warm engine, holding policy v1."""
    warm.load("v1")
    yield warm
    warm("repair")


def test_weights_of_another_policy_are_refused_by_digest(engine: Child) -> None:
    with pytest.raises(EngineSaid, match=r"Permanent: The tensors in .* Expected .*, policy 2"):
        engine.load("other", claimed="v2")
    assert engine("holds") is None


def test_weights_one_update_away_are_refused_by_the_probe_alone(engine: Child) -> None:
    engine.load("other")
    engine("claim_digest", digest=engine.stored.policies["v2"].digest)
    with pytest.raises(EngineSaid, match=r"does not hold policy 2 .* Expected at most 0.001"):
        engine.load("v1", claimed="v2")


def test_s20_a_stale_tied_head_is_refused(engine: Child) -> None:
    engine("sabotage", what="tied head")
    with pytest.raises(EngineSaid, match=r"does not hold policy \d .* differ from the learner's"):
        engine.load("other")


def test_a_stale_prefix_cache_is_refused(engine: Child) -> None:
    engine("sabotage", what="prefix cache")
    with pytest.raises(EngineSaid, match="read 32 tokens from the prefix cache"):
        engine.load("v2")


def test_the_head_is_repacked_and_the_cache_emptied_after_each_reload(engine: Child) -> None:
    proofs = [engine.load(version) for version in ("v2", "other", "v1")]
    assert [proof["kind"] for proof in proofs] == ["exact"] * 3
    assert max(proof["max_abs_diff"] for proof in proofs) < 5e-5


def test_s29_a_reload_that_changed_nothing_is_refused(engine: Child) -> None:
    engine("sabotage", what="swap")
    with pytest.raises(EngineSaid, match="does not hold policy 2"):
        engine.load("v2")


def test_s29_an_engine_whose_reload_failed_does_not_sample_and_recovers(engine: Child) -> None:
    with pytest.raises(EngineSaid):
        engine.load("other", claimed="v2")
    with pytest.raises(EngineSaid, match="Permanent: The rollout engine holds no proven policy"):
        engine("submit", groups=GROUPS, sampling=SAMPLING)
    engine.load("v1")
    assert len(engine("submit", groups=GROUPS[:1], sampling=SAMPLING)[0]) == 4


def test_weights_of_another_shape_are_refused_and_the_engine_recovers(
    engine: Child, models: Path
) -> None:
    policy = engine.stored.policies["v1"].model_dump(mode="json")
    foreign = str(models / "qwen2-untied" / "v1")
    with pytest.raises(EngineSaid, match=r"Permanent: .*The engine holds nothing now"):
        engine("load", policy=policy, directory=foreign, probe=engine.stored.probe("v1"))
    assert engine.load("v1")["kind"] == "exact"


def test_samples_after_v1_v2_v1_are_those_of_v1_to_the_bit(engine: Child) -> None:
    before = engine("submit", groups=GROUPS, sampling=SAMPLING)
    engine.load("v2")
    between = engine("submit", groups=GROUPS, sampling=SAMPLING)
    engine.load("v1")
    assert engine("submit", groups=GROUPS, sampling=SAMPLING) == before
    assert between != before


def test_an_earlier_call_leaves_no_trace_in_the_next(engine: Child) -> None:
    long = [["long", [5] * 70, 1]]
    alone = engine("submit", groups=long, sampling=SAMPLING)
    engine("submit", groups=[["other", [5] * 69 + [6], 9], *GROUPS], sampling=SAMPLING)
    assert engine("submit", groups=long, sampling=SAMPLING) == alone


def test_logprobs_carry_the_temperature_and_agree_with_the_learner(engine: Child) -> None:
    sampling = SAMPLING | {"temperature": 0.6}
    groups = engine("submit", groups=GROUPS, sampling=sampling)
    rows = [
        {"prompt": prompt, "completion": one["token_ids"], "rollout": one["logprobs"]}
        for (_, prompt, _), completions in zip(GROUPS, groups, strict=True)
        for one in completions
    ]
    weights = str(engine.stored.directory / "v1")
    learner = engine("learner", weights=weights, rows=rows, temperature=0.6)
    differences = [
        abs(ours - theirs)
        for row, theirs_T in zip(rows, learner, strict=True)
        for ours, theirs in zip(row["rollout"], theirs_T, strict=True)
    ]
    assert len(differences) > 256
    assert fmean(differences) < 1e-5
    assert max(differences) < 2e-4


def test_logprobs_are_those_of_the_sampled_tokens_not_of_the_likeliest(engine: Child) -> None:
    groups = engine("submit", groups=GROUPS, sampling=SAMPLING)
    best = engine("submit", groups=GROUPS, sampling=SAMPLING | GREEDY)
    firsts = [(one["token_ids"][0], one["logprobs"][0]) for group in groups for one in group]
    likeliest = [(one["token_ids"][0], one["logprobs"][0]) for [one] in best for _ in range(4)]
    pairs = list(zip(firsts, likeliest, strict=True))
    others = [(ours, top) for ours, top in pairs if ours[0] != top[0]]
    assert len(others) > 10
    assert all(ours[1] < top[1] for ours, top in others)
    assert all(
        ours[1] == pytest.approx(top[1], abs=1e-4) for ours, top in pairs if ours[0] == top[0]
    )


def test_the_terminating_token_is_kept_with_its_logprob(engine: Child) -> None:
    first = engine("submit", groups=GROUPS[:1], sampling=SAMPLING)[0][0]
    stop = first["token_ids"][2]
    wanted = SAMPLING | {"stop_token_ids": [stop]}
    stopped = engine("submit", groups=GROUPS[:1], sampling=wanted)[0][0]
    length = first["token_ids"].index(stop) + 1
    assert stopped["token_ids"] == first["token_ids"][:length]
    assert len(stopped["logprobs"]) == length
    assert (stopped["finish_reason"], stopped["stop_token_id"]) == ("stop", stop)


def test_a_completion_that_ends_at_once_is_one_token(engine: Child) -> None:
    first = engine("submit", groups=GROUPS[:1], sampling=SAMPLING)[0][0]["token_ids"][0]
    wanted = SAMPLING | {"stop_token_ids": [first], "group_size": 1}
    [[ended]] = engine("submit", groups=GROUPS[:1], sampling=wanted)
    assert ended["token_ids"] == [first]
    assert len(ended["logprobs"]) == 1
    assert ended["finish_reason"] == "stop"


def test_the_models_own_end_token_does_not_stop_unless_it_is_asked_for(engine: Child) -> None:
    sampling = SAMPLING | {"stop_token_ids": [], "max_tokens": 90, "group_size": 8}
    completions = engine("submit", groups=GROUPS[:4], sampling=sampling)
    drawn = [one for group in completions for one in group]
    assert any(STOP in one["token_ids"][:-1] for one in drawn)
    assert {one["finish_reason"] for one in drawn} == {"length"}


def test_a_prompt_near_the_limit_is_truncated_and_gets_no_end_token(engine: Child) -> None:
    groups = [["near", [4] * 90, 5], ["short", [3], 9]]
    sampling = SAMPLING | {"max_tokens": 40, "stop_token_ids": []}
    near, short = engine("submit", groups=groups, sampling=sampling)
    assert [len(one["token_ids"]) for one in near] == [6] * 4
    assert {one["finish_reason"] for one in near} == {"length"}
    assert [len(one["token_ids"]) for one in short] == [40] * 4


def test_child_i_of_a_group_equals_a_request_with_seed_plus_i(engine: Child) -> None:
    [group] = engine("submit", groups=[["g", [3, 4], 70]], sampling=SAMPLING)
    solo = [["g", [3, 4], 72]]
    [[alone]] = engine("submit", groups=solo, sampling=SAMPLING | {"group_size": 1})
    assert group[2]["token_ids"] == alone["token_ids"]


def test_evaluation_may_sample_otherwise_than_training(engine: Child) -> None:
    narrow = SAMPLING | {"top_k": 1, "temperature": 2.0}
    narrowed = engine("submit", groups=GROUPS, sampling=narrow)
    best = engine("submit", groups=GROUPS, sampling=SAMPLING | GREEDY)
    for group, [one] in zip(narrowed, best, strict=True):
        assert [each["token_ids"] for each in group] == [one["token_ids"]] * 4
    with pytest.raises(EngineSaid, match=r"ValueError: Temperature 0\.001"):
        engine("submit", groups=GROUPS, sampling=SAMPLING | {"temperature": 0.001})


def test_a_prefill_beyond_the_token_budget_is_not_cut(engine: Child) -> None:
    # 128 different prompts of 90 tokens are 11,520 tokens; one step of the engine takes 8,192.
    groups = [[f"g{row}", [3 + row % 60, row // 60] + [9] * 88, row] for row in range(128)]
    sampling = SAMPLING | {"group_size": 1, "stop_token_ids": []}
    drawn = engine("submit", groups=groups, sampling=sampling)
    assert [len(one["token_ids"]) for [one] in drawn] == [6] * 128
    assert engine("submit", groups=groups, sampling=sampling) == drawn


@pytest.fixture(scope="module")
def half(models: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """An engine in bfloat16 whose cache holds 2,048 tokens."""
    stored = put_model(models, "llama-tied", uri=tmp_path_factory.mktemp("store"))
    with child(stored, home, dtype="bfloat16", kv_cache_bytes=1 << 19) as engine:
        yield engine


def test_in_bfloat16_the_digest_carries_the_proof_and_the_swap_is_shown(half: Child) -> None:
    proofs = [half.load(version, dtype="bfloat16") for version in ("v1", "other")]
    seen = [(proof["kind"], proof["tolerance"]) for proof in proofs]
    assert seen == [("swap-only", 0.25), ("swap-only", 0.25)]
    half.load("v1", dtype="bfloat16")
    half("sabotage", what="swap")
    with pytest.raises(EngineSaid, match="reads bit for bit as it did"):
        half.load("v2", dtype="bfloat16")
    half("repair")


def test_memory_pressure_changes_no_bits_from_call_to_call(half: Child) -> None:
    half.load("v1", dtype="bfloat16")
    # 64 completions of 83 tokens need 192 blocks of 32 tokens; 64 are there.
    sampling = SAMPLING | {"max_tokens": 80, "stop_token_ids": []}
    drawn = half("submit", groups=GROUPS, sampling=sampling)
    assert {len(one["token_ids"]) for group in drawn for one in group} == {80}
    assert half("submit", groups=GROUPS, sampling=sampling) == drawn
