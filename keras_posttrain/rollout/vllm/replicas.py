"""Several vLLM servers with the same weights, as one engine."""

import concurrent.futures
import contextlib
import hashlib
import threading
import time

import numpy as np

from keras_posttrain import _console
from keras_posttrain.distribution import processes
from keras_posttrain.rollout.vllm import http
from keras_posttrain.rollout.vllm.jobs import EngineFailure
from keras_posttrain.rollout.vllm.server import IN_FLIGHT, run_in_threads

# Tokens of a block of a prompt by which its replica is found again.
BLOCK = 64
# Beginnings of prompts whose replicas are remembered.
MAX_BLOCKS = 1_000_000
# Samples that a replica may have more than another to use its prefix cache:
# at least this many, or this part of those of the other.
SLACK, SLACK_PART = 8, 0.25
# Seconds in which a replica that was lost must answer to be used again.
RETURN_SECONDS = 2
# The interval at which servers are asked while none is left.
WAIT_SECONDS = 0.5


class Replica:
    """A server and what is known of it.

    Attributes:
        server: `ServerEngine`.
        running: int, its samples at the moment.
        lost: `EngineFailure` since which it is not used, or `None`.
    """

    def __init__(self, server):
        self.server, self.running, self.lost = server, 0, None


class ReplicatedEngine:
    """Servers among which requests are spread.

    A request goes to the replica that has computed more than half of its
    prompt, if this one is not busier than others, else to the least busy one.
    The samples of a prompt stay together. A replica that fails, or that
    samples from other weights than those sent last, is lost: its requests are
    sampled again by the others. Each sync of weights looks whether lost
    replicas answer again and brings them up to date before they are used.

    Args:
        servers: list of `ServerEngine`s, which run already.
        sender: the `FullPush` or `DeltaPush` of their weights.
    """

    def __init__(self, servers, sender):
        self.sender = sender
        self.replicas = [Replica(server) for server in servers]
        self._lock = threading.Lock()
        self._weights = self._tensors = self._version = None
        # The replica that last computed a prefix, by the prefix' digest.
        self._prefixes = {}
        # With several processes each begins with another one.
        first = processes.share(len(servers)).start
        self._order = self.replicas[first:] + self.replicas[:first]

    @property
    def used(self):
        """The replicas that are not lost."""
        return [r for r in self.replicas if r.lost is None]

    # The processes

    def start(self):
        self._on_each(self.replicas, lambda r: r.server.start(), strict=True)

    def stop(self):
        for replica in self.replicas:
            replica.server.stop()

    def restart(self):
        """Uses all replicas that answer; waits until one does."""
        for replica in self.replicas:
            replica.server.held = None
        limit = time.monotonic() + self.replicas[0].server.timeout
        self._return()
        while not self.used:
            if time.monotonic() > limit:
                raise self.replicas[0].lost
            time.sleep(WAIT_SECONDS)
            self._return()

    def tensors(self):
        found = [r.server.tensors() for r in self.replicas]
        for replica, tensors in zip(self.replicas, found):
            if tensors != found[0]:
                raise ValueError(
                    "All servers of `urls` must serve the same model. "
                    f"{replica.server.url} has other weights than "
                    f"{self.replicas[0].server.url}."
                )
        self._tensors = found[0]
        return found[0]

    def _on_each(self, replicas, f, strict=False):
        """Calls `f` for replicas in parallel; those where it fails are lost.

        The last failure is raised if `strict`, or if none is left.
        """
        if not replicas:
            raise self.replicas[0].lost
        with concurrent.futures.ThreadPoolExecutor(len(replicas)) as pool:
            futures = [pool.submit(f, replica) for replica in replicas]
        results = []
        for replica, future in zip(replicas, futures):
            try:
                results.append(future.result())
            except EngineFailure as error:
                self._lose(replica, error)
                if strict or not self.used:
                    raise
        return results

    def _lose(self, replica, error):
        with self._lock:
            if replica.lost is not None:
                return
            replica.lost, replica.server.held = error, None
            self._prefixes = {
                k: v for k, v in self._prefixes.items() if v is not replica
            }
        _console.say(
            f"vLLM: the server at {replica.server.url} is lost "
            f"({len(self.used)} of {len(self.replicas)} left): {error}"
        )

    def _return(self):
        """Looks whether lost replicas answer, and uses those again."""
        lost = [r for r in self.replicas if r.lost is not None]
        if lost:
            with concurrent.futures.ThreadPoolExecutor(len(lost)) as pool:
                list(pool.map(self._take_back, lost))

    def _take_back(self, replica):
        server = replica.server
        try:
            server.check_health(RETURN_SECONDS)
            server.start()
            if server.tensors() != self._tensors:
                raise EngineFailure(f"{server.url} serves another model.")
        except (EngineFailure, ValueError) as error:
            # A `ValueError` if it refuses the key.
            error = EngineFailure(str(error))
            if str(error) != str(replica.lost):
                _console.say(f"vLLM: not used again, {error}")
            replica.lost = error
            return
        replica.lost = None
        _console.say(
            f"vLLM: the server at {server.url} answers again and gets the "
            "weights"
        )

    # Several processes

    def state(self):
        """Returns what other processes need to send requests."""
        servers = [
            {**r.server.state(), "lost": r.lost and str(r.lost)}
            for r in self.replicas
        ]
        return {"version": self._version, "servers": servers}

    def adopt(self, state):
        """Sends requests as the process whose `state` this is."""
        for replica, own in zip(self.replicas, state["servers"]):
            replica.server.adopt(own)
            lost = own["lost"]
            replica.lost = None if lost is None else EngineFailure(lost)
        self._sent(state["version"])

    @property
    def servers(self):
        return [replica.server for replica in self.replicas]

    def losses(self):
        """Returns what `lose` takes in another process."""
        lost = enumerate(r.lost for r in self.replicas)
        return [(i, str(error)) for i, error in lost if error is not None]

    def lose(self, losses):
        """Does not use replicas that another process has lost.

        They get all weights with the next sync.
        """
        for i, text in losses:
            self._lose(self.replicas[i], EngineFailure(text))

    # Weights

    def push(self, weights, version):
        """Loads all weights and returns the bytes moved."""
        self._weights = weights
        self._return()
        moved = self._push(self.used, version)
        self._sent(version)
        return moved

    def _push(self, replicas, version):
        """Sends all weights to replicas; returns the bytes moved."""

        def on_each(servers, f):
            wanted = [r for r in replicas if r.server in servers]
            self._on_each(wanted, lambda r: f(r.server))

        servers = [r.server for r in replicas]
        return self.sender(self._weights, version, servers, on_each)

    def push_adapter(self, directory, version):
        """Loads an adapter from the directory of its files."""
        self._return()
        base = [r for r in self.used if r.server.held is None]
        self._push(base, version)
        self._on_each(
            self.used, lambda r: r.server.push_adapter(directory, version)
        )
        self._sent(version)

    def _sent(self, version):
        self._version = version
        with self._lock:
            # New weights empty the servers' prefix caches.
            self._prefixes = {}

    # Sampling

    def run(self, jobs, on_tokens=None, interrupted=None, more=None):
        """Runs jobs as `ServerEngine.run` does."""
        return run_in_threads(
            self, IN_FLIGHT * len(self.used), jobs, on_tokens, interrupted,
            more,
        )  # fmt: skip

    def run_on_each(self, job):
        """Runs a job on each replica; returns the results."""
        connections = http.Connections()
        return self._on_each(
            self.used, lambda r: r.server.run_job(job, connections)
        )

    def run_job(self, job, connections):
        """Runs a job on one replica, and on another if that one is lost."""
        digests = prefix_digests(job.token_ids)
        while True:
            replica = self._begin(digests, job.params["n"])
            try:
                result = replica.server.run_job(job, connections)
                unknown = result.versions - {self._version}
                if unknown:
                    raise EngineFailure(
                        f"{replica.server.url} sampled from weights "
                        f"{sorted(unknown)}, not from those sent last, "
                        f"{self._version!r}."
                    )
                return result
            except EngineFailure as error:
                if connections.closed:
                    raise
                self._lose(replica, error)
            finally:
                with self._lock:
                    replica.running -= job.params["n"]

    def _begin(self, digests, samples):
        """Returns the replica for a prompt, with its samples counted."""
        with self._lock:
            used = [r for r in self._order if r.lost is None]
            if not used:
                raise EngineFailure(
                    f"No server of `urls` is left, the last with: "
                    f"{self.replicas[0].lost}"
                )
            # A beginning that many prompts share keeps no replica.
            known = next(
                (
                    self._prefixes[digest]
                    for digest in reversed(digests[len(digests) // 2 :])
                    if digest in self._prefixes
                ),
                None,
            )
            replica = min(used, key=lambda r: r.running)
            slack = max(SLACK, SLACK_PART * replica.running)
            if known and known.running <= replica.running + slack:
                replica = known
            replica.running += samples
            if len(self._prefixes) > MAX_BLOCKS:
                self._prefixes = {}
            self._prefixes |= dict.fromkeys(digests, replica)
            return replica

    def abort(self):
        """Ends running requests; they have the tokens sampled so far."""
        for replica in self.used:
            # Its requests will find that it is lost.
            with contextlib.suppress(EngineFailure):
                replica.server.abort()


def prefix_digests(token_ids):
    """Returns a digest of each prefix of whole blocks, the shortest first."""
    ids, digest, found = np.asarray(token_ids, "int64"), b"", []
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        block = ids[end - BLOCK : end].tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=16).digest()
        found.append(digest)
    return found
