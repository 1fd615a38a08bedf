"""Samples from vLLM, whose weights are the trainer's."""

import shutil
import time
import uuid

import keras
import numpy as np

from keras_posttrain.rollout.native.schedule import check_finite
from keras_posttrain.rollout.rollout import Completion, Rollout, Scores
from keras_posttrain.rollout.vllm import jobs as vllm_jobs
from keras_posttrain.rollout.vllm import settings, tpu
from keras_posttrain.rollout.vllm import weights as vllm_weights
from keras_posttrain.rollout.vllm.folder import Folder
from keras_posttrain.rollout.vllm.jobs import EngineFailure, Result
from keras_posttrain.rollout.vllm.local import LocalEngine
from keras_posttrain.rollout.vllm.server import ServerEngine

# Failures in a row, with nothing done between them, that end a run.
MAX_FAILURES = 3


class VLLMRollout(Rollout):
    """Samples from the policy in training, by [vLLM](https://docs.vllm.ai).

    vLLM runs in the trainer's process, or as a server: one that is started
    and stopped with the run, with an interpreter of another environment, or
    one that is running. It is built from a config that is written from the
    task's model, whatever that was loaded from, and is given
    the weights before the first sample and after every rollout: under LoRA
    the adapter's alone, else all of them. After each time the engine's
    log-probabilities of a probe sequence are compared with the trainer's;
    where they differ the run stops with both numbers.

    Log-probabilities are those of the whole distribution at the request's
    temperature, also under `top_k`, `top_p` and `min_p`. Where the engine
    fails it is made anew and given its weights; what was sampled before is
    kept, the rest is sampled again.

    In a process with TPUs it is KerasHub's own model that vLLM runs, with
    [tpu-inference](https://github.com/vllm-project/tpu-inference): Keras must
    have been imported with KERAS_NNX_ENABLED=true, weights go from device to
    device, an adapter is added on the way, samples are not keyed by their
    seed, and what does not go by the temperature alone is refused. This way
    was written against the sources and tested with a stand-in on a CPU; it
    has not run on a TPU.

    Args:
        url: str or `None`, the address of a server that is running (below).
        python: path or `None`: an interpreter whose environment has vLLM; a
            server is started with it, on the loopback interface and with a
            key, and ends with this process.
        api_key: str or `None`, the key of the server at `url`.
        adapter: bool, whether a LoRA adapter is given to vLLM as such; if
            not, it is added to the kernels on the way and all weights are
            given. `"auto"` does so where there is one that vLLM has room for
            (up to rank 512).
        max_length: int, the most tokens of a prompt and its completion;
            `"auto"` for the task's `sequence_length`, or the model's context
            where that is shorter.
        cache_bytes: int, what vLLM's cache of keys and values takes. `"auto"`
            is room for 256 sequences on a CPU, if a quarter of the free memory
            holds it; on accelerators the choice is vLLM's.
        directory: path of an existing folder in which what vLLM reads is
            written, removed again by `stop`. Defaults to the shared memory
            of the machine. With `url` the server must see it under the same
            path.
        timeout: float, seconds. An engine in which no request has ended for
            so long, or a server that has not answered one, is taken for
            failed. In the process a step of vLLM's that hangs is not noticed.
        engine_args: dict or `None`, further [engine arguments](
            https://docs.vllm.ai/en/latest/configuration/engine_args.html)
            of vLLM, such as `{"max_num_seqs": 64}`.

    Raises:
        ImportError: when it starts and vLLM is not installed.

    Example:

    ```python
    task.compile(rewards=[correct], rollout=kpt.rollout.VLLMRollout())
    task.fit(prompts, batch_size=8)
    ```

    With vLLM in an environment of its own:

    ```python
    rollout = kpt.rollout.VLLMRollout(python="/opt/vllm/bin/python")
    ```

    A server for `url` is one of vLLM's with the file
    `kpt.rollout.vllm.worker.__file__` on its path as `kpt_vllm_worker.py`,
    VLLM_SERVER_DEV_MODE=1, VLLM_USE_V2_MODEL_RUNNER=0 and, for adapters,
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, started with
    `--served-model-name policy --enable-scale-out --skip-tokenizer-init
    --generation-config vllm --max-logprobs -1 --worker-extension-cls
    kpt_vllm_worker.RolloutWorkerExtension --middleware
    kpt_vllm_worker.RequireKey`, and VLLM_API_KEY set. Its weights are
    written over, and it is no longer a server for others.
    """

    def __init__(
        self,
        url=None,
        *,
        python=None,
        api_key=None,
        adapter="auto",
        max_length="auto",
        cache_bytes="auto",
        directory=None,
        timeout=600,
        engine_args=None,
    ):
        super().__init__()
        settings.check(
            url, python, adapter, max_length, cache_bytes, directory, timeout
        )
        self.url = None if url is None else str(url).rstrip("/")
        self.python, self.api_key = python, api_key
        self.adapter, self.max_length = adapter, max_length
        self.cache_bytes, self.directory = cache_bytes, directory
        self.timeout, self.engine_args = timeout, dict(engine_args or {})
        self.restarts = 0
        self._engine = self._place = self._folder = None
        self._forget()

    def _forget(self):
        # `_good`: the probe's numbers that go with `weight_version`.
        self._good = self._adapter_folder = self._pushed = None
        self._has_base = self.needs_weights = False
        # In a row, with nothing done between them.
        self._failures = 0
        self._metrics = {}

    def set_model(self, model):
        if model is not self._model:
            self.stop()
        super().set_model(model)

    # The engine

    def start(self):
        self._need_task()
        if self._engine is not None:
            return
        settings.check_task(self)
        self._place = Folder(self.directory)
        self._folder = self._place.path
        try:
            task, dtype = self.model, settings.dtype(self)
            merged = not self._sends_adapter
            write, weights = vllm_weights.write_config, vllm_weights.Weights
            if tpu.is_here(self):
                tpu.check()
                write, weights = tpu.write_model, tpu.TPUWeights
            write(task, self._folder / "model", dtype)
            self._weights = weights(task, dtype, merged)
            self._probe = vllm_weights.Probe(task, self._max_length())
            self._engine = self._make_engine()
            self._engine.start()
            self._weights.check(self._engine.tensors())
        except EngineFailure as error:
            self.stop()
            raise RuntimeError(f"vLLM did not start. {error}") from error
        except BaseException:
            self.stop()
            raise

    def _make_engine(self):
        arguments = settings.arguments(
            self, self._folder / "model", self._weights
        )
        if self.url is None and self.python is None:
            settings.check_local(self)
            if not tpu.is_here(self):
                return LocalEngine(arguments, self.timeout)
            arguments = tpu.arguments(arguments) | self.engine_args
            return tpu.TPUEngine(arguments, self.timeout)
        return ServerEngine(
            arguments,
            self.timeout,
            self._folder,
            python=self.python,
            url=self.url,
            api_key=self.api_key,
        )

    def stop(self):
        engine, self._engine = self._engine, None
        place, self._place, self._folder = self._place, None, None
        self._forget()
        try:
            if engine is not None:
                engine.stop()
        finally:
            if place is not None:
                place.remove()

    def _max_length(self):
        return settings.max_length(self)

    @property
    def _sends_adapter(self):
        return settings.sends_adapter(self)

    # Weights

    def sync_weights(self):
        self._need_task()
        self.start()
        started, moved = time.perf_counter(), 0
        expected, version = self._probe(), self.weight_version + 1
        for failures in range(MAX_FAILURES):
            try:
                if failures or self.needs_weights:
                    self._restart()
                moved += self._push(version)
                gap = self._verify(expected)
                break
            except EngineFailure as error:
                self._has_base = False
                failure = error
        else:
            raise self._given_up(failure)
        self.weight_version, self._good = version, expected
        self.needs_weights = False
        self._metrics |= {
            "vllm/sync_seconds": time.perf_counter() - started,
            "vllm/sync_bytes": float(moved),
            "vllm/probe_difference": gap,
        }
        return version

    def _push(self, version):
        """Gives the engine the task's weights; the bytes that moved."""
        engine = self._engine
        # Of this push alone: an engine that was restarted has none.
        self._pushed = f"{uuid.uuid4().hex[:8]}-{version}"
        moved = 0
        if not self._has_base or not self._sends_adapter:
            moved += engine.push(self._weights, self._pushed)
            self._has_base = True
        if self._sends_adapter:
            folder = self._folder / f"adapter-{self._pushed}"
            moved += vllm_weights.write_adapter(self.model, folder)
            engine.push_adapter(folder, self._pushed)
            if self._adapter_folder is not None:
                shutil.rmtree(self._adapter_folder, ignore_errors=True)
            self._adapter_folder = folder
        return moved

    def _verify(self, expected):
        job = vllm_jobs.scoring_job(self._probe.token_ids, None, 1.0)
        [(_, result)] = self._engine.run({0: job})
        found, *_ = vllm_jobs.score_arrays(job, result.prompt, None)
        return vllm_weights.compare(found, expected, settings.dtype(self))

    def _restart(self):
        self.restarts += 1
        self._has_base = False
        self._engine.restart()

    def _given_up(self, error):
        return RuntimeError(
            f"vLLM has failed {MAX_FAILURES} times in a row, the last time "
            f"with: {error}"
        )

    # Sampling

    def _generate(self, requests, on_tokens, progress):
        for i, request in enumerate(requests):
            vllm_jobs.check_temperature(i, request)
        jobs = {i: vllm_jobs.sampling_job(r) for i, r in enumerate(requests)}
        bar = None
        if progress:
            total = sum(r.num_generations for r in requests)
            bar = keras.utils.Progbar(total, unit_name="sample")
        heard = on_tokens and _Heard(requests, on_tokens)
        started, done = time.perf_counter(), [None] * len(requests)
        for i, result in self._run(jobs, heard, self._interrupted()):
            done[i] = self._completions(i, requests[i], result)
            if bar is not None:
                bar.add(len(done[i]))
        seconds = time.perf_counter() - started
        tokens = sum(len(c.token_ids) for samples in done for c in samples)
        if tokens:
            self._metrics["vllm/tokens_per_second"] = tokens / seconds
        return done

    def _completions(self, i, request, result):
        out = []
        for ids, logps, reason in zip(
            result.token_ids, result.logps, result.finish_reasons
        ):
            logps = np.array(logps, np.float32)
            check_finite(i, logps)
            if reason not in ("stop", "length"):
                reason = "interrupted"
            out.append(Completion(ids, logps, reason, self.weight_version))
        while len(out) < request.num_generations:
            # Greedy samples are one.
            first = out[0]
            out.append(
                Completion(
                    list(first.token_ids),
                    first.per_token_logps.copy(),
                    first.finish_reason,
                    first.weight_version,
                )
            )
        return out

    def _score(self, sequences, top_k, temperature):
        jobs = {
            i: vllm_jobs.scoring_job(ids, top_k, temperature)
            for i, ids in enumerate(sequences)
        }
        out = [None] * len(sequences)
        for i, result in self._run(jobs):
            if result.prompt is None:
                raise RuntimeError(
                    "vLLM has failed, and gets weights again at the next "
                    "`sync_weights`; score after that."
                )
            out[i] = Scores(
                *vllm_jobs.score_arrays(jobs[i], result.prompt, top_k)
            )
        return out

    def _run(self, jobs, on_tokens=None, interrupted=None):
        """Yields each job's result once, whatever befalls the engine.

        Where the task's weights change meanwhile, an engine that has failed
        cannot be given those it had: `needs_weights` says so then, and jobs
        that had not ended are given as if nothing had been drawn.
        """
        if self._good is None:
            self.sync_weights()
        pending = dict(jobs)
        if not self.overlaps:
            self._failures = 0
        while pending and not self.needs_weights:
            try:
                if self._failures and not self.overlaps:
                    self._recover()
                    if on_tokens is not None:
                        on_tokens.again()
                run = self._engine.run(dict(pending), on_tokens, interrupted)
                for key, result in run:
                    self._check_version(result)
                    del pending[key]
                    self._failures = 0
                    yield key, result
            except EngineFailure as error:
                self._failures += 1
                if self._failures >= MAX_FAILURES:
                    raise self._given_up(error) from error
                self.needs_weights = self.overlaps
        for key, job in pending.items():
            yield key, Result(job.params["n"])

    def _check_version(self, result):
        if result.versions - {self._pushed}:
            raise EngineFailure(
                f"vLLM sampled from weights {sorted(result.versions)}, not "
                f"from those it was given last, {self._pushed!r}."
            )

    def _recover(self):
        """A new engine with the weights of `weight_version`.

        Raises:
            RuntimeError: if the task's weights have moved on from them.
        """
        self._restart()
        self._push(self.weight_version)
        self._verify(self._good)

    def metrics(self):
        return {**self._metrics, "vllm/restarts": float(self.restarts)}


class _Heard:
    """Tells tokens once, also those of samples that are drawn again."""

    def __init__(self, requests, on_tokens):
        self.requests, self.on_tokens = requests, on_tokens
        self.told, self.seen = {}, {}

    def again(self):
        """Samples that have not ended begin anew."""
        self.seen = {}

    def __call__(self, i, generation, token_ids):
        key = i, generation
        before = self.seen.get(key, 0)
        self.seen[key] = before + len(token_ids)
        new = token_ids[max(self.told.get(key, 0) - before, 0) :]
        self.told[key] = max(self.told.get(key, 0), self.seen[key])
        several = [generation]
        if self.requests[i].temperature == 0:
            several = range(self.requests[i].num_generations)
        for g in several if new else ():
            self.on_tokens(i, g, new)
