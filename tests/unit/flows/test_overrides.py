import pytest

from flows.overrides import near_names, with_overrides
from flows.recipes import RECIPES


def test_a_value_is_read_as_json_and_validated():
    config = with_overrides(
        RECIPES["addition"](),
        ["train.learning_rate=1e-6", "reward.parts.0.weight=2", "model.path=/models/mine"],
    )
    assert config.train.learning_rate == 1e-6
    assert config.reward.parts[0].weight == 2
    assert config.model.path == "/models/mine"


def test_options_and_suites_take_new_keys():
    config = with_overrides(
        RECIPES["addition"](),
        ['evaluate.suites.greedy={"temperature":0}', "train.algorithm.options.clip_high=0.3"],
    )
    assert config.evaluate.suites["greedy"].temperature == 0
    assert config.train.algorithm.options["clip_high"] == 0.3


@pytest.mark.parametrize(
    ("assignment", "hint"),
    [
        ("train.learing_rate=1", "train.learning_rate"),
        ("learning_rate=1", "train.learning_rate"),
        ("rollouts.max_tokens=1", "rollout.max_tokens"),
        ("rollout.group_sise=4", "rollout.group_size"),
    ],
)
def test_an_unknown_key_names_the_near_one(assignment: str, hint: str):
    with pytest.raises(ValueError, match="There is no setting") as caught:
        with_overrides(RECIPES["addition"](), [assignment])
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("assignments", "cause"),
    [
        (["steps=many"], "steps"),
        (["steps=0"], "steps"),
        (["rollout.group_size=1"], "group of one"),
        (["train.minibatches=7"], "minibatches"),
        (["train.ranks=3"], "ranks"),
        (["rollout.max_tokens=128"], "leaves no room"),
        (["prompts.max_prompt_tokens=126"], "exceed"),
        (["train.schedule_updates=null"], "schedule_updates"),
        (["train.algorithm.kind=grop"], "grpo"),
        (["train.probe_tokens=128"], "probe_tokens"),
        (["steps"], "no value"),
        (["prompts.datasets=" + "[" * 9999], "nested too deeply"),
        (["train.adam_betas=[0.9,1.0]"], "train.adam_betas.1"),
        (["train.adam_betas=[-0.1,0.9]"], "train.adam_betas.0"),
        (["rollout.temperature=0.001"], "rollout.temperature"),
        (["evaluate.suites.held_out.temperature=0.001"], "at least 0.01"),
        (["evaluate.suites={}"], "evaluate.suites"),
        (['evaluate.suites={"a/b":{}}'], "Suite name 'a/b'"),
        (["train.learning_rate=Infinity"], "no Infinity"),
        (["rollout.temperature=NaN"], "no NaN"),
        (["train.clip_norm=1e999"], "train.clip_norm"),
        (["reward.parts.0.weight=-1e999"], "reward.parts.0.weight"),
        (["prompts.datasets.0.weight=1e999"], "prompts.datasets.0.weight"),
        (["evaluate.suites.held_out.temperature=1e999"], "temperature"),
        (["train.algorithm.options.importance_cap=1e999"], "importance_cap"),
        (
            ["evaluate.suites.held_out.temperature=0", "evaluate.suites.held_out.completions=4"],
            "gre",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(assignments: list[str], cause: str):
    with pytest.raises(ValueError, match=cause):
        with_overrides(RECIPES["addition"](), assignments)


def test_near_names_lists_everything_when_nothing_is_near():
    assert near_names("adition", ["addition", "smollm2"]) == "Did you mean addition?"
    assert "addition, smollm2" in near_names("zzz", ["addition", "smollm2"])


def test_every_recipe_has_one_line_of_help_and_survives_json():
    for recipe in RECIPES.values():
        config = recipe()
        line = (recipe.__doc__ or "").splitlines()[0]
        assert 20 < len(line) < 80
        assert with_overrides(config, []) == config
