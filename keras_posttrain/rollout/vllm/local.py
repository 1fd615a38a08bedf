"""vLLM in the trainer's process."""

import contextlib
import gc
import importlib.util
import os
import random
import sys
import time

import jax
import numpy as np

from keras_posttrain._cores import num_cores
from keras_posttrain.rollout.vllm import worker as vllm_worker
from keras_posttrain.rollout.vllm.jobs import (
    EngineFailure,
    Result,
    add_output,
)

EXTENSION = "keras_posttrain.rollout.vllm.worker.RolloutWorkerExtension"
THREAD_BINDING, UNBOUND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"
# Defaults of environment variables that vLLM reads when it is imported or an
# engine is created.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    THREAD_BINDING: UNBOUND,
}
# Environment variables that vLLM must have. The first allows one token more
# than the model's context, for `score`.
FORCED = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def threads():
    """Returns half of this process's cores, as JAX uses them too."""
    return max(1, num_cores() // 2)


class LocalEngine:
    """A vLLM engine in this process. A request has `timeout` seconds."""

    def __init__(self, arguments, timeout):
        self.arguments, self.timeout = arguments, timeout
        self._engine = self._adapter = None
        self._count = 0

    def start(self):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.update(FORCED, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        if jax.default_backend() == "cpu":
            vllm_worker.share_cpu(threads())
        # vLLM seeds the random generators of its process.
        states = random.getstate(), np.random.get_state()
        try:
            self._engine = self._make()
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        self._prepare()

    def _make(self):
        # vLLM is optional, and slow to import.
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            **self.arguments, worker_extension_cls=EXTENSION
        )
        return LLMEngine.from_engine_args(arguments)

    def _prepare(self):
        [state, *_] = self._engine.collective_rpc("kpt_prepare")
        self.device = state["device"]

    def stop(self):
        if self._engine is None:
            return
        engine, self._engine, self._adapter = self._engine, None, None
        try:
            engine.engine_core.shutdown()
        finally:
            del engine
            gc.collect()

    def restart(self):
        self.stop()
        self.start()

    # Weights

    def tensors(self):
        [found, *_] = self._engine.collective_rpc("kpt_tensors")
        return found

    def push(self, weights, version):
        """Loads all weights and returns the bytes moved."""
        arrays = weights.arrays()
        with engine_failures("the weights"):
            self._engine.collective_rpc(
                lambda worker: worker.kpt_load_arrays(arrays)
            )
            self._adapter = None
            self._set_version(version)
        return weights.num_bytes

    def push_adapter(self, directory, version):
        """Loads an adapter from the directory of its files."""
        # See `_make`.
        from vllm.lora.request import LoRARequest

        self._count += 1
        new = LoRARequest(f"policy-{self._count}", self._count, str(directory))
        with engine_failures("the adapter"):
            self._engine.add_lora(new)
            old, self._adapter = self._adapter, new
            if old is not None:
                self._engine.remove_lora(old.lora_int_id)
            self._set_version(version)

    def _set_version(self, version):
        self._reset_prefix_cache()
        self._engine.engine_core.set_weight_version(version)

    def _reset_prefix_cache(self):
        if not self._engine.reset_prefix_cache():
            raise EngineFailure("vLLM did not reset its prefix cache.")

    # Sampling

    def run(self, jobs, on_tokens=None, interrupted=None, more=None):
        """Runs a dict of jobs and yields `(key, Result)` when one ends.

        `on_tokens` gets `(key, generation, token_ids)`. Once `interrupted`
        returns true, unfinished jobs are yielded too. `more` returns a dict
        of jobs that join, and is called between steps.
        """
        # See `_make`.
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY
        if on_tokens is not None or interrupted is not None:
            kind = RequestOutputKind.DELTA
        engine, names, results = self._engine, {}, {}
        vllm_worker.prepare_thread()
        last = time.monotonic()

        def add(jobs):
            for key, job in jobs.items():
                params = SamplingParams(**job.params, output_kind=kind)
                with engine_failures("a request"):
                    engine.add_request(
                        f"{key}",
                        {"prompt_token_ids": list(job.token_ids)},
                        params,
                        lora_request=self._adapter,
                    )
                names[str(key)] = key
                results[key] = Result(job.params["n"])

        try:
            add(jobs)
            while names and not (interrupted is not None and interrupted()):
                if more is not None:
                    add(more())
                with engine_failures("a step"):
                    outputs = engine.step()
                for output in outputs:
                    key = names[output.request_id]
                    add_output(results[key], output, key, on_tokens)
                    if output.finished:
                        last = time.monotonic()
                        names.pop(output.request_id)
                        yield key, results.pop(key)
                if time.monotonic() - last > self.timeout:
                    raise EngineFailure(
                        f"No request has ended in {self.timeout} seconds; "
                        f"{len(names)} are open."
                    )
            for key in names.values():
                yield key, results[key]
        finally:
            # An engine that has failed may raise an error here.
            with contextlib.suppress(Exception):
                engine.abort_request(list(names))

    def run_on_each(self, job):
        """Runs a job; returns a list of its result, as of one engine."""
        [(_, result)] = self.run({0: job})
        return [result]


@contextlib.contextmanager
def engine_failures(what):
    """Converts errors of vLLM inside the scope to `EngineFailure`s.

    `what` is the operation, for the message.
    """
    try:
        yield
    except EngineFailure:
        raise
    except Exception as error:
        raise EngineFailure(
            f"vLLM failed at {what}: {type(error).__name__}: {error}"
        ) from error


def is_installed():
    """Returns whether vLLM can be imported, without importing it."""
    return "vllm" in sys.modules or bool(importlib.util.find_spec("vllm"))
