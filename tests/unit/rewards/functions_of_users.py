"""Reward functions as users bring them: good ones, odd ones and bad ones."""

import asyncio
import functools
import os
import sys
from fractions import Fraction

import numpy as np

NOT_CALLABLE = 3


# TRL's shape.
def accuracy(prompts, completions, solution, **kwargs):
    return [1.0 if text == gold else 0.0 for text, gold in zip(completions, solution, strict=True)]


def takes_three(completions, answer, level):
    return [float(level[0]) if completions == answer else 0.0]


def everything(completions, **kwargs):
    everything.seen = {"completions": completions, **kwargs}
    return [1.0]


def conversation(prompts, completions, **kwargs):
    question, answer = prompts[0][-1]["content"], completions[0][0]["content"]
    return [float(question == "2 + 2?" and answer == "4")]


def chat_only(completions, **kwargs):
    return [float(completion[0]["content"] == "4") for completion in completions]


def logs(completions, log_extra=None, log_metric=None, **kwargs):
    log_extra("extracted", ["a\nb \ud800" for _ in completions])
    log_metric("acc", 1)
    return [0.5]


async def slow(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.25 for _ in completions]


def progress(completions, trainer_state, **kwargs):
    return [trainer_state.global_step]


def returns(completions, what):
    return RETURNED[what[0]]()


RETURNED = {
    "none": lambda: [None],
    "nan": lambda: [float("nan")],
    "infinite": lambda: [-float("inf")],
    "huge": lambda: [10**400],
    "two": lambda: [1.0, 2.0],
    "empty": list,
    "bare": lambda: 1.0,
    "nothing": lambda: None,
    "text": lambda: ["1.0"],
    "complex": lambda: [1j],
    "nested": lambda: [[1.0]],
    "true": lambda: [True],
    "integer": lambda: [3],
    "tuple": lambda: (0.5,),
    "numpy scalar": lambda: [np.float32(0.5)],
    "numpy truth": lambda: [np.True_],
    "numpy array": lambda: np.array([0.25]),
    "numpy zero": lambda: [np.array(0.25)],
    "fraction": lambda: [Fraction(1, 4)],
    "raise": lambda: [1 / 0],
    "exit": lambda: sys.exit(3),
    "cancel": lambda: asyncio.run(cancelled()),
    "exit at once": lambda: os._exit(0),
}


async def cancelled():
    raise asyncio.CancelledError


# verl's shape.
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source not in ("openai/gsm8k", "countdown"):
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    return {"score": float(solution_str == str(ground_truth)), "acc": True, "pred": solution_str}


def whole_row(data_source, solution_str, ground_truth, extra_info):
    whole_row.seen = (data_source, solution_str, ground_truth, extra_info)
    extra_info["calls"] = extra_info.get("calls", 0) + 1
    if isinstance(ground_truth, dict):
        ground_truth["numbers"].append(0)
    return extra_info["calls"]


def with_options(data_source, solution_str, ground_truth, extra_info=None, bonus=0, **kwargs):
    return bonus + len(kwargs["names"])


async def asks_a_model(solution_str, ground_truth, reward_router_address=None, **kwargs):
    return {"score": await asyncio.sleep(0, result=0.75)}


def needs_a_model(solution_str, ground_truth, reward_router_address, **kwargs):
    return 1.0


def needs_a_stranger(solution_str, ground_truth, stranger):
    return 1.0


def no_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}


def returns_none(data_source, solution_str, ground_truth, extra_info):
    return None


def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": len(text), "where": data_sources[0]} for text in solution_strs]


# Neither, or both.
def neither(text, gold):
    return 1.0


def both(completions, solution_str):
    return 1.0


def anything(**kwargs):
    return [float("completions" in kwargs)]


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return [2 * value for value in function(*args, **kwargs)]

    return wrapper


twice = decorated(takes_three)


class Graders:
    @staticmethod
    def strict(completions, answer):
        return [float(completions == answer)]
