"""The score head of a reward model, and its tensor in files."""

import json
import math
import pathlib
import tempfile

import jax.numpy as jnp
import keras
import numpy as np
from safetensors.numpy import save_file

from keras_posttrain.models import context
from keras_posttrain.models.hf import adapter_files, checkpoint_files

# The names in transformers' models for sequence classification.
TENSOR = "score.weight"
MODULE = "score"


class ScoreHead(keras.layers.Layer):
    """A linear map from a sequence's last hidden state to its score.

    It has no bias, which would cancel in every comparison of two scores. The
    weights are float32.

    Call arguments:
        hidden: float array of shape `(rows, length, hidden_dim)`, or of the
            rows' pieces, as of `Policy.hidden_states`.
        segment_ids: int array of shape `(rows, length)`.
        num_sequences: int, the maximum number of sequences in a row.

    Returns:
        A float32 array of shape `(rows, num_sequences)`, 0 at unused slots.
    """

    def __init__(self, hidden_dim, name="score"):
        super().__init__(name=name, dtype="float32")
        self.kernel = self.add_weight(
            name="kernel",
            shape=(hidden_dim,),
            initializer=keras.initializers.RandomNormal(0.0, 0.02, seed=0),
        )
        self.built = True

    def call(self, hidden, segment_ids, num_sequences):
        ids = jnp.arange(1, num_sequences + 1)
        member = segment_ids[:, :, None] == ids
        columns = jnp.arange(segment_ids.shape[1])[None, :, None]
        last = jnp.max(jnp.where(member, columns, 0), axis=1)
        kernel = jnp.asarray(self.kernel.value, "float32")
        pieces = context.pieces_of(segment_ids.shape)
        if pieces.count > 1:
            # Scores are sent between devices, not hidden states.
            of_tokens = pieces.join(hidden.astype("float32") @ kernel)
            scores = jnp.take_along_axis(of_tokens, last, axis=1)
        else:
            ends = jnp.take_along_axis(hidden, last[:, :, None], axis=1)
            scores = ends.astype("float32") @ kernel
        return jnp.where(member.any(axis=1), scores, 0.0)

    def tensor(self):
        """Returns the kernel in the shape of files, `(1, hidden_dim)`."""
        return np.asarray(self.kernel.value, "float32")[None]

    def take(self, tensor, source):
        """Sets the kernel to a tensor that was read from `source`."""
        wanted = (1, *self.kernel.shape)
        if tensor.shape != wanted:
            raise ValueError(
                f"`{TENSOR}` must have the shape {wanted}: one score, of as "
                "many features as the model has. Received: shape "
                f"{tensor.shape} in {str(source)!r}"
            )
        self.kernel.assign(tensor[0].astype("float32"))


def read_score(directory):
    """Reads `score.weight` of a checkpoint; `None` if it has none."""
    tensors = checkpoint_files.Reader(directory)
    return tensors.get(TENSOR) if TENSOR in tensors.names else None


def add_to_adapter(directory, tensor):
    """Adds the head to a PEFT adapter directory, in PEFT's format."""
    config, tensors = adapter_files.read_peft(directory)
    config |= {"task_type": "SEQ_CLS", "modules_to_save": [MODULE]}
    tensors[adapter_files.PREFIX + TENSOR] = tensor
    _write_adapter(directory, config, tensors)


def split_adapter(directory, without):
    """Copies an adapter except for its head, which it returns, or `None`."""
    config, tensors = adapter_files.read_peft(directory)
    tensor = tensors.pop(adapter_files.PREFIX + TENSOR, None)
    # PEFT lists both names whichever of them the model has.
    if set(config.get("modules_to_save") or ()) <= {MODULE, "classifier"}:
        config["modules_to_save"] = None
    _write_adapter(without, config, tensors)
    return tensor


def _write_adapter(directory, config, tensors):
    directory = pathlib.Path(directory)
    save_file(
        tensors,
        str(directory / adapter_files.WEIGHTS_FILE),
        metadata={"format": "pt"},
    )
    checkpoint_files.write_json(directory / adapter_files.CONFIG_FILE, config)


def add_to_export(directory, tensor):
    """Turns an exported model into one for sequence classification."""
    directory = pathlib.Path(directory)
    config = checkpoint_files.read_json(directory / "config.json")
    config["architectures"] = [
        name.replace("ForCausalLM", "ForSequenceClassification")
        for name in config.get("architectures", [])
    ]
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    index = directory / checkpoint_files.INDEX
    if index.is_file():
        content = json.loads(index.read_text())
        file = "model-score.safetensors"
        save_file({TENSOR: tensor}, directory / file, {"format": "pt"})
        content["weight_map"][TENSOR] = file
        checkpoint_files.write_json(index, content)
    else:
        _rewrite(directory, tensor)
    checkpoint_files.write_json(directory / "config.json", config)


def _rewrite(directory, tensor):
    """Rewrites a model's only weight file with the head, tensor by tensor."""
    tensors = checkpoint_files.Reader(directory)
    shapes = {**tensors.shapes, TENSOR: tensor.shape}
    dtypes = {**tensors.dtypes, TENSOR: tensor.dtype.name}
    shards = checkpoint_files.plan_shards(shapes, dtypes, math.inf)
    (names,) = shards.values()
    arrays = (tensor if n == TENSOR else tensors.get(n) for n in names)
    with tempfile.TemporaryDirectory(dir=directory) as new:
        checkpoint_files.write_tensors(new, shards, shapes, dtypes, arrays)
        path = pathlib.Path(new, checkpoint_files.SINGLE)
        path.replace(directory / checkpoint_files.SINGLE)
