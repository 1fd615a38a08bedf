"""Win rates: both orders, ties, failures and the interval."""

import math
import threading

import pytest

import keras_posttrain as kpt
from keras_posttrain.evaluation.win_rates import wilson_interval
from tests.support import REFERENCE

PROMPTS = ["1 + 1 =", "2 + 2 =", "3 + 3 =", "4 + 4 ="]


@pytest.fixture(scope="module")
def task():
    return kpt.SFTTask.from_preset(
        REFERENCE / "models" / "llama3", sequence_length=64
    )


def rate(task, judge, other=None, rows=PROMPTS, **kwargs):
    other = other or [f"other {i}" for i in range(len(rows))]
    return kpt.evaluation.win_rate(
        task, other, rows, judge, max_tokens=4, **kwargs
    )


def prefer(ours):
    """A judge that prefers the task's answers, or the others'."""

    def judge(prompt, first, second):
        assert prompt in PROMPTS
        is_first = second.startswith("other") == ours
        return "first" if is_first else "second"

    return judge


def test_an_answer_that_is_preferred_in_both_orders(task):
    found = rate(task, prefer(True))
    assert (found.value, found.n, found.failed, found.ties) == (1.0, 4, 0, 0)
    assert found.inconsistent == 0 and found.first == 0.5
    # 4 of 4: Wilson's lower end is n / (n + z**2).
    assert found.interval == pytest.approx((4 / (4 + 1.959964**2), 1.0))
    [sample, *_] = found.samples
    assert sample["prompt"] == PROMPTS[0] and sample["other"] == "other 0"
    assert sample["scores"] == (1.0, 1.0)
    assert sample["answer"] == task.generate(
        PROMPTS[0], max_tokens=4, temperature=0.0
    )
    lost = rate(task, prefer(False))
    assert lost.value == 0 and lost.interval[0] == 0


def test_a_judge_that_prefers_a_position_says_nothing(task):
    found = rate(task, lambda prompt, first, second: "first")
    assert (found.value, found.inconsistent, found.first) == (0.5, 1.0, 1.0)


def test_ties_and_failures(task):
    """Row 0: two ties. Row 1: a tie and a win. Row 2: fails once. Row 3: won.

    So (0.5 + 0.75 + 1) / 3, by an async judge.
    """

    async def judge(prompt, first, second):
        ours = second.startswith("other")
        row = PROMPTS.index(prompt)
        if row == 0 or (row == 1 and ours):
            return "tie"
        if row == 2 and ours:
            return None
        return "first" if ours else "second"

    found = rate(task, judge)
    assert found.value == pytest.approx(0.75)
    assert (found.n, found.failed, found.ties) == (3, 1, 3)
    assert found.inconsistent == 0
    assert found.samples[2]["scores"] == (None, 1.0)
    none = rate(task, lambda prompt, first, second: None)
    assert math.isnan(none.value) and (none.n, none.failed) == (0, 4)


def test_another_task_answers_the_same_prompts(task):
    """The same model: each answer is compared with itself."""
    seen = []

    def judge(prompt, first, second):
        seen.append(first == second)
        return "tie"

    rows = [{"prompt": prompt, "answer": "unused"} for prompt in PROMPTS]
    found = rate(task, judge, other=task, rows=rows)
    assert all(seen) and len(seen) == 8 and found.value == 0.5


def test_calls_run_at_once(task):
    barrier = threading.Barrier(8, timeout=60)

    def judge(prompt, first, second):
        barrier.wait()
        return "tie"

    assert rate(task, judge, max_concurrency=8).ties == 8


def test_wilsons_interval():
    """8 of 10: the published example, 0.490 to 0.943."""
    assert wilson_interval(0.8, 10) == pytest.approx(
        (0.4902, 0.9433), abs=1e-4
    )
    low, high = wilson_interval(0.5, 1000)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 1000**0.5, rel=0.01)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rows": []}, "at least one prompt"),
        ({"rows": [3]}, "Received: row 0: 3"),
        ({"other": "base"}, "must be a task, or a list of answers"),
        ({"other": ["a"]}, "1 answers for 4 rows"),
        ({"judge": "gpt"}, "`judge` must be a function"),
        ({"task": None}, "`task` must be a task"),
        ({"max_concurrency": 0}, "`max_concurrency`"),
    ],
)
def test_bad_arguments_come_before_sampling(task, change, message):
    given = {
        "task": task,
        "other": ["a"] * 4,
        "rows": PROMPTS,
        "judge": lambda *_: "tie",
    }
    # Nothing could be sampled with this.
    with pytest.raises(ValueError, match=message):
        kpt.evaluation.win_rate(**given | change, max_tokens=-1)


def test_another_verdict_is_explained(task):
    with pytest.raises(ValueError, match="must return 'first'.*'A'"):
        rate(task, lambda *_: "A")


def test_what_a_judge_raises_names_the_row(task):
    def judge(prompt, first, second):
        if prompt == PROMPTS[2]:
            raise KeyError("verdict")
        return "tie"

    with pytest.raises(KeyError) as caught:
        rate(task, judge)
    assert "for row 2, whose first answer" in caught.value.__notes__[0]
