"""Conversations of several turns in vLLM's running batch."""

import itertools

from keras_posttrain.rollout.session import Session


class VLLMSession(Session):
    """A session whose turns join the requests that vLLM samples.

    vLLM's prefix cache keeps what a conversation has computed, in whole
    blocks, until new weights arrive.

    Args:
        engine: `VLLMRollout`.
        sample: function of a dict of requests to pairs of a key and its
            completions; `VLLMRollout._sample`.
    """

    def __init__(self, engine, sample):
        super().__init__(engine)
        self._sample, self._keys = sample, itertools.count()

    def run(self):
        rest = []
        while (new := self.next(is_busy=bool(rest))) is not None:
            with self.engine.turn:
                rest = self._sample_all(rest + _whole(new[0]))

    def _sample_all(self, pending):
        """Samples what is pending and what joins it.

        Returns:
            What new weights have interrupted, pairs `(request, places)`.
        """
        waiting, rest = {}, []

        def keyed(pairs):
            new = {next(self._keys): pair for pair in pairs}
            waiting.update(new)
            return {key: request for key, (request, _) in new.items()}

        found = self._sample(
            keyed(pending),
            ends=lambda: self.closed or self.engine.is_interrupted,
            more=lambda: keyed(_whole(self.submitted())),
        )
        for key, samples in found:
            rest += self._take([waiting.pop(key)], [samples])
        return rest


def _whole(turns):
    return [turn.whole() for turn in turns]
