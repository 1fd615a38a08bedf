"""vLLM in a separate process, called by HTTP."""

import contextlib
import json
import os
import pathlib
import secrets
import subprocess
import time
import weakref

import jax

from keras_posttrain.distribution import processes
from keras_posttrain.rollout.vllm import http, job_threads, settings, worker
from keras_posttrain.rollout.vllm import process as vllm_process
from keras_posttrain.rollout.vllm.folder import Folder
from keras_posttrain.rollout.vllm.jobs import EngineFailure, Result
from keras_posttrain.rollout.vllm.local import (
    ENVIRONMENT,
    FORCED,
    THREAD_BINDING,
    UNBOUND,
    threads,
)
from keras_posttrain.rollout.vllm.pushes import FullPush

# The most seconds until a server answers; importing its libraries takes most
# of them.
START_SECONDS = 900
# The longest path of a socket, in bytes, on Linux and macOS.
MAX_SOCKET_PATH = 103
# vLLM's executor of a model in the engine's process. On a CPU vLLM takes
# another one if it is called "uni".
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# Samples that the server has at once; more wait in the trainer's processes.
IN_FLIGHT = 256


class ServerEngine:
    """A vLLM server, running at `url` or started by this object.

    To start one, it needs vLLM's engine arguments and the interpreter
    `python`. The server must be able to read `folder`. It has at most
    `timeout` seconds for an answer. `sender` is the `FullPush` or `DeltaPush`
    that `push` uses.

    Attributes:
        held: str, the version of all weights that it was sent last, or `None`
            if it may have others.
    """

    def __init__(
        self, arguments, timeout, folder, python, url, api_key, sender=None
    ):
        self.arguments, self.timeout = arguments, timeout
        self.sender, self.held = sender or FullPush(folder), None
        self.folder, self.python = pathlib.Path(folder), python
        self.url, self.api_key = url, api_key
        self.model, self.process, self._count = "policy", None, 0
        self._kill = self._socket_folder = None

    # The process

    def start(self):
        self.held = None
        if self.python is not None:
            self._launch()
        self.wait_until_healthy()
        with self._preparing():
            [state, *_] = self._rpc("kpt_prepare")
        self.device, self.model = state["device"], "policy"

    @contextlib.contextmanager
    def _preparing(self):
        try:
            yield
        except EngineFailure as error:
            raise EngineFailure(
                "The server rejects our calls. One that is started by hand "
                "needs our options: start it with the file "
                f"`kpt.rollout.vllm.worker.__file__` (see `VLLMRollout`). "
                f"{error}"
            ) from error

    def _launch(self):
        extension = self.folder / "extension"
        extension.mkdir(exist_ok=True)
        worker.copy(extension)
        self.api_key = secrets.token_hex(32)
        # A socket in a folder that no other user can enter. On a port of the
        # machine another process could take the server's place.
        path = self._socket_path()
        path.unlink(missing_ok=True)
        self.url = f"unix:{path}"
        command = [
            # This script ends the server when this process ends.
            str(self.python), "-I", vllm_process.__file__, str(os.getpid()),
            worker.SERVER, *_flags(self._server_arguments()), *worker.OPTIONS,
            "--uds", str(path), "--uvicorn-log-level", "error",
        ]  # fmt: skip
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                env=self._environment(extension),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # All processes of the session can be ended together.
                start_new_session=True,
            )
        self._kill = weakref.finalize(self, vllm_process.end, self.process)

    def _server_arguments(self):
        """Returns vLLM's engine arguments.

        On a CPU, vLLM would start a further process for the model, to set how
        many threads it has; here the environment sets it.
        """
        sizes = settings.parallel_sizes(self.arguments)
        if (
            jax.default_backend() != "cpu"
            or "distributed_executor_backend" in self.arguments
            or sizes.keys() - {"data_parallel_size"}
            or os.environ.get(THREAD_BINDING, UNBOUND) != UNBOUND
        ):
            return self.arguments
        return {**self.arguments, "distributed_executor_backend": IN_PROCESS}

    def _socket_path(self):
        path = self.folder / "socket"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            self._socket_folder = Folder()
            path = self._socket_folder.path / "socket"
        return path

    def _environment(self, extension):
        environment = dict(os.environ)
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        defaults = {"HF_HUB_OFFLINE": "1", **ENVIRONMENT}
        if jax.default_backend() == "cpu":
            defaults["OMP_NUM_THREADS"] = str(threads())
            # Compiling parts of the sampler would take ten seconds.
            defaults["TORCHDYNAMO_DISABLE"] = "1"
            # KerasHub's plugin would import TensorFlow in each process.
            defaults["VLLM_PLUGINS"] = ""
        return {
            **defaults,
            **environment,
            **FORCED,
            **worker.ENVIRONMENT,
            "VLLM_API_KEY": self.api_key,
            "PYTHONPATH": str(extension),
        }

    def wait_until_healthy(self):
        """Waits for the server; an `EngineFailure` if it does not answer."""
        limit = START_SECONDS if self.process else self.timeout
        end = time.monotonic() + limit
        while True:
            if self.process is not None and self.process.poll() is not None:
                raise EngineFailure(
                    f"vLLM's server ended with {self.process.returncode}. "
                    f"The end of its log:\n{self._log()}"
                )
            try:
                self.check_health(10)
                return
            except EngineFailure as error:
                if time.monotonic() > end:
                    raise EngineFailure(
                        f"No server answered at {self.url} in {limit} "
                        f"seconds: {error}"
                    ) from error
            time.sleep(0.3)

    def check_health(self, timeout):
        """Raises an `EngineFailure` without an answer in `timeout` seconds."""
        self._call("GET", "/health", timeout=timeout)

    def _log(self):
        path = self.folder / "server.log"
        return path.read_text(errors="replace")[-3000:]

    def stop(self):
        process, self.process = self.process, None
        if process is not None:
            self._kill.detach()
            vllm_process.end(process)
        if self._socket_folder is not None:
            self._socket_folder.remove()

    def restart(self):
        self.stop()
        self.start()

    # Several processes

    def state(self):
        """Returns what other processes need to send requests."""
        return {"url": self.url, "key": self.api_key, "model": self.model}

    def adopt(self, state):
        """Sends requests as the process whose `state` this is."""
        self.url, self.api_key = state["url"], state["key"]
        self.model = state["model"]

    @property
    def servers(self):
        return [self]

    def losses(self):
        """Returns what `lose` takes in another process."""
        return []

    def lose(self, losses):
        """Takes the `losses` of another process; here a failure is raised."""

    # Weights

    def tensors(self):
        found = {}
        for part in self._rpc("kpt_tensors"):
            found |= part
        return found

    def push(self, weights, version):
        """Loads all weights and returns the bytes moved."""
        return self.sender(weights, version, [self], _on_each)

    def load(self, folder, count, version, keep=False):
        """Loads the files of `count` tensors.

        `keep` is whether the server keeps them for `load_difference`.
        """
        kept = [version] if keep else []
        self._load(count, version, "kpt_load", str(folder), *kept)

    def load_difference(self, folder, count, version):
        """Loads the difference from the weights that it was sent last.

        Returns:
            `None`, or why the difference does not fit what the server has; it
            needs all weights then.
        """
        return self._load(count, version, "kpt_load_difference", str(folder))

    def _load(self, count, version, method, *args):
        self.held = None
        # The server may have been restarted since `start`.
        self._rpc("kpt_prepare")
        answers = self._rpc(method, *args)
        for answer in answers:
            if "refused" in answer:
                return answer["refused"]
        for answer in answers:
            if answer["tensors"] != count:
                raise EngineFailure(
                    f"The server loaded {answer['tensors']} of {count} "
                    "tensors."
                )
        self.model = "policy"
        self._set_version(version)
        self.held = version
        return None

    def push_adapter(self, directory, version):
        """Loads an adapter from the directory of its files."""
        old, new = self.model, f"policy-{version}"
        body = {"lora_name": new, "lora_path": str(directory)}
        self._call("POST", "/v1/load_lora_adapter", body)
        self.model = new
        if old != "policy":
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": old})
        self._set_version(version)

    def _set_version(self, version):
        for _ in range(20):
            answer = self._call("POST", "/reset_prefix_cache")
            if answer.get("success", True):
                break
            # Blocks of requests that have just ended are freed with a delay.
            time.sleep(0.1)
        else:
            raise EngineFailure("vLLM did not reset its prefix cache.")
        body = {"new_version": version}
        self._call("POST", "/update_weight_version", body)

    # Sampling

    def run(self, jobs, on_tokens=None, interrupted=None, more=None):
        """Runs jobs as `LocalEngine.run` does.

        `on_tokens` gets the tokens of a sample when its job has ended. With
        several processes an interrupted job has no tokens.
        """
        return run_in_threads(
            self, IN_FLIGHT, jobs, on_tokens, interrupted, more
        )

    def run_on_each(self, job):
        """Runs a job on each of the server's engines; returns the results."""
        connections = http.Connections()
        count = self.arguments.get("data_parallel_size", 1)
        if count == 1:
            return [self.run_job(job, connections)]
        # vLLM's choice of the engine is overruled by this header.
        return [
            self.run_job(job, connections, {"X-data-parallel-rank": f"{rank}"})
            for rank in range(count)
        ]

    def abort(self):
        """Ends running requests; they have the tokens sampled so far."""
        self._call("POST", "/abort_requests", {})

    def run_job(self, job, connections, headers=None):
        """Runs one job and returns its `Result`."""
        body = {
            "model": self.model,
            "token_ids": list(job.token_ids),
            "sampling_params": job.params,
        }
        path = "/inference/v1/generate"
        answer = self._call("POST", path, body, connections, headers=headers)
        result = Result(job.params["n"])
        if answer.get("prompt_logprobs"):
            result.prompt = [
                [(int(t), x["logprob"]) for t, x in (place or {}).items()]
                for place in answer["prompt_logprobs"]
            ]
        for choice in answer["choices"]:
            i = choice["index"]
            result.token_ids[i] = choice["token_ids"]
            result.finish_reasons[i] = choice["finish_reason"]
            content = (choice.get("logprobs") or {}).get("content") or ()
            result.logps[i] = [place["logprob"] for place in content]
            spans = choice.get("weight_versions") or ()
            result.versions |= {span["version"] for span in spans}
        return result

    def _call(
        self, method, path, body=None, connections=None, timeout=None,
        headers=None,
    ):  # fmt: skip
        if connections is None:
            connections = http.Connections()
        return http.call(
            self.url, self.api_key, method, path, body,
            timeout or self.timeout, connections, headers,
        )  # fmt: skip

    def _rpc(self, method, *args):
        body = {"method": method, "args": args, "timeout": self.timeout}
        return self._call("POST", "/collective_rpc", body)["results"]


def run_in_threads(engine, in_flight, jobs, on_tokens, interrupted, more):
    """Runs jobs by `engine.run_job`, as `job_threads.run` does.

    The `in_flight` samples are those of all processes of the run.
    """
    abort, count = engine.abort, processes.count()
    if count > 1:
        # A server would end the requests of the other processes too.
        abort, in_flight = None, max(1, in_flight // count)
    return job_threads.run(
        jobs, engine.run_job, abort, in_flight, on_tokens, interrupted, more
    )


def _on_each(servers, f):
    return [f(server) for server in servers]


def _flags(arguments):
    """Converts vLLM's engine arguments to command line options."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}"
            yield json.dumps(value) if isinstance(value, dict) else str(value)
