"""Conversations of several turns in the slots of the built-in engine."""

from keras_posttrain.rollout.native.samples import Samples
from keras_posttrain.rollout.session import Session


class NativeSession(Session):
    """A session whose turns join the running batch.

    The keys and values of a conversation stay in its slot between two turns,
    as long as there are slots. The next turn computes what was said since;
    tokens with which another conversation begins are copied. Where layers are
    recurrent, or a conversation is longer than a sliding window, that is so
    for prompts that come together and for all tokens of a slot. When slots
    run out, the one that was not used for longest is given away, and what it
    held is computed again and counted (`counts`).

    Args:
        engine: `NativeRollout`.
        make: function without arguments that returns a `Schedule`.
        weights: function without arguments that returns the `Weights` to
            sample from.
    """

    def __init__(self, engine, make, weights):
        super().__init__(engine)
        self._make, self._weights = make, weights
        self.counts = None

    def run(self):
        with self.engine.scope():
            self._run()

    def _run(self):
        engine = self.engine
        schedule = weights = version = None
        try:
            while True:
                busy = schedule is not None and schedule.is_busy
                if (new := self.next(busy)) is None:
                    return
                with engine.turn:
                    if schedule is None:
                        schedule = self._make()
                        self.counts = schedule.counts
                    if version != engine.weight_version:
                        schedule.clear()
                        version = engine.weight_version
                        weights = self._weights()
                    self._advance(schedule, weights, version, *new)
        finally:
            if schedule is not None:
                schedule.clear()

    def _advance(self, schedule, weights, version, turns, released):
        for turn in turns:
            samples = Samples([turn.request])
            for sample in samples:
                sample.turn = turn
            schedule.add(samples)
        for token_ids in released:
            schedule.release(token_ids)
        if not schedule.is_busy or self.engine.is_interrupted:
            return
        for sample in schedule.advance(weights, version, keep=True):
            turn = sample.turn
            turn.parts[sample.generation] = [sample.completion(version)]
            if all(turn.parts):
                self.resolve(turn)
