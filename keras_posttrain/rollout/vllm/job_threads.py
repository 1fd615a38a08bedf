"""Jobs of vLLM in threads, each of which waits for a server's answer."""

import concurrent.futures

from keras_posttrain.rollout.vllm.http import Connections
from keras_posttrain.rollout.vllm.jobs import Result

# The interval of checks for an interruption and for further requests.
POLL_SECONDS = 0.02


def run(jobs, run_job, abort, in_flight, on_tokens, interrupted, more):
    """Runs jobs as `LocalEngine.run` does.

    Args:
        jobs: dict of `Job`s.
        run_job: function `(job, connections) -> Result`, called in threads.
        abort: function without arguments that makes running jobs end early,
            with the tokens sampled so far; `None` to end them without those.
        in_flight: int, samples at once; others wait for them.
        on_tokens: function or `None`; it gets the tokens of a sample when its
            job has ended.
        interrupted: function or `None`.
        more: function or `None`.
    """
    most = max([job.params["n"] for job in jobs.values()], default=1)
    workers = max(1, in_flight // most)
    if more is None:
        workers = min(workers, max(1, len(jobs)))
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    connections, keys = Connections(), {}

    def add(jobs):
        for key, job in jobs.items():
            future = pool.submit(run_job, job, connections)
            keys[future] = key, job.params["n"]

    try:
        add(jobs)
        while keys:
            if more is not None:
                add(more())
            if abort is None and interrupted is not None and interrupted():
                for key, samples in keys.values():
                    yield key, Result(samples)
                return
            for future in _ended(list(keys), interrupted, abort):
                key, samples = keys.pop(future)
                if future.cancelled():
                    yield key, Result(samples)
                    continue
                result = future.result()
                if on_tokens is not None:
                    for g, ids in enumerate(result.token_ids):
                        on_tokens(key, g, ids)
                yield key, result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        connections.close()
        pool.shutdown(wait=True)


def _ended(futures, interrupted, abort):
    """Returns futures that have ended, after a short wait.

    An interruption ends them early.
    """
    cancelled = []
    if abort is not None and interrupted is not None and interrupted():
        cancelled = [f for f in futures if f.cancel()]
        # A request that a server does not have yet is aborted the next time.
        abort()
    done, _ = concurrent.futures.wait(
        futures, POLL_SECONDS, concurrent.futures.FIRST_COMPLETED
    )
    return cancelled + [f for f in done if f not in cancelled]
