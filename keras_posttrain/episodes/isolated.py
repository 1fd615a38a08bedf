"""Tools in processes of their own."""

import dataclasses
import inspect
import threading

from keras_posttrain.episodes import tool_text
from keras_posttrain.episodes.errors import EpisodeError, ToolError
from keras_posttrain.rewards import reward
from keras_posttrain.rewards.answers import check_seconds
from keras_posttrain.rewards.isolated import pickled
from keras_posttrain.rewards.lengths import check_count
from keras_posttrain.workers.pool import COUNT, Failure, Workers


@dataclasses.dataclass(frozen=True)
class Isolated:
    """A tool whose function runs in processes of bounded time and memory.

    Use it for functions that may hang, crash or hold the interpreter on what
    a model writes, such as regular expressions and symbolic mathematics. See
    `kpt.rewards.Isolated`, which does the same for rewards: the processes
    start with the first calls, are used again, and see only what `cloudpickle`
    takes along. This is no sandbox.

    Args:
        function: tool, sync or async.
        timeout: float, the seconds within which a call must end.
        max_bytes: int, the memory that a process may allocate once the
            function is loaded (of addresses; it is not limited on macOS).
        processes: int, the most calls at once; others wait.

    Raises:
        ValueError: if the function cannot be pickled.
        EpisodeError: by a call that takes too long or ends its process.

    Example:

    ```python
    def simplify(expression: str) -> str:
        \"\"\"Simplifies a formula.

        Args:
            expression: such as "x + x".
        \"\"\"
        import sympy

        return str(sympy.simplify(expression))

    tools = kpt.episodes.Tools([kpt.episodes.Isolated(simplify, timeout=5)])
    ```
    """

    function: object
    timeout: float = 10.0
    max_bytes: int = 2**32
    processes: int = COUNT
    limits_itself = True

    def __post_init__(self):
        reward.check_callable(self.function, "`function`")
        check_seconds("timeout", self.timeout)
        check_count("max_bytes", self.max_bytes, 1)
        check_count("processes", self.processes, 1)
        # Errors are found before the first rollout.
        function = tool_text.__file__, "load", pickled(self.function)
        limits = self.timeout, self.max_bytes, self.processes
        for name, value in {
            "_workers": Workers(function, *limits),
            "_free": threading.BoundedSemaphore(self.processes),
            # The model is shown the function.
            "__name__": reward.name(self.function),
            "__doc__": inspect.getdoc(self.function),
            "__wrapped__": self.function,
        }.items():
            object.__setattr__(self, name, value)

    def __reduce__(self):
        # A copy has its own processes.
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return Isolated, tuple(values)

    def __call__(self, **arguments):
        try:
            with self._free:
                result = self._workers.call(**arguments)
        except (OSError, RuntimeError) as error:
            raise EpisodeError(f"{self.__name__}: {error}") from error
        if not isinstance(result, Failure):
            return result
        reason = str(result)
        if reason.startswith("raised "):
            raise ToolError(reason.removeprefix("raised "))
        raise EpisodeError(f"The tool {self.__name__!r} {reason}.")
