"""Rows and rewards of reasoning-gym's generated tasks."""

import numbers
import warnings

from keras_posttrain.rewards.reward import completion_text
from keras_posttrain.training import checks


def reasoning_gym(name, *, size=500, seed=0, answer=None, **config):
    """Generates rows of [reasoning-gym](
    https://github.com/open-thought/reasoning-gym), with their reward.

    The rows are for `fit` and `evaluate` of `kpt.GRPOTask` and `kpt.PPOTask`;
    the reward is the library's own `score_answer` of the dataset that made
    them. The same arguments give the same rows, so that a run resumes.

    Args:
        name: string, a dataset such as `"chain_sum"`; or a dict from such
            names to their weights, for a mixture of datasets.
        size: int, rows.
        seed: int, of the rows. Pass another one for rows to evaluate on.
        answer: function from a completion's text to the answer in it, or
            `None` for the whole text without the spaces around it.
        **config: settings of the dataset, such as `min_terms=2`. Of a mixture
            each is a dict by the dataset's name.

    Returns:
        Tuple `(rows, reward)`: a list of dicts with `prompt` (messages),
        `answer` (the library's own, a string), `dataset` (its name) and
        `entry` (the row's number); and a function for `compile(rewards=[...])`
        that gives a score from 0 to 1. It gives 0, and warns once for each
        dataset, where the library cannot score an answer.

    Raises:
        ImportError: the library is not installed; it comes with the extra
            `reasoning-gym`.
        ValueError: an unknown dataset, or a setting that it refuses.

    Example:

    ```python
    rows, score = kpt.evaluation.reasoning_gym("chain_sum", size=8)
    task.compile(
        rewards=[score], num_generations=8, max_completion_length=16
    )
    task.fit(rows)
    task.evaluate(rows)
    ```
    """
    # The library is an extra.
    try:
        import reasoning_gym as library
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(
            "`kpt.evaluation.reasoning_gym` needs reasoning-gym. Install it "
            "with `pip install keras_posttrain[reasoning-gym]`."
        ) from error
    checks.positive_int("size", size)
    seed = checks.seed(seed)
    if answer is not None and not callable(answer):
        raise ValueError(
            "`answer` must be a function of a completion's text, or None. "
            f"Received: answer={answer!r}"
        )
    weights = _weights(name, DATASETS)
    if isinstance(name, dict):
        unknown = sorted(set(config) - set(name))
        if unknown or not all(isinstance(c, dict) for c in config.values()):
            raise ValueError(
                "Settings of a mixture must be dicts by the names of its "
                f"datasets, {sorted(name)}. Received: {config!r:.200}"
            )
        specs = [
            DatasetSpec(name=n, weight=float(w), config=config.get(n, {}))
            for n, w in weights.items()
        ]
        name, config = "composite", {"datasets": specs}
    try:
        dataset = library.create_dataset(name, size=size, seed=seed, **config)
        entries = [dataset[i] for i in range(size)]
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            "The settings must be those that reasoning-gym's dataset takes. "
            f"Received: name={name!r}, {config!r:.200}. It says: {error}"
        ) from error
    rows = [
        {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "answer": str(entry["answer"]),
            "dataset": entry["metadata"].get("source_dataset", name),
            "entry": i,
        }
        for i, entry in enumerate(entries)
    ]
    return rows, _Score(dataset, entries, rows, answer)


def _weights(name, known):
    weights = name if isinstance(name, dict) else {name: 1}
    unknown = [n for n in weights if n not in known or n == "composite"]
    if unknown or not weights:
        raise ValueError(
            "`name` must be a dataset of reasoning-gym, or a dict from such "
            f"names to weights. Received: name={name!r}. The datasets are: "
            f"{', '.join(sorted(known))}"
        )
    wrong = [
        w
        for w in weights.values()
        if not isinstance(w, numbers.Real) or not 0 < w < float("inf")
    ]
    if wrong:
        raise ValueError(
            f"Weights must be positive numbers. Received: {weights!r}"
        )
    return weights


class _Score:
    """The reward: scores completions by the dataset that made the rows.

    The dataset is kept, because some scorers read its settings.
    """

    __name__ = "reasoning_gym"

    def __init__(self, dataset, entries, rows, answer):
        self._dataset, self._entries, self._rows = dataset, entries, rows
        self._answer, self._warned = answer, set()

    def __call__(self, completions, entry, answer, **columns):
        found = []
        for completion, i, own in zip(completions, entry, answer):
            if i >= len(self._rows) or self._rows[i]["answer"] != own:
                raise ValueError(
                    "The reward scores the rows that were made with it. "
                    f"Received: a row with entry={i}, answer={own!r:.80}"
                )
            found.append(self._score(completion_text(completion), i))
        return found

    def _score(self, text, i):
        text = text.strip() if self._answer is None else self._answer(text)
        try:
            return float(self._dataset.score_answer(text, self._entries[i]))
        except Exception as error:
            name = self._rows[i]["dataset"]
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"reasoning-gym's scorer of {name!r} failed on "
                    f"{text!r:.80}, which counts as 0: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )
            return 0.0
