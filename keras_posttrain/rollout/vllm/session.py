"""Conversations of several turns in vLLM's running batch."""

import itertools
import time

from keras_posttrain.distribution import processes
from keras_posttrain.rollout.session import POLL_SECONDS, Session


class VLLMSession(Session):
    """A session whose turns join the requests that vLLM samples.

    vLLM's prefix cache keeps what a conversation has computed, in whole
    blocks, until new weights arrive. With several processes each sends its
    own requests. If the engine fails one of them, all restart it once the
    others have failed too or have closed the session.

    Args:
        engine: `VLLMRollout`.
        sample: `VLLMRollout._sample`.
        repeat: `VLLMRollout._repeat`.
    """

    _samples_alone = True

    def __init__(self, engine, sample, repeat):
        super().__init__(engine)
        self._sample, self._repeat = sample, repeat
        self._keys = itertools.count()
        # What is sampled, by key, and what new weights have interrupted:
        # pairs `(request, places)`.
        self._waiting, self._rest = {}, []

    def run(self):
        if processes.count() == 1:
            self._serve()
            return
        with self.engine.scope():
            while not self._repeat(self._serve_once, lambda: None):
                # Also if this process has closed the session: others may
                # have turns left.
                while self.engine.needs_weights:
                    time.sleep(POLL_SECONDS)

    def _serve_once(self):
        self._serve(once=True)

    def _serve(self, once=False):
        """Samples until the session ends.

        `once` is whether a failure of the engine is raised.
        """
        # What an engine had that has failed.
        self._rest += self._waiting.values()
        self._waiting.clear()
        while (new := self.next(is_busy=bool(self._rest))) is not None:
            with self.engine.turn:
                pending, self._rest = self._rest + _whole(new[0]), []
                self._sample_all(pending, once)

    def _sample_all(self, pending, once):
        """Samples what is pending and what joins it."""

        def keyed(pairs):
            new = {next(self._keys): pair for pair in pairs}
            self._waiting.update(new)
            return {key: request for key, (request, _) in new.items()}

        def take(key, samples):
            self._rest += self._take([self._waiting.pop(key)], [samples])

        self._sample(
            keyed(pending),
            take,
            ends=lambda: self.closed or self.engine.is_interrupted,
            more=lambda: keyed(_whole(self.submitted())),
            once=once,
        )


def _whole(turns):
    return [turn.whole() for turn in turns]
