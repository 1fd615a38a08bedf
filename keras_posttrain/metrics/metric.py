"""The base class of metrics of completions, and their standard errors."""

import inspect
import math
import numbers

import numpy as np

# Resamples of a bootstrap, and their seed: the same rows, the same error.
RESAMPLES, SEED = 1000, 0


class Metric:
    """Base class of metrics for `task.evaluate(metrics=[...])`.

    A metric turns each row into one or more numbers (`measure`), and their
    sums over all rows into one value (`value`). By default a row has one
    number, and the value is its mean. A plain function can be a metric too:
    it is called for each row with those of the arguments `prediction` (the
    sampled text), `reference` (the row's own completion), `references` (a
    list: that one, and those of the row's column `references`) and `prompt`
    that its signature names, and returns a number, or `None` for a row that
    it does not score.

    `evaluate` returns, with the metric's `name`:

    - `name`: the value.
    - `name/stderr`: its standard error: of a mean the standard deviation of
      the rows over the square root of their number, of other values that of
      1,000 bootstrap resamples of the rows, with a fixed seed. NaN of fewer
      than two rows.
    - `name/n`: the number of rows that were scored.
    - `name/failed`: the number of rows without a score.

    Attributes:
        name: str, the name in the results.
        reads: `"text"` for a metric of sampled completions, or
            `"log_probs"` for one of the rows' own tokens.
        is_mean: bool, whether `value` is the mean of a single number.

    Example:

    ```python
    class Length(kpt.metrics.Metric):
        def measure(self, prediction, references, prompt):
            return len(prediction)

    task.evaluate(rows, metrics=[Length()])["length/n"]  # 16
    ```
    """

    reads = "text"
    is_mean = True

    @property
    def name(self):
        return type(self).__name__.lower()

    def measure(self, prediction, references, prompt):
        """Measures a row.

        Args:
            prediction: str, the sampled completion.
            references: list of str, of which the first is the row's own
                completion.
            prompt: str.

        Returns:
            A number or a list of numbers, of the same length for each row,
            or `None` for a row without a score.
        """
        raise NotImplementedError

    def value(self, sums, count):
        """Computes the value from the sums of the rows' numbers.

        Args:
            sums: float array of shape `(numbers,)`.
            count: int, the rows.
        """
        return float(sums[0]) / count


class FunctionMetric(Metric):
    """A function of a user as a `Metric`."""

    arguments = ("prediction", "reference", "references", "prompt")

    def __init__(self, function):
        self.function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            parameters = []
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [
            p
            for p in parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        unknown = [
            p.name
            for p in named
            if p.name not in self.arguments and p.default is p.empty
        ]
        names = [p.name for p in named if p.name in self.arguments]
        if unknown or not (names or takes_all):
            raise ValueError(
                "A metric must be a `kpt.metrics.Metric`, or a function whose "
                f"arguments are named among {self.arguments}. Received: "
                f"{self.name!r} with the arguments "
                f"{[p.name for p in parameters]}"
            )
        self.names = self.arguments if takes_all else names

    @property
    def name(self):
        kind = type(self.function).__name__
        return getattr(self.function, "__name__", kind)

    def measure(self, prediction, references, prompt):
        given = {
            "prediction": prediction,
            "reference": references[0],
            "references": references,
            "prompt": prompt,
        }
        return self.function(**{name: given[name] for name in self.names})


def as_metrics(metrics):
    """Returns the list of `Metric`s for what a user passed.

    Raises:
        ValueError: for anything else, and for two of one name.
    """
    if isinstance(metrics, Metric) or callable(metrics):
        metrics = [metrics]
    if not isinstance(metrics, (list, tuple)):
        raise ValueError(
            "`metrics` must be a list of metrics such as "
            f"`kpt.metrics.BLEU()`. Received: metrics={metrics!r}"
        )
    found = []
    for i, metric in enumerate(metrics):
        if isinstance(metric, type):
            raise ValueError(
                f"`metrics[{i}]` must be an object. Received: the class "
                f"{metric.__name__!r}. Pass `{metric.__name__}()`."
            )
        if not isinstance(metric, Metric):
            if not callable(metric):
                raise ValueError(
                    f"`metrics[{i}]` must be a `kpt.metrics.Metric` or a "
                    f"function. Received: {metric!r}"
                )
            metric = FunctionMetric(metric)
        if metric.name in [m.name for m in found]:
            raise ValueError(
                "Metrics must have different names. Received: two of the "
                f"name {metric.name!r}. Give one a subclass with a `name` of "
                "its own."
            )
        found.append(metric)
    return found


def measure_texts(metric, samples):
    """Returns a metric's numbers for each sample, or `None`.

    `samples` are dicts of `prompt`, `completion` and `references`.
    """
    found = []
    for row, sample in enumerate(samples):
        try:
            numbers_ = metric.measure(
                sample["completion"], sample["references"], sample["prompt"]
            )
        except Exception as error:
            raise ValueError(
                f"The metric {metric.name!r} raised {type(error).__name__}: "
                f"{error}. It fails on row {row}, completion="
                f"{sample['completion']!r:.80}."
            ) from error
        found.append(_floats(metric, row, numbers_))
    return found


def _floats(metric, row, found):
    """Returns a list of floats, or `None` where one is not finite."""
    if found is None:
        return None
    is_one = isinstance(found, numbers.Real) or np.ndim(found) == 0
    each = [found] if is_one else list(found)
    if not each or not all(
        isinstance(x, (numbers.Real, np.generic)) for x in each
    ):
        raise ValueError(
            f"The metric {metric.name!r} must return a number for each row, "
            f"or None. Received: {found!r:.80} for row {row}."
        )
    each = [float(x) for x in each]
    return each if all(map(math.isfinite, each)) else None


def summarize(metric, measured):
    """Computes the results of a metric, a dict of floats.

    `measured` has a list of floats for each row, or `None`.
    """
    rows = np.array([x for x in measured if x is not None], np.float64)
    value = error = math.nan
    count = len(rows)
    if count:
        value = float(metric.value(rows.sum(0), count))
    if count > 1 and metric.is_mean:
        error = float(rows[:, 0].std(ddof=1) / math.sqrt(count))
    elif count > 1:
        error = bootstrap_error(metric.value, rows)
    return {
        metric.name: value,
        f"{metric.name}/stderr": error,
        f"{metric.name}/n": float(count),
        f"{metric.name}/failed": float(len(measured) - count),
    }


def bootstrap_error(value, rows):
    """Computes the standard error of a function of sums of rows.

    `value` is that of a `Metric`, `rows` a float array `(rows, numbers)`.
    """
    count, rng = len(rows), np.random.default_rng(SEED)
    values = [
        value(rows[rng.integers(count, size=count)].sum(0), count)
        for _ in range(RESAMPLES)
    ]
    return float(np.std(values, ddof=1))
