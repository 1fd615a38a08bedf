"""Adapters on disk, under the `tinker://` paths of the API.

`tinker://RUN/weights/NAME` has an adapter and the state of its optimizer,
`tinker://RUN/sampler_weights/NAME` an adapter alone. Both are folders of the
same names with the files of PEFT, which vLLM and `task.load_adapter` read.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import re
import secrets
import shutil

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from keras_posttrain.serve.adapters import AdapterState
from keras_posttrain.serve.refused import Refused, unknown

KINDS = {"weights": "training", "sampler_weights": "sampler"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,199}")
META, OPTIMIZER = "checkpoint.json", "optimizer.safetensors"


@dataclasses.dataclass(frozen=True)
class Place:
    """The parts of a `tinker://` path."""

    run: str
    kind: str
    name: str

    def __post_init__(self):
        valid = self.kind in KINDS
        if not valid or not all(map(NAME.fullmatch, (self.run, self.name))):
            raise Refused(
                "A path must be tinker://RUN/weights/NAME or "
                "tinker://RUN/sampler_weights/NAME, of letters, digits, '-', "
                f"'_', '.' and ':'. Received: {self.path!r:.300}"
            )

    @classmethod
    def of(cls, path):
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3:
            raise Refused(
                "A path must be tinker://RUN/weights/NAME or "
                f"tinker://RUN/sampler_weights/NAME. Received: {path!r:.300}"
            )
        return cls(*parts)

    @property
    def path(self):
        return f"tinker://{self.run}/{self.kind}/{self.name}"


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        directory: path.
        task: the task whose adapter they are of.
        base_model: str, the name that clients call the model by.
    """

    def __init__(self, directory, task, base_model):
        self.directory = pathlib.Path(directory)
        self._task, self._base_model = task, base_model

    def save(self, place, state, meta, overwrite=False):
        """Writes an adapter; it is complete when this returns.

        Args:
            place: `Place`.
            state: `AdapterState`; gradients are not saved.
            meta: dict, kept with it.
            overwrite: bool, whether one of that name is replaced.
        """
        folder = self._folder(place)
        if folder.exists() and not overwrite:
            raise Refused(
                f"{place.path} exists. Choose another name, or pass "
                "overwrite=True."
            )
        draft = self.directory / f".{secrets.token_hex(8)}"
        try:
            with self._task.using_weights(
                state.weights,
                [v.value for v in self._task.non_trainable_variables],
            ):
                self._task.adapter.save(draft, self._base_model)
            if place.kind == "weights":
                _save_optimizer(draft / OPTIMIZER, state)
            now = datetime.datetime.now(datetime.UTC).isoformat()
            meta = meta | {"base_model": self._base_model, "time": now}
            (draft / META).write_text(json.dumps(meta, indent=2) + "\n")
            folder.parent.mkdir(parents=True, exist_ok=True)
            if folder.exists():
                os.replace(folder, f"{draft}.old")
            os.replace(draft, folder)
        finally:
            for left in (draft, pathlib.Path(f"{draft}.old")):
                shutil.rmtree(left, ignore_errors=True)

    def load(self, place, optimizer=False):
        """Returns the `AdapterState` of a checkpoint."""
        folder = self._existing(place)
        self._task.adapter.load(folder)
        variables = self._task.trainable_variables
        state = AdapterState.of([v.value for v in variables])
        if not optimizer:
            return state
        if place.kind != "weights":
            raise Refused(
                "Weights for a sampler have no optimizer state: load a "
                f"checkpoint of `save_state`. Received: {place.path}"
            )
        arrays = load_file(folder / OPTIMIZER)
        for name in ("means", "squares"):
            values = [
                jax.device_put(arrays[f"{name}.{i}"], v.value.sharding)
                for i, v in enumerate(variables)
            ]
            setattr(state, name, values)
        state.step = int(arrays["step"][()])
        return state

    def meta(self, place):
        """Returns what `save` kept with a checkpoint, a dict."""
        return json.loads((self._existing(place) / META).read_text())

    def delete(self, place):
        shutil.rmtree(self._existing(place))

    def places(self, run=None):
        """Returns the places of all checkpoints, or of those of a run."""
        found = sorted(self.directory.glob(f"*/*/*/{META}"))
        parts = [path.relative_to(self.directory).parts for path in found]
        places = [Place(*part[:3]) for part in parts]
        return [p for p in places if run is None or p.run == run]

    def describe(self, place):
        """Returns a checkpoint as the API lists it, a dict."""
        folder, meta = self._existing(place), self.meta(place)
        return {
            "checkpoint_id": f"{place.kind}/{place.name}",
            "checkpoint_type": KINDS[place.kind],
            "time": meta["time"],
            "tinker_path": place.path,
            "size_bytes": sum(x.stat().st_size for x in folder.iterdir()),
            "user_metadata": meta.get("user_metadata"),
        }

    def _folder(self, place):
        return self.directory / place.run / place.kind / place.name

    def _existing(self, place):
        folder = self._folder(place)
        if not (folder / META).exists():
            known = [p.path for p in self.places()]
            raise unknown("checkpoint", place.path, known)
        return folder


def _save_optimizer(path, state):
    arrays = {"step": np.array(state.step, np.int64)}
    for name in ("means", "squares"):
        for i, array in enumerate(getattr(state, name)):
            arrays[f"{name}.{i}"] = np.asarray(array)
    save_file(arrays, path)
