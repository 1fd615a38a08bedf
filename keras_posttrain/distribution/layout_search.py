"""Search over layouts and step settings by their plans."""

import itertools

from keras_posttrain.distribution import strategies as known
from keras_posttrain.distribution import topology as topologies
from keras_posttrain.distribution.plan_table import readable


class Search(tuple):
    """Plans sorted by whether they fit, then by tokens per second.

    `print` shows one line per plan.

    Attributes:
        refused: list of `(settings, error)` that could not be planned.
    """

    refused = ()

    def __str__(self):
        lines = [
            f"{'layout':<40} {'micro-batch':>11} {'remat':>5} "
            f"{'memory':>12} {'fits':>4} {'step':>9} {'tokens/s':>11}"
        ]
        for plan in self:
            seconds, rate = plan.step_seconds, plan.tokens_per_second
            needed = plan.needed
            lines.append(
                f"{plan.layout:<40} "
                f"{plan.settings['micro_batch_size']!s:>11} "
                f"{plan.settings['remat']:>5} "
                f"{'?' if needed is None else readable(needed):>12} "
                f"{'yes' if plan.fits else 'no':>4} "
                f"{'?' if seconds is None else f'{seconds:.3g} s':>9} "
                f"{'?' if rate is None else f'{rate:,.0f}':>11}"
            )
        lines += [f"not planned: {s}: {error}" for s, error in self.refused]
        return "\n".join(lines)


def search(
    task,
    topology,
    *,
    strategies=None,
    micro_batch_sizes=(None,),
    remats=("none", "full"),
    **kwargs,
):
    """Plans all combinations of layouts, micro-batches and remat settings.

    Args:
        task: an object with a method `plan`, such as a compiled
            `kpt.SFTTask`.
        topology: as in `plan`.
        strategies: list of values for `strategy` in `plan`; by default
            FSDP, and FSDP with 2 and with 4 devices along the model axis; on
            several slices these within each slice, and FSDP over all.
        micro_batch_sizes: list of values for `micro_batch_size` in `plan`.
        remats: list of values for `remat` in `plan`.
        **kwargs: the other arguments of `plan`, such as `batch_size`.

    Returns:
        A `Search`, a tuple of `Plan`s: those that fit first, then by
        estimated tokens per second.

    Raises:
        ValueError: if nothing could be planned; the first error.

    Example:

    ```python
    print(kpt.distribution.search(task, "cpu:8", batch_size=8))
    ```
    """
    if strategies is None:
        strategies = known.of_topology(topologies.get(topology))
    for name, values in (
        ("strategies", strategies),
        ("micro_batch_sizes", micro_batch_sizes),
        ("remats", remats),
    ):
        if not isinstance(values, (list, tuple)) or not values:
            raise ValueError(
                f"`{name}` must be a list of at least one value. "
                f"Received: {name}={values!r}"
            )
    plans, refused = [], []
    products = itertools.product(strategies, micro_batch_sizes, remats)
    for strategy, micro_batch_size, remat in products:
        settings = {
            "strategy": strategy,
            "micro_batch_size": micro_batch_size,
            "remat": remat,
        }
        try:
            plans.append(task.plan(topology, **settings, **kwargs))
        except ValueError as error:
            refused.append((_description(settings), error))
    if not plans:
        raise refused[0][1]

    def rank(plan):
        return not plan.fits, -(plan.tokens_per_second or 0.0)

    found = Search(sorted(plans, key=rank))
    found.refused = refused
    return found


def _description(settings):
    strategy = settings["strategy"]
    inner = getattr(strategy, "func", strategy)
    given = getattr(strategy, "keywords", {})
    name = getattr(inner, "__name__", str(inner))
    words = [f"{k}={v}" for k, v in given.items()]
    words += [f"{k}={v}" for k, v in settings.items() if k != "strategy"]
    return f"{name}({', '.join(words)})"
