"""Sends all weights of a model to vLLM's servers, through files."""

import contextlib
import pathlib
import shutil

from keras_posttrain import _console
from keras_posttrain.rollout.vllm import difference


class FullPush:
    """Sends all tensors at each push.

    `folder` is a path that all servers read.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def __call__(self, weights, version, servers, on_each):
        """Sends weights to servers; returns the bytes sent.

        Args:
            weights: `Weights`.
            version: str, the name of these weights.
            servers: list of `ServerEngine`s.
            on_each: function that calls a function for each server of a list.
        """
        if not servers:
            return 0
        count = len(weights.table)
        with self._folder(version) as folder:
            weights.write(folder)
            on_each(servers, lambda s: s.load(folder, count, version))
        return weights.num_bytes * len(servers)

    @contextlib.contextmanager
    def _folder(self, version):
        """A scope with a path for files, which are removed at its end."""
        folder = self.folder / f"weights-{version}"
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class DeltaPush(FullPush):
    """Sends what has changed since the push before.

    This object and each worker process of a server keep a copy of all
    tensors in the host's memory. A server that does not have the weights of
    the push before, or whose result has another checksum, gets all tensors.
    """

    def __init__(self, folder):
        super().__init__(folder)
        self._version, self._arrays = None, {}
        self._reported = set()

    def __call__(self, weights, version, servers, on_each):
        base, rest, moved = self._version, list(servers), 0
        ready = [s for s in servers if base and s.held == base]
        if ready:
            with self._folder(f"difference-{version}") as folder:
                size = self._update(weights, version, folder)
                refused = self._send(folder, weights, version, ready, on_each)
            moved = size * len(ready)
            rest = [s for s in rest if s not in ready or s in refused]
        else:
            self._update(weights, version)
        return moved + self._send_all(weights, version, rest, on_each)

    def _update(self, weights, version, folder=None):
        """Takes new weights; returns the bytes of the difference.

        It is written to `folder`, if there is one.
        """
        base, self._version = self._version, None

        def pairs():
            for name, array in weights.arrays():
                old = self._arrays.get(name)
                self._arrays[name] = array
                yield name, old, array

        size = 0
        if folder is None:
            for _ in pairs():
                pass
        else:
            size = difference.write(folder, base, version, pairs())
        self._version = version
        return size

    def _send(self, folder, weights, version, servers, on_each):
        """Sends a difference; returns the servers that have refused it."""
        refused, count = [], len(weights.table)

        def load(server):
            reason = server.load_difference(folder, count, version)
            if reason is not None:
                refused.append(server)
                self._report(server, reason)

        on_each(servers, load)
        return refused

    def _report(self, server, reason):
        if server.url not in self._reported:
            self._reported.add(server.url)
            _console.say(
                f"vLLM: the server at {server.url} gets all weights, as the "
                f"difference does not fit what it has ({reason}); this is "
                "reported once"
            )

    def _send_all(self, weights, version, servers, on_each):
        if not servers:
            return 0
        count = len(weights.table)
        with self._folder(version) as folder:
            weights.write(folder, self._arrays)
            on_each(
                servers, lambda s: s.load(folder, count, version, keep=True)
            )
        return weights.num_bytes * len(servers)
