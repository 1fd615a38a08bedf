"""Calls and checks a batch's reward functions and reports failures."""

import numbers

import numpy as np

from keras_posttrain.rewards import results, reward
from keras_posttrain.rewards.calls import Call, OutOfTime
from keras_posttrain.workers.pool import Failure

ON_ERROR = ("raise", "skip")


def check_rewards(functions, column_names, where="the dataset"):
    """Checks that rewards can be called, before the first rollout.

    Args:
        functions: list of reward functions.
        column_names: names of the columns of the rows.
        where: string, the name of the rows in errors.

    Returns:
        List of strings, a name for each reward in metrics: its `__name__`,
        with `_2` and so on if several have the same name.

    Raises:
        ValueError: if there is no reward, one is not a function, or one
            needs a column that is missing.

    Example:

    ```python
    kpt.rewards.check_rewards([correct], ["prompt", "answer"])  # ["correct"]
    ```
    """
    if not isinstance(functions, (list, tuple)) or not functions:
        raise ValueError(
            "`rewards` must be a list of at least one reward function. "
            f"Received: rewards={functions!r}. Pass for example "
            "`rewards=[correct]`."
        )
    columns = list(column_names)
    for column in ("prompts", "completions", "completion_ids"):
        if column in columns:
            raise ValueError(
                f"Rows must have no column {column!r}: rewards get the "
                f"samples under that name. Received: {where} with "
                f"columns={columns}. Rename the column."
            )
    names = reward.names(functions)
    for function, name in zip(functions, names):
        reward.check_function(function, name, columns, where)
    return names


def run_rewards(
    functions,
    prompts,
    completions,
    columns=None,
    *,
    prompt_ids=None,
    completion_ids=None,
    rows=None,
    timeout=None,
    on_error="raise",
):
    """Calls every reward once for a whole batch of completions.

    Async functions run concurrently while the sync ones run one by one. A
    function that fails is called again on parts of the batch to find the row
    that causes the error, unless `on_error="skip"`.

    Args:
        functions: list of reward functions, see `Reward`.
        prompts: list of strings or messages, one per completion.
        completions: list of strings or messages.
        columns: dict of lists, the other columns of the rows, or `None`.
        prompt_ids, completion_ids: lists of lists of ints, or `None`.
        rows: list of ints, the dataset row of each completion for errors, or
            `None`.
        timeout: float, the time limit in seconds of a function's call, or
            `None`. A sync function with a limit runs in a thread. If it never
            returns, the thread cannot be ended, but the run continues without
            its rewards or stops with an error. An async function that blocks
            the event loop delays the other async ones. `Isolated` can end
            functions that never release the interpreter, too.
        on_error: `"raise"`, or `"skip"`. On an exception, a timeout or a
            wrong number of rewards, `"skip"` leaves out the function's
            rewards of the batch; a reward that is not a finite number is
            left out alone.

    Returns:
        Tuple `(rewards, report)`: a float32 array of shape
        `(completions, functions)`, NaN for completions that a function did
        not score or that were skipped, and a dict by name of dicts with
        `seconds`, `not_judged` and `skipped` (numbers of completions), and
        `error` (the first message, or `None`).

    Raises:
        ValueError: if a function raises an exception, or does not return a
            finite number or `None` for each completion; the message names
            the function and the row.
        TimeoutError: if a function exceeds the time limit.

    Example:

    ```python
    def short(completions):
        return [float(len(c) < 3) for c in completions]

    prompts, completions = ["1 + 1 =", "2 + 2 ="], ["2", "four"]
    rewards, _ = kpt.rewards.run_rewards([short], prompts, completions)
    rewards  # [[1.0], [0.0]]
    ```
    """
    batch = Batch(
        prompts, completions, columns, prompt_ids, completion_ids, rows
    )
    names = check_rewards(functions, columns or {}, "the batch")
    check_settings(timeout, on_error)
    rewards = np.full((batch.size, len(functions)), np.nan, "float32")
    report = {name: _entry() for name in names}
    if not batch.size:
        return rewards, report
    calls = {}
    try:
        # Async functions first, as they run while the sync ones do.
        for i in sorted(
            range(len(names)), key=lambda i: not reward.is_async(functions[i])
        ):
            values = batch.choose(functions[i], names[i])
            calls[i] = Call(functions[i], values, timeout)
        for i, name in enumerate(names):
            column, entry = _collect(
                calls[i], functions[i], name, batch, timeout, on_error
            )
            rewards[:, i], report[name] = column, entry
    finally:
        for call in calls.values():
            call.cancel()
    return rewards, report


class Batch:
    """The arguments of rewards, and the descriptions of rows in errors."""

    def __init__(self, prompts, completions, columns, prompt_ids, ids, rows):
        given = zip(reward.GIVEN, (prompts, completions, prompt_ids, ids))
        self.size = len(completions)
        self.values = {k: v for k, v in given if v is not None}
        # Tokenised rows have prompts as a column as well.
        self.values = {**(columns or {}), **self.values}
        self.rows = rows
        for name, value in (*self.values.items(), ("rows", rows)):
            if value is not None and len(value) != self.size:
                raise ValueError(
                    f"`{name}` must have an entry for each completion. "
                    f"Received: {len(value)} for {self.size} completions."
                )

    def choose(self, function, name, part=None):
        """Returns a function's arguments, for a slice of the batch."""
        arguments = reward.arguments(function)
        for needed in arguments.required:
            if needed not in self.values:
                raise ValueError(
                    f"The reward function {name!r} needs `{needed}`, which "
                    "was not given to `run_rewards`."
                )
        values = arguments.choose(self.values)
        if part is None:
            return values
        return {k: v[part] for k, v in values.items()}

    def describe(self, index):
        """Describes a completion: its index, its row and its first words."""
        row = "" if self.rows is None else f" (dataset row {self.rows[index]})"
        return (
            f"completion {index} of {self.size}{row}, "
            f"prompt={_start(self.values.get('prompts'), index)}, "
            f"completion={_start(self.values['completions'], index)}"
        )


def _start(values, index):
    if values is None:
        return "?"
    text = reward.readable(values[index])
    return repr(
        text if len(text) <= results.SHOWN else text[: results.SHOWN] + "…"
    )


def _entry(seconds=0.0, not_judged=0, skipped=0, error=None):
    return {
        "seconds": seconds,
        "not_judged": not_judged,
        "skipped": skipped,
        "error": error,
    }


def check_settings(timeout, on_error, names=("timeout", "on_error")):
    """Raises a `ValueError` that calls the settings by these names."""
    limit, name = names
    if on_error not in ON_ERROR:
        raise ValueError(
            f"`{name}` must be one of {ON_ERROR}. Received: "
            f"{name}={on_error!r}."
        )
    is_number = isinstance(timeout, numbers.Real) and timeout is not True
    if timeout is not None and not (is_number and timeout > 0):
        raise ValueError(
            f"`{limit}` must be a number of seconds above 0, or None for no "
            f"limit. Received: {limit}={timeout!r}."
        )


def _collect(call, function, name, batch, timeout, on_error):
    """Returns a function's rewards and its entry of the report."""
    try:
        result = call.result()
        column, invalid = results.to_floats(result, batch.size)
    except Exception as error:
        message = _whole_batch_message(error, name, batch, timeout)
        if on_error == "raise":
            kind = TimeoutError if isinstance(error, OutOfTime) else ValueError
            where = _culprit(error, function, name, batch, timeout)
            raise kind(f"{message} {where}{_ADVICE}") from error
        skipped = np.full(batch.size, np.nan, "float32")
        return skipped, _entry(call.seconds, 0, batch.size, message)
    message = None
    if invalid:
        index, value = invalid[0]
        message = (
            f"The reward function {name!r} must return a finite number or "
            f"None for each completion. Received: {value!r} for "
            f"{batch.describe(index)}."
        )
        if isinstance(value, Failure):
            message = (
                f"The reward function {name!r} {value.reason} for "
                f"{batch.describe(index)}."
            )
        if on_error == "raise":
            raise ValueError(message + _ADVICE)
    not_judged = int(np.isnan(column).sum()) - len(invalid)
    return column, _entry(call.seconds, not_judged, len(invalid), message)


_ADVICE = (
    " Correct the function, or leave such rewards out: "
    'on_reward_error="skip" in `compile` (on_error="skip" in `run_rewards`).'
)


def _whole_batch_message(error, name, batch, timeout):
    if isinstance(error, results.WrongResult):
        return (
            f"The reward function {name!r} must return a list with a number "
            f"or None for each of the {batch.size} completions. Received: "
            f"{error}."
        )
    if isinstance(error, OutOfTime):
        return (
            f"The reward function {name!r} took longer than the limit of "
            f"{timeout} s for {batch.size} completions."
        )
    return (
        f"The reward function {name!r} raised {type(error).__name__}: {error}."
    )


def _culprit(error, function, name, batch, timeout):
    """Finds a failing completion by bisection, and describes it.

    The time limit of a part is in proportion to its size, so that the search
    after a timeout takes no longer than the limit.
    """
    if isinstance(error, results.WrongResult):
        return f"The first is {batch.describe(0)}."
    late = isinstance(error, OutOfTime)

    def fails(start, stop):
        limit = timeout
        if late:
            limit = timeout * (stop - start) / batch.size
        values = batch.choose(function, name, slice(start, stop))
        try:
            Call(function, values, limit).result()
        except Exception as again:
            return isinstance(again, type(error))
        return False

    low, high = 0, batch.size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(low, middle) else (middle, high)
    if batch.size > 1 and not fails(low, high):
        return (
            "No completion alone makes it fail; the first is "
            f"{batch.describe(0)}."
        )
    share = ""
    if late and batch.size > 1:
        share = f" (longer than its share of {timeout / batch.size:.3g} s)"
    return f"It fails{share} on {batch.describe(low)}."
