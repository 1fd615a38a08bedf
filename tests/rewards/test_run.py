"""The contract of reward functions: arguments, results and errors.

The prompts are rows of a dataset, two completions each.
"""

import asyncio
import functools
import threading
import time

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rewards import check_rewards, run_rewards
from keras_posttrain.rewards.reward import name, names

PROMPTS = ["1 + 1?", "1 + 1?", "2 + 2?", "2 + 2?"]
COMPLETIONS = ["2", "3", "4", "it is four"]
COLUMNS = {"answer": ["2", "2", "4", "4"], "level": [1, 1, 2, 2]}
IDS = [[5, 1], [6, 1], [7, 1], [8, 9, 10, 1]]


def run(*functions, **kwargs):
    kwargs = {"completion_ids": IDS, "rows": [0, 0, 7, 7], **kwargs}
    return run_rewards(
        list(functions), PROMPTS, COMPLETIONS, COLUMNS, **kwargs
    )


def correct(completions, answer, **columns):
    return [float(a in c) for c, a in zip(completions, answer)]


def test_a_batch_is_scored_in_one_call_of_each_function():
    calls = []

    def length(completions, **columns):
        calls.append((completions, sorted(columns)))
        return [len(c) for c in completions]

    rewards, report = run(correct, length)
    assert rewards.dtype == np.float32 and rewards.shape == (4, 2)
    np.testing.assert_array_equal(rewards, [[1, 1], [0, 1], [1, 1], [0, 10]])
    assert calls == [
        (COMPLETIONS, ["answer", "completion_ids", "level", "prompts"])
    ]
    assert list(report) == ["correct", "length"]
    assert report["correct"]["skipped"] == report["correct"]["not_judged"] == 0


def test_a_function_gets_the_arguments_it_names():
    seen = {}

    def f(completion_ids, level=None, scale=2.0):
        seen.update(ids=completion_ids, level=level)
        return [scale * len(ids) for ids in completion_ids]

    rewards, _ = run(f)
    np.testing.assert_array_equal(rewards[:, 0], [4, 4, 4, 8])
    assert seen == {"ids": IDS, "level": COLUMNS["level"]}

    def g(prompts, prompt_ids):
        return [len(p) for p in prompt_ids]

    rewards, _ = run(g, prompt_ids=[[1], [1], [1, 2], [1, 2]])
    np.testing.assert_array_equal(rewards[:, 0], [1, 1, 2, 2])
    with pytest.raises(ValueError, match="'g' needs `prompt_ids`, which"):
        run(g)


def test_messages_come_as_messages():
    prompts = [[{"role": "user", "content": "hi"}]]
    completions = [[{"role": "assistant", "content": "hello"}]]

    def f(prompts, completions):
        assert prompts[0][0]["content"] == "hi"
        return [len(completions[0][0]["content"])]

    rewards, _ = run_rewards([f], prompts, completions)
    assert rewards.tolist() == [[5.0]]


def test_none_is_not_scored_and_numbers_of_all_kinds_are_read():
    def f(completions):
        return [None, True, np.float32(0.25), jnp.asarray(-1)]

    rewards, report = run(f, lambda completions: np.arange(4) / 2)
    np.testing.assert_array_equal(
        rewards, [[np.nan, 0], [1, 0.5], [0.25, 1], [-1, 1.5]]
    )
    assert report["f"]["not_judged"] == 1 and report["f"]["skipped"] == 0
    assert report["<lambda>"]["error"] is None


def test_no_completions_call_nothing():
    def f(completions):
        raise AssertionError

    rewards, report = run_rewards([f], [], [])
    assert rewards.shape == (0, 1) and report["f"]["skipped"] == 0


def test_names():
    class Judge:
        def __call__(self, completions):
            return [0.0] * len(completions)

    exact = kpt.rewards.ExactMatchReward()
    partial = functools.partial(correct, answer=["2"] * 4)
    assert names([correct, Judge(), exact, partial, exact]) == [
        "correct",
        "Judge",
        "exact_match",
        "correct_2",
        "exact_match_2",
    ]
    assert name(kpt.rewards.SoftOverlongReward(4, 2)) == "soft_overlong"
    assert check_rewards([correct, exact], ["answer"]) == [
        "correct",
        "exact_match",
    ]


# Async functions


def test_async_functions_run_side_by_side():
    running, most = 0, 0

    async def slow(completions):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return [1.0] * len(completions)

    async def other(completions):
        return await slow(completions)

    rewards, report = run(slow, other, correct)
    assert most == 2
    np.testing.assert_array_equal(rewards[:, :2], 1.0)
    assert report["slow"]["seconds"] >= 0.05 > report["correct"]["seconds"]


def test_objects_of_an_event_loop_outlive_a_batch():
    queue = None

    async def f(completions):
        nonlocal queue
        if queue is None:
            queue = asyncio.Queue()
            asyncio.get_running_loop().call_later(0.05, queue.put_nowait, 3.0)
            return [0.0] * 4
        return [await queue.get()] * 4

    run(f)
    rewards, _ = run(f, timeout=5)
    np.testing.assert_array_equal(rewards, 3.0)


def test_an_object_that_returns_an_awaitable():
    async def later(completions):
        return [2.0] * len(completions)

    for limit in (None, 5):
        rewards, _ = run(lambda completions: later(completions), timeout=limit)
        np.testing.assert_array_equal(rewards, 2.0)


# Errors


def test_an_exception_names_the_function_and_the_row():
    def f(completions):
        return [float(c) for c in completions]

    with pytest.raises(ValueError) as error:
        run(f)
    text = str(error.value)
    assert "'f' raised ValueError: could not convert string to" in text
    assert "completion 3 of 4 (dataset row 7)" in text
    assert "prompt='2 + 2?', completion='it is four'" in text
    assert 'on_error="skip"' in text
    assert isinstance(error.value.__cause__, ValueError)


def test_an_exception_of_no_single_row_says_so():
    def f(completions):
        if len(completions) > 1:
            raise KeyError("only with others")
        return [0.0]

    with pytest.raises(ValueError, match="No completion alone makes it fail"):
        run(f)


def test_an_exception_of_an_async_function_names_the_row_as_well():
    async def f(completions):
        return [1 / (c != "3") for c in completions]

    with pytest.raises(ValueError, match="'f' raised ZeroDiv.*completion 1"):
        run(f)


@pytest.mark.parametrize(
    "value, shown",
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1e39, "1e\\+39"),
        (10**400, "1000"),
        ("1", "'1'"),
        ([1.0], r"\[1.0\]"),
        (1j, "1j"),
    ],
)
def test_a_reward_that_is_not_finite_names_function_and_row(value, shown):
    def f(completions):
        return [0.0, 0.0, value, value]

    text = f"'f' must return a finite number.*{shown}.*completion 2 of 4"
    with pytest.raises(ValueError, match=text):
        run(f)
    rewards, report = run(f, correct, on_error="skip")
    np.testing.assert_array_equal(rewards[:, 0], [0, 0, np.nan, np.nan])
    np.testing.assert_array_equal(rewards[:, 1], [1, 0, 1, 0])
    assert report["f"]["skipped"] == 2 and report["f"]["not_judged"] == 0
    assert "completion 2 of 4" in report["f"]["error"]


@pytest.mark.parametrize(
    "result, shown",
    [
        ([1.0], "1 rewards"),
        ([1.0] * 5, "5 rewards"),
        (None, "NoneType"),
        (1.0, "float 1.0"),
        ({0: 1.0}, "dict"),
        (np.zeros((4, 1)), "ndarray"),
    ],
)
def test_a_wrong_number_of_rewards(result, shown):
    def f(completions):
        return result

    text = f"'f' must return a list with.*4 completions.*{shown}.*ompletion 0"
    with pytest.raises(ValueError, match=text):
        run(f)
    rewards, report = run(f, correct, on_error="skip")
    assert np.isnan(rewards[:, 0]).all() and not np.isnan(rewards[:, 1]).any()
    assert report["f"]["skipped"] == 4


def test_a_sync_function_that_never_returns():
    done = threading.Event()

    def f(completions):
        if "4" in completions:
            done.wait(20)
        return [0.0] * len(completions)

    start = time.perf_counter()
    with pytest.raises(TimeoutError) as error:
        run(f, timeout=0.4)
    assert time.perf_counter() - start < 5
    text = str(error.value)
    assert "'f' took longer than the limit of 0.4 s for 4 compl" in text
    assert "completion 2 of 4 (dataset row 7), prompt='2 + 2?'" in text
    rewards, report = run(f, correct, timeout=0.2, on_error="skip")
    assert np.isnan(rewards[:, 0]).all()
    np.testing.assert_array_equal(rewards[:, 1], [1, 0, 1, 0])
    assert "took longer than the limit" in report["f"]["error"]
    done.set()


@pytest.mark.parametrize("block", [False, True])
def test_an_async_function_that_never_returns(block):
    async def f(completions):
        if "it is four" in completions:
            # The second blocks the loop, which a time limit cannot end.
            time.sleep(2.5) if block else await asyncio.sleep(60)
        return [0.0] * len(completions)

    start = time.perf_counter()
    rewards, report = run(f, timeout=0.2, on_error="skip")
    assert time.perf_counter() - start < 2
    assert np.isnan(rewards).all()
    assert "took longer than the limit" in report["f"]["error"]

    async def g(completions):
        return [1.0] * len(completions)

    np.testing.assert_array_equal(run(g, timeout=1)[0], 1.0)
    if not block:
        with pytest.raises(TimeoutError, match="completion 3 of 4"):
            run(f, timeout=0.2)


def test_a_timeout_inside_a_function_is_an_exception_like_any_other():
    def f(completions):
        raise TimeoutError("the server is slow")

    async def g(completions):
        raise TimeoutError("the server is slow")

    for function in (f, g):
        for limit in (None, 5):
            with pytest.raises(ValueError, match="raised TimeoutError: the s"):
                run(function, timeout=limit)


def test_a_limit_keeps_keras_distribution():
    distribution = keras.distribution.DataParallel(
        devices=keras.distribution.list_devices()[:1], auto_shard_dataset=False
    )
    seen = []

    def f(completions):
        seen.append(keras.distribution.distribution())
        return [0.0] * len(completions)

    with distribution.scope():
        run(f, timeout=5)
    assert seen == [distribution]


# Before the first rollout


@pytest.mark.parametrize(
    "functions, text",
    [
        ([], "at least one reward function"),
        (None, "at least one reward function"),
        (correct, "at least one reward function"),
        ([3], "must be a function"),
        (
            [kpt.rewards.ExactMatchReward],
            r"Pass an inst.*ExactMatchReward\(\)",
        ),
        (
            [lambda completions, /: []],
            "positional-only argument 'completions'",
        ),
        ([dict.fromkeys], "."),
    ],
)
def test_a_result_that_is_not_a_list_of_rewards(functions, text):
    with pytest.raises(ValueError, match=text):
        check_rewards(functions, ["prompt", "answer"])


def test_a_column_that_is_missing_is_named_before_the_first_rollout():
    with pytest.raises(ValueError) as error:
        check_rewards([correct], ["prompt", "answers"], "the dataset's row 3")
    text = str(error.value)
    assert "'correct' needs the column 'answer'" in text
    assert "the dataset's row 3 lacks" in text
    assert "columns=['answers', 'prompt']" in text
    assert "Did you mean 'answers'?" in text
    exact = kpt.rewards.ExactMatchReward(column="gold")
    with pytest.raises(ValueError, match="'exact_match' needs.*'gold'"):
        check_rewards([exact], ["answer"])
    with pytest.raises(ValueError, match="no column 'completions'"):
        check_rewards([correct], ["answer", "completions"])


def test_settings_are_checked():
    with pytest.raises(ValueError, match="on_error='ignore'"):
        run(correct, on_error="ignore")
    for limit in (0, -1, True, "1"):
        with pytest.raises(ValueError, match="`timeout` must be"):
            run(correct, timeout=limit)
    with pytest.raises(ValueError, match="`completion_ids` must have an en"):
        run(correct, completion_ids=[[1]])
    with pytest.raises(ValueError, match="`answer` must have an entry"):
        run_rewards([correct], PROMPTS, COMPLETIONS, {"answer": ["2"]})
