"""Who uses the server: sessions, their models and their samplers."""

import collections
import dataclasses
import threading
import time
import uuid

from keras_posttrain.serve.refused import Refused, unknown

# Seconds after which a client that sends no heartbeat, which it does every
# ten seconds, has gone.
SILENCE = 120
# Samplers of unnamed weights that a session keeps, the last used.
MAX_SAMPLERS = 64


@dataclasses.dataclass(eq=False)
class Weights:
    """The weights of an adapter to sample from.

    Attributes:
        load: function without arguments that returns a list of arrays, for
            the thread that computes.
        path: str, the `tinker://` path they were loaded from, or `None`.
    """

    load: object
    path: str | None = None


@dataclasses.dataclass(eq=False)
class Model:
    """An adapter in training.

    Attributes:
        model_id: str.
        session: `Session`.
        info: dict of `lora_rank`, `train_attn`, `train_mlp` and
            `user_metadata`.
        state: `AdapterState`, or `None` until it has been made.
    """

    model_id: str
    session: object
    info: dict
    state: object = None

    def ready(self):
        """Returns the `AdapterState`."""
        if self.state is None:
            raise Refused(f"The model {self.model_id!r} could not be created.")
        return self.state


class Session:
    """One client's models and samplers."""

    def __init__(self, session_id, user_metadata):
        self.session_id, self.user_metadata = session_id, user_metadata
        self.models, self.samplers = {}, collections.OrderedDict()
        self.is_finished = False
        self.seen = time.monotonic()

    def is_alive(self):
        is_silent = time.monotonic() - self.seen > SILENCE
        return not self.is_finished and not is_silent


class Sessions:
    """All sessions, for the threads that answer requests.

    Args:
        max_models: int, adapters in training at once.
    """

    def __init__(self, max_models):
        self._max_models = max_models
        self._sessions, self._lock = {}, threading.RLock()

    def create(self, user_metadata=None):
        session = Session(f"kpt-{uuid.uuid4()}", user_metadata)
        with self._lock:
            self._sessions[session.session_id] = session
        return session

    def session(self, session_id):
        """Returns a session, which its client has just used."""
        session = self._sessions.get(session_id)
        if session is None:
            raise unknown("session", session_id)
        session.seen = time.monotonic()
        return session

    def all(self):
        with self._lock:
            return list(self._sessions.values())

    def models(self):
        return [m for session in self.all() for m in session.models.values()]

    def add_model(self, session, model):
        """Adds a model, in place of those of clients that have gone."""
        with self._lock:
            if model.model_id in session.models:
                return
            while len(self.models()) >= self._max_models:
                gone = [m for m in self.models() if not m.session.is_alive()]
                if not gone:
                    raise Refused(
                        f"This server trains {self._max_models} models at "
                        "once. Close other clients, or start it with a "
                        "larger --max-models."
                    )
                oldest = min(gone, key=lambda m: m.session.seen)
                del oldest.session.models[oldest.model_id]
            session.models[model.model_id] = model

    def model(self, model_id):
        """Returns a model, which its client has just used."""
        session_id, _, number = str(model_id).rpartition(":train:")
        session = self._sessions.get(session_id) if number else None
        model = session and session.models.get(model_id)
        if model is None:
            raise unknown(
                "model", model_id, [m.model_id for m in self.models()]
            )
        session.seen = time.monotonic()
        return model

    def remove_model(self, model):
        model.session.models.pop(model.model_id, None)

    def add_sampler(self, session, number, weights):
        """Adds a sampler and returns its id."""
        sampler_id = f"{session.session_id}:sample:{number}"
        with self._lock:
            session.samplers.setdefault(sampler_id, weights)
            unnamed = [
                k for k, w in session.samplers.items() if w.path is None
            ]
            for old in unnamed[:-MAX_SAMPLERS]:
                del session.samplers[old]
        return sampler_id

    def sampler(self, sampler_id):
        """Returns `(session, weights)`, which the client has just used."""
        session_id, _, _ = str(sampler_id).rpartition(":sample:")
        session = self._sessions.get(session_id)
        with self._lock:
            if session is None or sampler_id not in session.samplers:
                raise Refused(
                    f"There is no sampler {sampler_id!r}. A session keeps "
                    f"the {MAX_SAMPLERS} it has used last, and those of "
                    "weights that were saved under a name.",
                    404,
                )
            session.samplers.move_to_end(sampler_id)
            session.seen = time.monotonic()
            return session, session.samplers[sampler_id]
