"""The server: threads that answer requests, and one that computes."""

import hmac
import json
import re
import secrets
import sys
import threading
import traceback
import urllib.parse

import keras

from keras_posttrain.episodes.loopback import LoopbackHandler, LoopbackServer
from keras_posttrain.rollout import NativeRollout
from keras_posttrain.serve.adapters import AdapterTrainer
from keras_posttrain.serve.checkpoints import Checkpoints
from keras_posttrain.serve.jobs import Queue, Results, SampleJob
from keras_posttrain.serve.refused import Refused
from keras_posttrain.serve.sampling import Sampler
from keras_posttrain.serve.service import JSON, Service
from keras_posttrain.serve.sessions import Sessions

API = "/api/v1"
# The client asks for keys that begin so.
KEY_PREFIX = "tml-"
ROUTES = {
    "GET": {
        "get_server_capabilities": "get_server_capabilities",
        "healthz": "healthz",
        "sessions": "list_sessions",
        "sessions/(?P<session_id>[^/]+)": "get_session",
        "samplers/(?P<sampler_id>[^/]+)": "get_sampler",
        "training_runs": "list_training_runs",
        "training_runs/(?P<run>[^/]+)": "get_training_run",
        "training_runs/(?P<run>[^/]+)/checkpoints": "list_checkpoints",
        "checkpoints": "list_checkpoints",
    },
    "POST": {
        "client/config": "client_config",
        "client/dynamic_config": "accepted",
        "telemetry": "accepted",
        "cancel_future": "accepted",
        "create_session": "create_session",
        "session_heartbeat": "session_heartbeat",
        "sessions/(?P<session_id>[^/]+)/finish": "finish_session",
        "create_model": "create_model",
        "get_info": "get_info",
        "unload_model": "unload_model",
        "forward_backward": "forward_backward",
        "optim_step": "optim_step",
        "save_weights": "save_weights",
        "save_weights_for_sampler": "save_weights_for_sampler",
        "load_weights": "load_weights",
        "weights_info": "weights_info",
        "create_sampling_session": "create_sampling_session",
        "asample": "asample",
        "retrieve_future": "retrieve_future",
    },
    "DELETE": {
        "training_runs/(?P<run>[^/]+)/checkpoints/(?P<kind>[^/]+)/"
        "(?P<name>[^/]+)": "delete_checkpoint",
    },
}


class TinkerServer:
    """A server of the Tinker API on this machine's loopback address.

    The `tinker` client of Thinking Machines, and what is written for it, such
    as the recipes of the Tinker cookbook, train LoRA adapters of the task's
    model and sample from them. All adapters share the model and the compiled
    programs. Use it as a context manager.

    Args:
        task: a task with an adapter and a tokenizer, such as
            `kpt.SFTTask.from_preset(preset, lora=kpt.LoRA(rank=32,
            alpha=32))`. The rank is the most that a client may ask for, and
            `sequence_length` the most tokens of a sequence. The task trains
            nothing itself while the server runs.
        directory: path of the folder of checkpoints.
        name: str, how clients call the model. By default the task's preset.
        tokenizer: str, what clients give to `transformers` for the
            tokenizer. By default the task's preset.
        key: str that clients must send, which begins with `"tml-"`; `None`
            for a new one.
        port: int, 0 for a free one.
        micro_batch_size: int, rows that pass through the model at once.
        max_models: int, adapters in training at once.

    Attributes:
        url: str, the `base_url` of clients, `TINKER_BASE_URL`.
        key: str, their `api_key`, `TINKER_API_KEY`.

    Example:

    ```python
    import tinker

    from keras_posttrain.serve import TinkerServer

    task = kpt.SFTTask.from_preset("qwen3_0.6b_en", lora=kpt.LoRA(rank=32))
    with TinkerServer(task, "checkpoints/") as server:
        client = tinker.ServiceClient(
            base_url=server.url, api_key=server.key
        )
    ```
    """

    def __init__(
        self,
        task,
        directory,
        *,
        name=None,
        tokenizer=None,
        key=None,
        port=0,
        micro_batch_size=8,
        max_models=16,
    ):
        if getattr(task, "adapter", None) is None or task.tokenizer is None:
            raise ValueError(
                "`task` must be a task with an adapter and a tokenizer: "
                "kpt.SFTTask.from_preset(preset, lora=kpt.LoRA(rank=32, "
                f"alpha=32)). Received: task={task!r:.200}"
            )
        key = (
            f"{KEY_PREFIX}{secrets.token_urlsafe(24)}" if key is None else key
        )
        if not isinstance(key, str) or not key.startswith(KEY_PREFIX):
            raise ValueError(
                f"`key` must be a string that begins with {KEY_PREFIX!r}, as "
                "the client wants it."
            )
        for what, value in (
            ("micro_batch_size", micro_batch_size),
            ("max_models", max_models),
        ):
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"`{what}` must be a positive int. Received: {value!r}"
                )
        self.task, self.key = task, key
        preset = task.preset or "model"
        names = tuple(dict.fromkeys((name or preset, preset)))
        engine = NativeRollout()
        engine.set_model(task)
        self._queue = Queue()
        self._sampler = Sampler(engine, task.tokenizer)
        self._service = Service(
            AdapterTrainer(task, micro_batch_size),
            Sessions(max_models),
            Checkpoints(directory, task, names[0]),
            self._queue,
            Results(),
            names=names,
            tokenizer_id=tokenizer or preset,
        )
        self._http = LoopbackServer(_handler(self._service, key), port)
        self.url = f"http://127.0.0.1:{self._http.port}"

    def __enter__(self):
        # Keras keeps the distribution for each thread.
        distribution = keras.distribution.distribution()

        def work():
            keras.distribution.set_distribution(distribution)
            self._work()

        self._worker = threading.Thread(target=work, daemon=True)
        self._worker.start()
        threading.Thread(
            target=self._http.serve_forever, args=(0.1,), daemon=True
        ).start()
        return self

    def __exit__(self, *error):
        self._http.shutdown()
        self._http.server_close()
        self._queue.close()
        self._worker.join()

    def _work(self):
        while (job := self._queue.next()) is not None:
            if isinstance(job, SampleJob):
                self._sampler.run(job, self._queue)
                continue
            try:
                job.future.set_result(job.run())
            except BaseException as error:  # noqa: BLE001 - the client is told
                if not isinstance(error, (Refused, ValueError)):
                    traceback.print_exc(file=sys.stderr)
                job.future.set_exception(error)


def _handler(service, key):
    """Returns the class that handles requests."""

    class Handler(LoopbackHandler):
        def do_GET(self):
            self._answer("GET", has_body=False)

        def do_POST(self):
            self._answer("POST", has_body=True)

        def do_PUT(self):
            self._answer("PUT", has_body=True)

        def do_DELETE(self):
            self._answer("DELETE", has_body=False)

        def _answer(self, verb, has_body):
            try:
                data = self.read_body(Refused) if has_body else b""
                given = self.headers.get("X-API-Key", "")
                if not hmac.compare_digest(given.encode(), key.encode()):
                    self.close_connection = True
                    raise Refused(
                        "The API key is not that of this server. Set "
                        "TINKER_API_KEY to the one that it shows.",
                        401,
                    )
                name, parts = _route(verb, self.path)
                body = data
                if name != "forward_backward":
                    body = _parsed(data) if has_body else {}
                reply = getattr(service, name)(body, **parts)
            except (Refused, ValueError) as error:
                status = getattr(error, "status", 400)
                self._send_json(status, {"detail": str(error)})
                return
            except Exception as error:  # noqa: BLE001 - the client is told
                traceback.print_exc(file=sys.stderr)
                self._send_json(500, {"detail": repr(error)})
                return
            if reply is None:
                again = {"type": "try_again", "queue_state": "active"}
                self._send_json(408, again | {"request_id": ""})
            else:
                self.close_connection |= reply.is_last
                self.send_bytes(200, reply.data, reply.content_type)

        def _send_json(self, status, body):
            self.send_bytes(status, json.dumps(body).encode(), JSON)

    return Handler


def _route(verb, target):
    """Returns the name of a method of `Service`, and the path's parts."""
    path = urllib.parse.urlsplit(target).path
    for pattern, name in ROUTES.get(verb, {}).items():
        if found := re.fullmatch(f"{API}/{pattern}", path):
            parts = found.groupdict().items()
            return name, {k: urllib.parse.unquote(v) for k, v in parts}
    raise Refused(
        f"This server does not have {verb} {path}: see its guide for the "
        "parts of the Tinker API that it supports.",
        404,
    )


def _parsed(data):
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refused(f"The request is no JSON: {error}", 422) from error
    if not isinstance(body, dict):
        raise Refused("The request must be a JSON object.", 422)
    return body
