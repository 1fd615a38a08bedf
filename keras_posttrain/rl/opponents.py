"""The opponents of a run that sample."""

import dataclasses

from keras_posttrain.distribution import processes
from keras_posttrain.episodes.opponents import Frozen
from keras_posttrain.rollout import NativeRollout, Rollout


@dataclasses.dataclass(eq=False)
class FrozenOpponent:
    """A copy of the policy that plays, and that is renewed now and then.

    Args:
        settings: `Frozen`.
        engine: `NativeRollout` that samples from it.
        copy: `FrozenPolicy`, a copy of what is trained.
        trainable: list of the task's trainable variables.
    """

    settings: Frozen
    engine: NativeRollout
    copy: object
    trainable: list

    def after(self, rollouts):
        """Renews the copy after a number of rollouts, if it is time."""
        if rollouts % self.settings.every == 0:
            self.copy.update(1.0)
            self.use()

    def use(self):
        """Makes the engine sample from the copy."""
        values = {
            id(v): x for v, x in zip(self.copy.variables, self.copy.values)
        }
        self.engine.set_weights(
            [values.get(id(v), v.value) for v in self.trainable]
        )


def make_opponents(episode, engine, task, copy):
    """Makes the opponents of a run that sample.

    Args:
        episode: `Episode`, or `None`.
        engine: `Rollout` of the policy.
        task: the task, for the engines.
        copy: function without arguments to a `FrozenPolicy`.

    Returns:
        Two dicts by player: of engines and of `FrozenOpponent`s.
    """
    engines, frozen = {}, {}
    for name, opponent in episode.opponents.items() if episode else ():
        if isinstance(opponent, Rollout):
            if opponent.model is None:
                raise ValueError(
                    "An engine that plays must have a model. Received: "
                    f"opponents={{{name!r}: {type(opponent).__name__}}}. Call "
                    "its `set_model(task)` first."
                )
            if opponent.uses_devices and processes.count() > 1:
                # Its session and the policy's start programs in two threads.
                raise ValueError(
                    "In several processes an opponent is a server "
                    "(`kpt.rollout.VLLMRollout(url=...)`) or a function: two "
                    "engines on JAX's devices could wait for each other "
                    f"forever. Received: opponents={{{name!r}: "
                    f"{type(opponent).__name__}}}, {processes.count()} "
                    "processes"
                )
            engines[name] = opponent
        elif isinstance(opponent, Frozen):
            if not isinstance(engine, NativeRollout) or processes.count() > 1:
                raise ValueError(
                    "`Frozen` needs `kpt.rollout.NativeRollout()` and one "
                    f"process. Received: rollout={type(engine).__name__}, "
                    f"{processes.count()} processes. Use an engine of its "
                    "own, or a function, as the opponent."
                )
            if engine.model is not task:
                engine.set_model(task)
            player = FrozenOpponent(
                opponent, engine.frozen(), copy(), task.trainable_variables
            )
            player.use()
            engines[name], frozen[name] = player.engine, player
        elif not callable(opponent):
            raise ValueError(
                "An opponent must be `kpt.episodes.Frozen()`, an engine, or a "
                "function of messages to a text. Received: "
                f"opponents={{{name!r}: {opponent!r}}}"
            )
    return engines, frozen
