"""Reward functions in processes of their own."""

import dataclasses
import functools

from keras_posttrain.rewards import reward
from keras_posttrain.rewards.answers import check_seconds
from keras_posttrain.rewards.lengths import check_count
from keras_posttrain.rewards.reward import Reward
from keras_posttrain.workers.pool import Workers


@dataclasses.dataclass(frozen=True)
class Isolated(Reward):
    """A reward whose function runs in processes of bounded time and memory.

    Use it for functions that run or parse what the model wrote. A completion
    on which the function takes too long, needs too much memory, raises an
    exception or ends its process costs only its own reward: an error names
    it, or with `on_reward_error="skip"` it is left out. The process is killed
    and replaced. This is no sandbox: the function may do all that the user
    may do.

    The function is called for one completion at a time, with lists of length
    one, in several processes at once. These are started by the first call and
    end with this process. They know of the function what `cloudpickle` takes
    along, have no accelerator and share no memory with this process. They
    start faster if the module of the function does not import this package.

    Args:
        function: reward function, sync or async, see `Reward`.
        timeout: float, the seconds within which a call must end.
        max_bytes: int, the memory that a process may allocate once the
            function is loaded (of addresses; it is not limited on macOS).

    Raises:
        ValueError: if the function cannot be pickled.

    Example:

    ```python
    def passes(completions, test, **columns):
        scope = {}
        exec(completions[0] + test[0], scope)
        return [float(scope["passed"])]

    task.compile(rewards=[kpt.rewards.Isolated(passes, timeout=5)])
    ```
    """

    function: object
    timeout: float = 10.0
    max_bytes: int = 2**32

    def __post_init__(self):
        reward.check_callable(self.function, "`function`")
        check_seconds("timeout", self.timeout)
        check_count("max_bytes", self.max_bytes, 1)
        # Errors are found before the first rollout.
        self._workers  # noqa: B018

    @functools.cached_property
    def _workers(self):
        return Workers(pickled(self.function), self.timeout, self.max_bytes)

    @property
    def _inner(self):
        return self.function

    @property
    def needs(self):
        required = reward.arguments(self.function).required
        return tuple(dict.fromkeys(("completions", *required)))

    def __call__(self, prompts=None, completions=None, **columns):
        columns |= {"prompts": prompts, "completions": completions}
        given = {k: v for k, v in columns.items() if v is not None}
        given = reward.arguments(self.function).choose(given)
        return self._workers.map(
            [
                {name: [values[i]] for name, values in given.items()}
                for i in range(len(completions))
            ]
        )


def pickled(function):
    """Pickles a function of the user's script, or raises a `ValueError`."""
    try:
        # A dependency of Grain.
        import cloudpickle
    except ImportError:
        raise ImportError(
            "`Isolated` needs the package cloudpickle. Install it: "
            "`pip install cloudpickle`."
        ) from None
    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        raise ValueError(
            "`function` must be a function that can be pickled. Received: "
            f"function={function!r}, {type(error).__name__}: "
            f"{error}. Create locks, connections and models inside it."
        ) from error
