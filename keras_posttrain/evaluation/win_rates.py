"""Compares the answers of two models by a judge."""

import asyncio
import concurrent.futures
import dataclasses
import inspect
import math

from keras_posttrain.training import checks

# What a judge may answer, and the score of what it was shown first.
SCORES = {"first": 1.0, "tie": 0.5, "second": 0.0, None: None}
# Two-sided 95 %, of the normal distribution.
Z = 1.959964


@dataclasses.dataclass(frozen=True)
class WinRate:
    """How often the answers of a task were preferred.

    Attributes:
        value: float, the mean score of the rows: 1 where the task's answer
            was preferred in both orders, 0 where the other's was, and 0.5
            for a tie or where each order preferred another.
        interval: `(low, high)`, Wilson's interval of 95 % for the mean of
            `n` scores from 0 to 1. It is wide enough for scores of 0 and 1
            alone, and wider than needed where there are ties.
        n: int, rows that were judged in both orders.
        failed: int, rows left out: the judge returned `None`.
        ties: int, judgements that were ties, of `2 * n`.
        inconsistent: float, the share of rows in which the answer shown
            first, or that shown second, was preferred in both orders. It is
            the judge's bias to a position, or its noise. A win in one order
            and a tie in the other do not count.
        first: float, the share of judgements, ties as half, for the answer
            that was shown first: 0.5 without a bias.
        samples: list of dicts by row: `prompt`, `answer`, `other` and
            `scores`, those of the task's answer in both orders.

    Example:

    ```python
    def judge(prompt, first, second):
        return "tie" if first == second else "first"

    found = kpt.evaluation.win_rate(task, ["none"], ["2 + 2 ="], judge)
    found.value  # 0.5
    found.inconsistent, found.first  # 1.0, 1.0
    ```
    """

    value: float
    interval: tuple
    n: int
    failed: int
    ties: int
    inconsistent: float
    first: float
    samples: list = dataclasses.field(repr=False)


def win_rate(
    task,
    other,
    rows,
    judge,
    *,
    max_tokens=256,
    temperature=0.0,
    seed=0,
    max_concurrency=16,
):
    """Computes how often a judge prefers a task's answers to others.

    Judges prefer one position, so each pair is judged in both orders (Zheng
    et al., 2023, https://arxiv.org/abs/2306.05685).

    Args:
        task: `kpt.Task`.
        other: another task, such as one of the model before training, or a
            list of answers, strings, one for each row.
        rows: list of prompts as `Task.generate` takes them: strings or lists
            of messages; or of dicts with such a `prompt`.
        judge: function, sync or async, `(prompt, first, second)` to
            `"first"`, `"second"` or `"tie"`, or to `None` if it has failed.
            `prompt` is as in the row, the answers are strings. Calls run in
            threads.
        max_tokens: int, the most tokens of an answer.
        temperature: float; 0 is greedy decoding.
        seed: int, of sampling.
        max_concurrency: int, the most calls of the judge at once.

    Returns:
        A `WinRate`.

    Raises:
        ValueError: for arguments that cannot be used, before anything is
            sampled; for another answer of the judge. What the judge raises
            ends the comparison, with a note that names the row.

    Example:

    ```python
    def judge(prompt, first, second):
        if len(first) == len(second):
            return "tie"
        return "first" if len(first) < len(second) else "second"

    kpt.evaluation.win_rate(task, ["Paris."], ["Capital of France?"], judge)
    ```
    """
    prompts = _prompts(rows)
    _check(task, other, prompts, judge)
    checks.positive_int("max_concurrency", max_concurrency)
    settings = dict(max_tokens=max_tokens, temperature=temperature, seed=seed)
    answers = task.generate(prompts, **settings)
    if _samples(other):
        other = other.generate(prompts, **settings)
    shown = []
    for prompt, ours, theirs in zip(prompts, answers, other):
        shown += [(prompt, ours, theirs), (prompt, theirs, ours)]
    with concurrent.futures.ThreadPoolExecutor(max_concurrency) as pool:
        futures = [
            pool.submit(_ask, judge, i // 2, *pair)
            for i, pair in enumerate(shown)
        ]
        try:
            verdicts = [future.result() for future in futures]
        except BaseException:
            # After an error the others need not be asked.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    found = _summarize(verdicts[::2], verdicts[1::2])
    pairs = zip(prompts, answers, other, found.samples)
    samples = [
        {"prompt": prompt, "answer": a, "other": b, "scores": scores}
        for prompt, a, b, scores in pairs
    ]
    return dataclasses.replace(found, samples=samples)


def _samples(model):
    return callable(getattr(model, "generate", None))


def _prompts(rows):
    is_list = isinstance(rows, (list, tuple)) and len(rows)
    prompts = [
        row["prompt"] if isinstance(row, dict) and "prompt" in row else row
        for row in (rows if is_list else ())
    ]
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, list)):
            raise ValueError(
                "`rows` must be strings, lists of messages, or dicts with "
                f"such a 'prompt'. Received: row {i}: {prompt!r:.200}"
            )
    if not prompts:
        raise ValueError(
            "`rows` must be a list of at least one prompt. "
            f"Received: rows={rows!r:.200}"
        )
    return prompts


def _check(task, other, prompts, judge):
    if not _samples(task):
        raise ValueError(f"`task` must be a task. Received: task={task!r}")
    if not callable(judge):
        raise ValueError(
            "`judge` must be a function of a prompt and two answers. "
            f"Received: judge={judge!r}"
        )
    if _samples(other):
        return
    is_list = isinstance(other, (list, tuple))
    if not is_list or not all(isinstance(x, str) for x in other):
        raise ValueError(
            "`other` must be a task, or a list of answers. To compare with a "
            "model before training, pass "
            "`kpt.SFTTask.from_preset(preset, trainable=False)`. "
            f"Received: other={other!r:.200}"
        )
    if len(other) != len(prompts):
        raise ValueError(
            "`other` must have an answer for each row. Received: "
            f"{len(other)} answers for {len(prompts)} rows."
        )


def _ask(judge, row, prompt, first, second):
    """Returns the score of what the judge was shown first, or `None`."""
    try:
        verdict = judge(prompt, first, second)
        if inspect.isawaitable(verdict):
            verdict = asyncio.run(_awaited(verdict))
    except Exception as error:
        error.add_note(
            f"The judge raised this for row {row}, whose first answer shown "
            f"was {first!r:.200}. Return None for a row to be left out."
        )
        raise
    is_known = verdict is None or isinstance(verdict, str)
    if not is_known or verdict not in SCORES:
        raise ValueError(
            "`judge` must return 'first', 'second', 'tie' or None. "
            f"Received: {verdict!r:.200}"
        )
    return SCORES[verdict]


async def _awaited(verdict):
    return await verdict


def _summarize(straight, swapped):
    """Returns a `WinRate` of scores of what was shown first.

    `straight` are those of rows with the task's answer first, `swapped` with
    the other's. `samples` are the scores of the task's answer, by row.
    """
    scores = [
        (a, None if b is None else 1.0 - b) for a, b in zip(straight, swapped)
    ]
    judged = [pair for pair in scores if None not in pair]
    n = len(judged)
    if not n:
        nan = math.nan
        return WinRate(nan, (nan, nan), 0, len(scores), 0, nan, nan, scores)
    value = sum(map(sum, judged)) / (2 * n)
    return WinRate(
        value=value,
        interval=wilson_interval(value, n),
        n=n,
        failed=len(scores) - n,
        ties=sum(score == 0.5 for pair in judged for score in pair),
        inconsistent=sum({a, b} == {0.0, 1.0} for a, b in judged) / n,
        first=sum(a + 1.0 - b for a, b in judged) / (2 * n),
        samples=scores,
    )


def wilson_interval(mean, n):
    """Computes Wilson's 95 % interval of a mean of `n` values in [0, 1].

    Source: Wilson, 1927, Probable inference, the law of succession, and
    statistical inference.

    Returns:
        `(low, high)`, floats in [0, 1].
    """
    centre = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
    spread = math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    spread *= Z / (1 + Z**2 / n)
    return max(centre - spread, 0.0), min(centre + spread, 1.0)
