"""A rollout engine that samples with vLLM from the trainer's weights."""

import collections
import copy
import itertools
import pathlib
import shutil
import socket
import time
import uuid

import numpy as np

from keras_posttrain import _hosts
from keras_posttrain.distribution import processes
from keras_posttrain.distribution.led import Led
from keras_posttrain.models import guards
from keras_posttrain.models.hf.export import hf_config
from keras_posttrain.models.hf.families import (
    family_of,
    has_experts,
    values_are_keys,
)
from keras_posttrain.rollout.native.samples import check_finite
from keras_posttrain.rollout.request import Completion, Scores
from keras_posttrain.rollout.rollout import Rollout, sample_counter
from keras_posttrain.rollout.vllm import exchange, settings, tpu
from keras_posttrain.rollout.vllm import jobs as vllm_jobs
from keras_posttrain.rollout.vllm import weights as vllm_weights
from keras_posttrain.rollout.vllm.folder import Folder
from keras_posttrain.rollout.vllm.jobs import EngineFailure, Result
from keras_posttrain.rollout.vllm.local import LocalEngine
from keras_posttrain.rollout.vllm.pushes import DeltaPush, FullPush
from keras_posttrain.rollout.vllm.replicas import ReplicatedEngine
from keras_posttrain.rollout.vllm.server import ServerEngine
from keras_posttrain.rollout.vllm.session import VLLMSession

# A run ends after this many failures without a finished request in between.
MAX_FAILURES = 3
# Seconds in which a server answers whether it is there.
HEALTH_SECONDS = 30


class VLLMRollout(Rollout):
    """Samples from the policy in training with [vLLM](https://docs.vllm.ai).

    vLLM runs in the trainer's process or as a server. The server may be
    running already, or it is started and stopped with the run, in another
    Python environment. vLLM builds the model from a config that is written
    from the task's model. It gets the weights before the first sample and
    after every rollout: only the adapter's under LoRA, else all of them.
    After each sync the engine's log-probabilities of a probe sequence are
    compared with the trainer's. If they differ, the run stops with an error
    that shows both.

    Log-probabilities are those of the full distribution at the request's
    temperature, also under `top_k`, `top_p` and `min_p`. An engine that fails
    is restarted and gets its weights again. Requests that have ended are
    kept; the others are sampled again.

    With several servers (`urls`) the samples of a prompt stay together, and a
    conversation stays on the server that computed its first turns. All get
    the weights at the same time, and each is compared with the trainer. A
    server that fails is lost, which is printed and shows in the metric
    `vllm/replicas`; the others sample its requests again. As soon as it
    answers again, the next sync brings it up to date. One server whose
    `engine_args` have a `data_parallel_size` is the other way: vLLM then
    spreads requests itself, and fails as a whole.

    With several processes (`jax.distributed`) vLLM runs as a server. The
    first process starts it, sends the weights, which all help to gather, and
    compares. Each process sends its share of a rollout's requests, or those
    of its conversations, to all servers itself, so that it must reach them: a
    server that `python` starts serves processes of its own machine. All get
    the samples that one process would get, from weights of the same version,
    with `max_staleness` too. If a server fails one process, the others wait
    with it for a server that has the weights; what one raises, all raise.

    In a process with TPUs, vLLM runs KerasHub's model with
    [tpu-inference](https://github.com/vllm-project/tpu-inference). Keras must
    have been imported with KERAS_NNX_ENABLED=true. Weights are copied from
    device to device, with an adapter merged in. Samples do not depend on
    their seed, and truncation is rejected. This mode was written against the
    sources and tested with a stand-in on a CPU; it has not run on a TPU.

    Families were compared with the trainer by vLLM 0.32 on a CPU, in float32,
    after each of several pushes. Refused are:

    - Qwen 3.5 with its mixtures. vLLM's CPU kernels of linear attention need
      bfloat16 ("CPU GDN attention requires BF16."), and its model imports
      torchvision, whose builds for Linux on PyPI need CUDA.
    - Gemma 3n: after a push of all weights the log-probabilities of a tiny
      model were others.
    - Models with a vision tower: vLLM's Gemma 3 with images imports it too.
    - gpt-oss with another epsilon than 1e-5, other limits of the activation
      than the published ones, or a first layer without a window: vLLM has
      these in its code, whatever the config says.

    gpt-oss and Gemma 4 are refused in a process with TPUs too.

    Args:
        url: str or `None`, the address of a running server (see below), or
            `"unix:"` and the path of its socket.
        urls: list of such addresses, or `None`: servers of the same model
            (see below), among which requests are spread.
        python: path or `None`: the interpreter of an environment with vLLM.
            It runs a server on a socket that only this user can open, which
            is protected by a key too and ends with this process, the first
            one of several.
        api_key: str or `None`, the key of the server at `url`, or of all
            servers of `urls`.
        adapter: bool, whether vLLM gets a LoRA adapter separately from the
            base weights. If not, the adapter is merged and all weights are
            sent. `"auto"` sends the adapter if there is one that vLLM
            supports (up to rank 512, and not of a mixture of experts, nor of
            a Gemma 4 whose values are keys).
        max_length: int, the most tokens of a prompt and its completion, or
            `"auto"` for the smaller of the task's `sequence_length` and the
            model's context.
        cache_bytes: int, the bytes of vLLM's cache of keys and values. On a
            CPU `"auto"` is room for 256 sequences, but at most a quarter of
            the free memory; on accelerators it is vLLM's default.
        directory: path of an existing folder for the files that vLLM reads,
            which `stop` removes. Defaults to the machine's shared memory.
            With `url` or `urls`, the servers must see the folder under the
            same path.
        timeout: float, seconds. An engine fails if no request ends for this
            long; a server fails if it does not answer one for this long. A
            single step that hangs in the trainer's process is not detected.
        engine_args: dict or `None`, further [engine arguments](
            https://docs.vllm.ai/en/latest/configuration/engine_args.html)
            of vLLM, such as `{"max_num_seqs": 64}`. Of a running server,
            pass its `data_parallel_size` here.
            `{"distributed_executor_backend": "mp"}` gives the model of a
            server on a CPU a process of its own, as vLLM does by default.
        push: `"full"` or `"delta"`: whether a sync that sends all weights to
            servers writes all values, or only those that have changed since
            the sync before. Servers have the same bits either way.
            `"delta"` is for a `directory` on a network or a disk: with the
            learning rates of reinforcement learning few values of bfloat16
            change in a step. In a machine's own memory `"full"` is as fast or
            faster. `"delta"` needs a copy of all weights in the memory of the
            trainer's host, and one for each worker process of a server. A
            server that does not have the weights of the sync before gets all.

    Raises:
        ImportError: by `start`, if vLLM is not installed.
        ValueError: by `start`, if vLLM's model was not compared with the
            trainer's, or computes something else.

    Example:

    ```python
    task.compile(rewards=[correct], rollout=kpt.rollout.VLLMRollout())
    task.fit(prompts, batch_size=8)
    ```

    With vLLM in a separate environment:

    ```python
    rollout = kpt.rollout.VLLMRollout(python="/opt/vllm/bin/python")
    ```

    With servers on other machines, where `directory` is a folder that all of
    them share:

    ```python
    rollout = kpt.rollout.VLLMRollout(
        urls=["http://gpu-1:8000", "http://gpu-2:8000"],
        api_key="the value of VLLM_API_KEY there",
        directory=os.getcwd(),
    )
    ```

    To start a server by hand, run the file `kpt.rollout.vllm.worker.__file__`
    in an environment that has vLLM; nothing else of this package is needed
    there. It takes the options of vLLM's server and adds ours:

    ```shell
    VLLM_API_KEY=... python worker.py --model qwen3 --dtype bfloat16 \\
        --host 0.0.0.0 --port 8000 --enable-lora --max-lora-rank 16
    ```

    `--model` is a folder with the `config.json` of the task's model, such as
    that of `task.export`. The server's weights will be overwritten, so that it
    cannot serve other clients.
    """

    def __init__(
        self,
        url=None,
        *,
        urls=None,
        python=None,
        api_key=None,
        adapter="auto",
        max_length="auto",
        cache_bytes="auto",
        directory=None,
        timeout=600,
        engine_args=None,
        push="full",
    ):
        super().__init__()
        settings.check_place(url, urls, python)
        settings.check(adapter, max_length, cache_bytes, directory, timeout)
        settings.check_push(push, url or urls or python)
        self.url = None if url is None else str(url).rstrip("/")
        self.urls = [str(x).rstrip("/") for x in urls or ()]
        self.python, self.api_key = python, api_key
        self.adapter, self.max_length = adapter, max_length
        self.cache_bytes, self.directory = cache_bytes, directory
        self.timeout, self.engine_args = timeout, dict(engine_args or {})
        self.push = push
        self.restarts = 0
        self._engine = self._folder = None
        self._reset()

    def _reset(self):
        # The probe's log-probabilities under `weight_version`.
        self._probe_logps = None
        self._adapter_folder = self._pushed = None
        self._has_base = self.needs_weights = False
        # Failures without a finished request in between.
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
        settings.check_processes(self._is_here)
        settings.check_task(
            self.adapter,
            self._lora,
            self._on_tpu,
            has_experts(self.model.causal_lm),
            values_are_keys(self.model.causal_lm),
        )
        self._check_model()
        guards.refuse_tower(self.model.causal_lm, "vLLM as a rollout engine")
        self._check_equal()
        try:
            self._make_parts()
            folder = self._led.run(self._make_folder)
            self._channel = _hosts.Channel(folder)
            self._engine = self._make_engine(pathlib.Path(folder))
            state = self._led.run(self._start_engine)
            self._adopt(state)
            if processes.count() > 1:
                self._check_reach(state["host"])
        except EngineFailure as error:
            self.stop()
            raise RuntimeError(f"vLLM did not start. {error}") from error
        except BaseException:
            self.stop()
            raise

    def _check_model(self):
        causal_lm = self.model.causal_lm
        family = family_of(causal_lm)
        settings.check_family(family, self._on_tpu)
        if family is not None:
            settings.check_config(hf_config(causal_lm))

    def _make_parts(self):
        task, weights = self.model, vllm_weights.Weights
        self._led = Led(EngineFailure)
        if self._on_tpu:
            tpu.check()
            weights = tpu.TPUWeights
        self._weights = weights(
            task.causal_lm,
            task.adapter,
            self._dtype,
            merged=not self._sends_adapter,
            led=self._led,
        )
        self._led.add("adapter", self._save_adapter)
        self._probe = vllm_weights.Probe(
            task.policy, task.using_weights, self._max_length()
        )

    def _make_folder(self):
        """Makes the folder of vLLM's files; returns its path."""
        self._folder = Folder(self.directory)
        write = tpu.write_model if self._on_tpu else vllm_weights.write_config
        path = self._folder.path
        write(self.model.causal_lm, path / "model", self._dtype)
        return str(path)

    def _make_engine(self, folder):
        arguments = settings.arguments(
            folder / "model",
            self._weights,
            max_length=self._max_length(),
            cache_bytes=self.cache_bytes,
            lora=self._lora if self._sends_adapter else None,
        )
        arguments |= self.engine_args
        if self._is_here:
            settings.check_local(self.engine_args)
            if not self._on_tpu:
                return LocalEngine(arguments, self.timeout)
            arguments = tpu.arguments(arguments) | self.engine_args
            return tpu.TPUEngine(arguments, self.timeout)
        is_delta = self.push == "delta" and not self._sends_adapter
        sender = (DeltaPush if is_delta else FullPush)(folder)
        servers = [
            ServerEngine(
                arguments,
                self.timeout,
                folder,
                python=self.python,
                url=url,
                api_key=self.api_key,
                sender=sender,
            )
            for url in self.urls or [self.url]
        ]
        if self.urls:
            return ReplicatedEngine(servers, sender)
        return servers[0]

    def _start_engine(self):
        self._engine.start()
        self._weights.check(self._engine.tensors())
        return self._state()

    # Several processes

    @property
    def is_apart(self):
        return not self._is_here

    def scope(self):
        if processes.count() == 1:
            return super().scope()
        # The trainer may use all devices meanwhile.
        self.start()
        return self._channel.used()

    def _check_equal(self):
        if processes.count() > 1:
            names = ("url", "urls", "adapter", "max_length", "push")
            processes.check_equal(
                {f"VLLMRollout({n}=...)": getattr(self, n) for n in names}
            )

    def _state(self):
        """Returns what the other processes need of the first one."""
        if processes.count() == 1:
            return None
        return {
            "host": socket.gethostname(),
            "pushed": self._pushed,
            "restarts": self.restarts,
            "engine": self._engine.state(),
        }

    def _adopt(self, state):
        """Takes the `_state` of the first process."""
        if processes.count() == 1:
            return
        if not processes.is_first():
            self._pushed, self.restarts = state["pushed"], state["restarts"]
            self._engine.adopt(state["engine"])

    def _check_reach(self, host):
        """Checks that all processes reach the servers of that on `host`."""

        def check():
            for server in self._engine.servers:
                settings.check_address(server.url, host)
                try:
                    server.check_health(HEALTH_SECONDS)
                except EngineFailure as error:
                    raise ValueError(
                        "Each process sends its own requests to vLLM's "
                        f"servers. Received: no answer at {server.url}: "
                        f"{error}"
                    ) from error

        processes.exchange_results(check)

    def _lose_together(self):
        """Lets the first process lose the servers that others have lost."""
        if processes.count() > 1:
            for losses in processes.exchange(self._engine.losses()):
                self._engine.lose(losses)

    def stop(self):
        engine, self._engine = self._engine, None
        folder, self._folder = self._folder, None
        self._reset()
        try:
            if engine is not None:
                engine.stop()
        finally:
            if folder is not None:
                folder.remove()

    def _max_length(self):
        limits = [self.model.max_length, self.max_length]
        if self.max_length == "auto":
            limits[1] = self.model.sequence_length
        return min(x for x in limits if x is not None)

    @property
    def _dtype(self):
        embedding = self.model.causal_lm.backbone.token_embedding
        default = str(embedding.compute_dtype)
        return settings.dtype(self.engine_args.get("dtype") or default)

    @property
    def _is_here(self):
        """Whether vLLM runs in this process."""
        return not (self.url or self.urls or self.python)

    @property
    def _on_tpu(self):
        """Whether vLLM runs in this process on its TPUs."""
        return self._is_here and tpu.is_here()

    @property
    def _lora(self):
        adapter = self.model.adapter
        return None if adapter is None else adapter.saved_lora

    @property
    def _sends_adapter(self):
        causal_lm = self.model.causal_lm
        merges = self._on_tpu or has_experts(causal_lm)
        merges = merges or values_are_keys(causal_lm)
        return settings.sends_adapter(self.adapter, self._lora, merges)

    # Weights

    def sync_weights(self):
        self._need_task()
        self.start()
        started = time.perf_counter()
        expected = self._probe(self._task_weights())
        version = self.weight_version + 1
        self._lose_together()
        sent = self._led.run(lambda: self._send(version, expected))
        self._adopt(sent["state"])
        self.weight_version, self._probe_logps = version, expected
        self.needs_weights = False
        self._metrics |= {
            "vllm/sync_seconds": time.perf_counter() - started,
            "vllm/sync_bytes": float(sent["bytes"]),
            "vllm/probe_difference": sent["gap"],
        }
        return version

    def _send(self, version, expected):
        """Sends the task's weights and compares the engine with the trainer.

        `expected` are the probe's log-probabilities.
        """
        moved = 0
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
            raise _too_many_failures(failure)
        return {"bytes": moved, "gap": gap, "state": self._state()}

    def _push(self, version):
        """Sends the task's weights to the engine; returns the bytes sent."""
        engine = self._engine
        # The name is unique to this push, to detect an engine that was
        # restarted and lacks the weights.
        self._pushed = f"{uuid.uuid4().hex[:8]}-{version}"
        moved = 0
        if not self._has_base or not self._sends_adapter:
            moved += engine.push(self._weights, self._pushed)
            self._has_base = True
        if self._sends_adapter:
            folder = self._folder.path / f"adapter-{self._pushed}"
            collections.deque(self._led.together("adapter", str(folder)), 0)
            moved += vllm_weights.adapter_bytes(folder)
            engine.push_adapter(folder, self._pushed)
            if self._adapter_folder is not None:
                shutil.rmtree(self._adapter_folder, ignore_errors=True)
            self._adapter_folder = folder
        return moved

    def _save_adapter(self, folder):
        self.model.adapter.save(folder)
        return ()

    def _verify(self, expected):
        job = vllm_jobs.scoring_job(self._probe.token_ids, None, 1.0)
        gaps = []
        for result in self._engine.run_on_each(job):
            found, *_ = vllm_jobs.score_arrays(job, result.prompt, None)
            gaps.append(vllm_weights.compare(found, expected, self._dtype))
        return max(gaps)

    def _restart(self):
        self.restarts += 1
        self._has_base = False
        self._engine.restart()

    # Sampling

    def session(self):
        return VLLMSession(self, self._sample, self._repeat)

    def checked(self, requests):
        requests = super().checked(requests)
        for i, request in enumerate(requests):
            vllm_jobs.check_temperature(i, request)
        return requests

    def _generate(self, requests, on_tokens, progress):
        started = time.perf_counter()
        advance = sample_counter(progress, requests)
        own = processes.share(len(requests))
        here = dict(list(enumerate(requests))[own])
        stream = on_tokens and _TokenStream(requests, on_tokens)
        done = [None] * len(requests)

        def take(i, samples):
            done[i] = samples
            if advance is not None:
                advance(len(samples))

        self._sample(here, take, stream)
        if processes.count() == 1:
            return done
        samples = [sample for i in here for sample in done[i]]
        samples = iter(exchange.completions(samples))
        for i, request in enumerate(requests):
            found = list(itertools.islice(samples, request.num_generations))
            if i in here:
                continue
            for g, sample in enumerate(found if on_tokens else ()):
                on_tokens(i, g, sample.token_ids)
            take(i, found)
        self._note_speed(done, started)
        return done

    def _note_speed(self, samples, started):
        """Notes the speed of sampling lists of completions."""
        tokens = sum(len(c.token_ids) for each in samples for c in each)
        if tokens:
            seconds = time.perf_counter() - started
            self._metrics["vllm/tokens_per_second"] = tokens / seconds

    def _sample(
        self, requests, take, stream=None, ends=None, more=None, once=False
    ):
        """Samples a dict of requests; calls `take(key, completions)`.

        `ends` says whether to end samples early, besides an interruption;
        `more` returns further requests, a dict, and is called between steps.
        `once` is whether a failure is raised, and not handled here.
        """
        started, done, requests = time.perf_counter(), [], dict(requests)

        def jobs(new):
            return {k: vllm_jobs.sampling_job(r) for k, r in new.items()}

        def more_jobs():
            requests.update(new := more())
            return jobs(new)

        def take_result(key, result):
            done.append(self._completions(key, requests.pop(key), result))
            take(key, done[-1])

        run = self._run_once if once else self._run
        run(
            jobs(requests), take_result, stream, ends or self._interrupted(),
            more and more_jobs,
        )  # fmt: skip
        self._note_speed(done, started)

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
            # Greedy samples are equal, and were sampled once.
            out.append(copy.deepcopy(out[0]))
        return out

    def _score(self, sequences, top_k, temperature):
        own = processes.share(len(sequences))
        jobs = {
            i: vllm_jobs.scoring_job(ids, top_k, temperature)
            for i, ids in list(enumerate(sequences))[own]
        }
        out = [None] * len(sequences)

        def take(i, result):
            if result.prompt is None:
                raise RuntimeError(
                    "vLLM has failed and needs new weights. Call "
                    "`sync_weights` before `score`."
                )
            out[i] = Scores(
                *vllm_jobs.score_arrays(jobs[i], result.prompt, top_k)
            )

        self._run(jobs, take)
        return exchange.scores(out[own], top_k)

    def _run(self, jobs, take, stream=None, interrupted=None, more=None):
        """Calls `take(key, result)` for each job, once.

        An engine that fails is restarted. `more` returns a dict of jobs that
        join, between steps.

        If rollouts overlap with training, the task's weights have changed and
        a restarted engine cannot get its old weights back. Then
        `needs_weights` is set, and unfinished jobs are taken empty.
        """
        pending = dict(jobs)

        def attempt():
            self._run_once(pending, take, stream, interrupted, more)

        def restarted():
            if stream is not None:
                stream.restart()

        if self._repeat(attempt, restarted):
            return
        error = None
        try:
            for key, job in pending.items():
                take(key, Result(job.params["n"]))
        except Exception as e:  # Any: other processes may have none.
            error = e
        self._led.agree(error)

    def _run_once(
        self, pending, take, stream=None, interrupted=None, more=None
    ):
        """Runs jobs as `_run` does, and removes those that end from `pending`.

        Raises:
            EngineFailure: if the engine fails.
        """

        def join():
            new = more()
            pending.update(new)
            return new

        if not pending:
            return
        run = self._engine.run(
            dict(pending), stream, interrupted, more and join
        )
        for key, result in run:
            self._check_version(result)
            del pending[key]
            self._has_progressed = True
            take(key, result)

    def _repeat(self, attempt, restarted):
        """Repeats an attempt with a restarted engine until none has failed.

        With several processes each attempts its part, and all restart the
        engine if it has failed one of them.

        Args:
            attempt: function without arguments that may raise an
                `EngineFailure`.
            restarted: function without arguments, called after a restart.

        Returns:
            Whether an attempt did not fail. If rollouts overlap with
            training, the engine may need weights before another one.
        """
        if self._probe_logps is None:
            self.sync_weights()
        if not self.overlaps:
            self._failures = 0
        while not self.needs_weights:
            self._has_progressed, error = False, None
            try:
                if self._failures and not self.overlaps:
                    self._recover()
                    restarted()
                attempt()
            except Exception as e:  # Any: other processes wait for it.
                error = e
            failure = self._failure_of_any(error)
            if failure is None:
                return True
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise _too_many_failures(failure) from failure
            self.needs_weights = self.overlaps
        return False

    def _failure_of_any(self, error):
        """Returns an `EngineFailure` of one of the processes, or `None`.

        Another error is raised in all of them. A request that has ended in
        one resets the count of failures in all.
        """
        failed = isinstance(error, EngineFailure)
        self._led.agree(None if failed else error)
        found = [(self._has_progressed, str(error) if failed else None)]
        if processes.count() > 1:
            found = processes.exchange(found[0])
        if any(progressed for progressed, _ in found):
            self._failures = 0
        texts = [text for _, text in found if text is not None]
        if not texts:
            return None
        return error if failed else EngineFailure(texts[0])

    def _check_version(self, result):
        if result.versions - {self._pushed}:
            raise EngineFailure(
                f"vLLM sampled from weights {sorted(result.versions)}, not "
                f"from those sent last, {self._pushed!r}."
            )

    def _recover(self):
        """Restarts the engine with the weights of `weight_version`.

        If the task's weights have changed since, it raises a `RuntimeError`.
        """

        def recover():
            self._restart()
            self._push(self.weight_version)
            self._verify(self._probe_logps)
            return self._state()

        self._adopt(self._led.run(recover))

    def metrics(self):
        found = {**self._metrics, "vllm/restarts": float(self.restarts)}
        if self.urls and self._engine is not None:
            found["vllm/replicas"] = float(len(self._engine.used))
        return found


def _too_many_failures(error):
    return RuntimeError(
        f"vLLM has failed {MAX_FAILURES} times in a row, the last time "
        f"with: {error}"
    )


class _TokenStream:
    """Passes tokens to `on_tokens` once, even if they are sampled again."""

    def __init__(self, requests, on_tokens):
        self.requests, self.on_tokens = requests, on_tokens
        # Tokens by sample: those passed on, and those since the last restart.
        self.passed, self.seen = {}, {}

    def restart(self):
        """Expects unfinished samples again from their first token."""
        self.seen = {}

    def __call__(self, i, generation, token_ids):
        key = i, generation
        before = self.seen.get(key, 0)
        self.seen[key] = before + len(token_ids)
        passed = self.passed.get(key, 0)
        new = token_ids[max(passed - before, 0) :]
        self.passed[key] = max(passed, self.seen[key])
        generations = [generation]
        if self.requests[i].temperature == 0:
            generations = range(self.requests[i].num_generations)
        for g in generations if new else ():
            self.on_tokens(i, g, new)
