"""What each request of the Tinker API does."""

import dataclasses
import datetime
import functools
import json
import secrets
import uuid

from keras_posttrain.serve.adapters import AdamParams, AdapterState
from keras_posttrain.serve.checkpoints import Place
from keras_posttrain.serve.jobs import Job, Reply, SampleJob
from keras_posttrain.serve.refused import Refused, field, unknown
from keras_posttrain.serve.sampling import read_request
from keras_posttrain.serve.sessions import Model, Weights
from keras_posttrain.serve.wire import (
    PROTO,
    read_train_request,
    train_response,
)

# Seconds that a request for a result waits for it; clients wait 45.
PATIENCE = 20
# What clients do otherwise by default: chunks of a call at once, which the
# server would have to put in order, and more connections than threads serve.
CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "sample_max_concurrent_requests": 256,
    # A first call compiles, which takes minutes for a large model.
    "sample_enable_stuck_detection": False,
}
JSON = "application/json"


def as_json(body, is_last=False):
    return Reply(json.dumps(body).encode(), JSON, is_last)


class Service:
    """The methods of the API; each takes the body of a request.

    Args:
        trainer: `AdapterTrainer`.
        sessions: `Sessions`.
        checkpoints: `Checkpoints`.
        queue: `jobs.Queue`.
        results: `jobs.Results`.
        names: tuple of strings, by which clients may call the model; the
            first is that in answers.
        tokenizer_id: str, where clients find the tokenizer.
    """

    def __init__(
        self,
        trainer,
        sessions,
        checkpoints,
        queue,
        results,
        *,
        names,
        tokenizer_id,
    ):
        self._trainer, self._sessions = trainer, sessions
        self._checkpoints, self._queue = checkpoints, queue
        self._results = results
        self._names, self._tokenizer_id = names, tokenizer_id
        task = trainer.task
        self._tokenizer = task.tokenizer
        context = task.max_length or task.sequence_length
        self._context_length = min(context, task.sequence_length)
        # An adapter at its beginning is the base.
        base = functools.cache(lambda: trainer.initial(0))
        self._base = Weights(base)

    # Sessions

    def get_server_capabilities(self, body):
        model = {
            "model_name": self._names[0],
            "max_context_length": self._context_length,
            "trainable": True,
            "sampleable": True,
        }
        return as_json({"supported_models": [model]})

    def client_config(self, body):
        # The client asks for it on a connection of its own, and leaves that
        # open.
        return as_json(CLIENT_CONFIG, is_last=True)

    def accepted(self, body):
        """Answers what needs no work."""
        return as_json({"status": "accepted"})

    def healthz(self, body):
        return as_json({"status": "ok"})

    def create_session(self, body):
        session = self._sessions.create(body.get("user_metadata"))
        return as_json(
            {
                "type": "create_session",
                "session_id": session.session_id,
                "info_message": (
                    "Adapters are those of attention and MLP layers, not of "
                    "the unembedding (`train_unembed`)."
                ),
            }
        )

    def session_heartbeat(self, body):
        self._sessions.session(field(body, "session_id", str))
        return as_json({"type": "session_heartbeat"})

    def finish_session(self, body, session_id):
        self._sessions.session(session_id).is_finished = True
        return self.accepted(body)

    def get_session(self, body, session_id):
        session = self._sessions.session(session_id)
        return as_json(
            {
                "training_run_ids": list(session.models),
                "sampler_ids": list(session.samplers),
                "user_metadata": session.user_metadata,
            }
        )

    def list_sessions(self, body):
        ids = [s.session_id for s in self._sessions.all()]
        return as_json({"sessions": ids})

    # Models

    def create_model(self, body):
        self._check_model(field(body, "base_model", str))
        optimizer = field(body, "optimizer_config", dict, {})
        _check_optimizer(optimizer.get("type", "adamw"))
        lora = field(body, "lora_config", dict, None)
        if lora is None:
            raise Refused("This server trains LoRA adapters: `lora_config`.")
        most = self._trainer.task.adapter.lora.rank
        rank = field(lora, "rank", int)
        if not 1 <= rank <= most:
            raise Refused(
                f"`rank` must be from 1 to {most}, that of this server. "
                f"Received: rank={rank}. Start it with --lora-rank {rank}."
            )
        attention = field(lora, "train_attn", bool, True)
        mlp = field(lora, "train_mlp", bool, True)
        if not attention and not mlp:
            raise Refused(
                "Adapters are those of attention and MLP layers. Received: "
                "train_attn=False, train_mlp=False"
            )
        seed = field(lora, "seed", int, secrets.randbits(31)) % 2**31
        info = {
            "lora_rank": rank,
            "train_attn": attention,
            "train_mlp": mlp,
            "user_metadata": body.get("user_metadata"),
        }

        def make():
            weights = self._trainer.initial(seed, rank, attention, mlp)
            return AdapterState.of(weights)

        return self._new_model(body, info, make, "create_model")

    def _new_model(self, body, info, make, kind, **answer):
        session = self._sessions.session(field(body, "session_id", str))
        number = field(body, "model_seq_id", int)
        model_id = f"{session.session_id}:train:{number}"
        model = Model(model_id, session, info)
        self._sessions.add_model(session, model)

        def run():
            try:
                model.state = make()
            except BaseException:
                self._sessions.remove_model(model)
                raise
            return as_json({"type": kind, "model_id": model_id, **answer})

        return self._later(f"{model_id}:0", session, run, model_id=model_id)

    def get_info(self, body):
        model = self._sessions.model(field(body, "model_id", str))
        return as_json(
            {
                "type": "get_info",
                "model_id": model.model_id,
                "model_name": self._names[0],
                "is_lora": True,
                "lora_rank": model.info["lora_rank"],
                "model_data": {
                    "arch": type(self._trainer.task.causal_lm).__name__,
                    "model_name": self._names[0],
                    "tokenizer_id": self._tokenizer_id,
                },
            }
        )

    def unload_model(self, body):
        model = self._sessions.model(field(body, "model_id", str))

        def run():
            self._sessions.remove_model(model)
            return as_json(
                {"type": "unload_model", "model_id": model.model_id}
            )

        return self._of_model(model, body, run)

    # Training

    def forward_backward(self, body):
        """`body` is bytes."""
        request = read_train_request(body)
        model = self._sessions.model(request.model_id)
        self._trainer.check(request)

        def run():
            found = self._trainer.forward_backward(model.ready(), request)
            return Reply(train_response(*found), PROTO)

        return self._of_model(model, {"seq_id": request.seq_id}, run)

    def optim_step(self, body):
        model = self._sessions.model(field(body, "model_id", str))
        other = field(body, "optimizer_params", dict, {})
        _check_optimizer(other.get("type", "adamw"))
        given = field(body, "adam_params", dict, {})
        names = [x.name for x in dataclasses.fields(AdamParams)]
        for name in given:
            if name not in names:
                raise unknown("field of `adam_params`", name, names)
        params = AdamParams(**{k: field(given, k, float) for k in given})

        def run():
            metrics = self._trainer.optim_step(model.ready(), params)
            return as_json({"metrics": metrics})

        return self._of_model(model, body, run)

    # Checkpoints

    def save_weights(self, body):
        model = self._sessions.model(field(body, "model_id", str))
        name = field(body, "path", str, f"step-{uuid.uuid4().hex[:8]}")
        place = Place(model.model_id, "weights", name)
        overwrite = field(body, "overwrite", bool, False)
        meta = self._meta(model, body)

        def run():
            state = model.ready()
            self._checkpoints.save(place, state, meta, overwrite)
            return as_json({"type": "save_weights", "path": place.path})

        return self._of_model(model, body, run)

    def save_weights_for_sampler(self, body):
        model = self._sessions.model(field(body, "model_id", str))
        answer = {"type": "save_weights_for_sampler"}
        name = field(body, "path", str, None)
        if name is None:
            number = field(body, "sampling_session_seq_id", int)

            def run():
                weights = model.ready().weights
                sampler_id = self._sessions.add_sampler(
                    model.session, number, Weights(lambda: weights)
                )
                return as_json(answer | {"sampling_session_id": sampler_id})
        else:
            place = Place(model.model_id, "sampler_weights", name)
            meta = self._meta(model, body)

            def run():
                self._checkpoints.save(place, model.ready(), meta)
                return as_json(answer | {"path": place.path})

        return self._of_model(model, body, run)

    def _meta(self, model, body):
        metadata = field(body, "user_metadata", dict, None)
        return model.info | {"run": model.model_id, "user_metadata": metadata}

    def load_weights(self, body):
        place = Place.of(field(body, "path", str))
        optimizer = field(body, "optimizer", bool)
        if body.get("base_model") is not None:
            self._check_model(body["base_model"])
        load = functools.partial(self._checkpoints.load, place, optimizer)
        meta = self._checkpoints.meta(place)
        kind = {"type": "load_weights", "path": place.path}
        if body.get("session_id") is not None:
            kept = ("lora_rank", "train_attn", "train_mlp")
            info = {name: meta[name] for name in kept}
            info["user_metadata"] = body.get("user_metadata")
            return self._new_model(
                body, info, load, "load_weights", path=place.path
            )
        model = self._sessions.model(field(body, "model_id", str))

        def run():
            model.ready()
            model.state = load()
            return as_json(kind | {"model_id": model.model_id})

        return self._of_model(model, body, run)

    def weights_info(self, body):
        meta = self._checkpoints.meta(
            Place.of(field(body, "tinker_path", str))
        )
        return as_json(
            {
                "base_model": meta["base_model"],
                "is_lora": True,
                "lora_rank": meta["lora_rank"],
                "train_unembed": False,
                "train_mlp": meta["train_mlp"],
                "train_attn": meta["train_attn"],
            }
        )

    def list_checkpoints(self, body, run=None):
        places = self._checkpoints.places(run)
        found = [self._checkpoints.describe(place) for place in places]
        return as_json({"checkpoints": found, "cursor": _cursor(found)})

    def delete_checkpoint(self, body, run, kind, name):
        self._checkpoints.delete(Place(run, kind, name))
        return Reply(b"", JSON)

    def list_training_runs(self, body):
        runs = {m.model_id for m in self._sessions.models()}
        runs |= {place.run for place in self._checkpoints.places()}
        found = [self._training_run(run) for run in sorted(runs)]
        return as_json({"training_runs": found, "cursor": _cursor(found)})

    def get_training_run(self, body, run):
        return as_json(self._training_run(run))

    def _training_run(self, run):
        places = self._checkpoints.places(run)
        models = {m.model_id: m.info for m in self._sessions.models()}
        if run not in models and not places:
            raise unknown("training run", run, models)
        found = sorted(
            map(self._checkpoints.describe, places), key=lambda x: x["time"]
        )
        info = models.get(run) or self._checkpoints.meta(places[0])
        now = datetime.datetime.now(datetime.UTC).isoformat()
        last = {x["checkpoint_type"]: x for x in found}
        return {
            "training_run_id": run,
            "base_model": self._names[0],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": info["lora_rank"],
            "last_request_time": found[-1]["time"] if found else now,
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": info.get("user_metadata"),
        }

    # Sampling

    def create_sampling_session(self, body):
        session = self._sessions.session(field(body, "session_id", str))
        number = field(body, "sampling_session_seq_id", int)
        weights = self._weights_of(body)
        sampler_id = self._sessions.add_sampler(session, number, weights)
        return as_json(
            {
                "type": "create_sampling_session",
                "sampling_session_id": sampler_id,
            }
        )

    def _weights_of(self, body):
        if body.get("base_model") is not None:
            self._check_model(body["base_model"])
        path = field(body, "model_path", str, None)
        if path is None:
            field(body, "base_model", str)
            return self._base
        place = Place.of(path)
        self._checkpoints.meta(place)
        load = functools.cache(lambda: self._checkpoints.load(place).weights)
        return Weights(load, path)

    def get_sampler(self, body, sampler_id):
        _, weights = self._sessions.sampler(sampler_id)
        return as_json(
            {
                "sampler_id": sampler_id,
                "base_model": self._names[0],
                "model_path": weights.path,
            }
        )

    def asample(self, body):
        request = read_request(
            body,
            self._tokenizer,
            self._context_length,
            self._trainer.vocabulary_size,
        )
        sampler_id = field(body, "sampling_session_id", str)
        session, weights = self._sessions.sampler(sampler_id)
        number = body.get("seq_id")
        number = uuid.uuid4().hex if number is None else number
        request_id = f"{sampler_id}:{number}"
        job = SampleJob(weights, request, session.is_alive)
        self._results.add(request_id, lambda: self._queue.submit(job))
        count = request.request.num_generations
        ids = [f"{request_id}:{i}" for i in range(count)]
        return as_json({"request_id": request_id, "sample_sequence_ids": ids})

    # Results

    def retrieve_future(self, body):
        """Returns a result, or `None` where it is not ready yet."""
        request_id = field(body, "request_id", str)
        future = self._results.get(request_id)
        try:
            error = future.exception(PATIENCE)
        except TimeoutError:
            return None
        if error is None:
            return future.result()
        is_user = isinstance(error, (Refused, ValueError))
        return as_json(
            {
                "error": str(error) or type(error).__name__,
                "category": "user" if is_user else "server",
            }
        )

    def _of_model(self, model, body, run):
        number = body.get("seq_id")
        number = uuid.uuid4().hex if number is None else number
        return self._later(
            f"{model.model_id}:{number}",
            model.session,
            run,
            model_id=model.model_id,
        )

    def _later(self, request_id, session, run, **more):
        job = Job(run, session.is_alive)
        self._results.add(request_id, lambda: self._queue.submit(job))
        return as_json({"request_id": request_id, **more})

    def _check_model(self, name):
        if name not in self._names:
            raise Refused(
                f"This server has the base model {self._names[0]!r} alone. "
                f"Received: base_model={name!r}",
                404,
            )


def _check_optimizer(name):
    if name != "adamw":
        raise Refused(
            f"The optimizer of this server is 'adamw'. Received: {name!r}"
        )


def _cursor(found):
    return {"offset": 0, "limit": len(found), "total_count": len(found)}
