"""The bodies of requests and answers as the `tinker` client writes them.

Training data and results are protocol buffers, whose messages are those of
the client's package; the rest is JSON.
"""

import dataclasses
import math

import numpy as np

from keras_posttrain.serve.refused import Refused, field

try:
    from google.protobuf.message import DecodeError
    from tinker.proto import tinker_public_pb2 as proto
except ImportError as error:
    raise ImportError(
        "The server of the Tinker API reads the messages of the tinker "
        "package: pip install 'keras_posttrain[tinker]'"
    ) from error

PROTO = "application/x-protobuf"
DTYPES = {
    proto.DTYPE_FLOAT32: np.float32,
    proto.DTYPE_INT64: np.int64,
    proto.DTYPE_INT32: np.int32,
}


@dataclasses.dataclass(frozen=True)
class Example:
    """A sequence of a training request.

    Attributes:
        token_ids: int32 array of shape `(tokens,)`, the model's input.
        inputs: dict of arrays of shape `(tokens,)` or `(tokens, targets)`,
            what the loss reads: `target_tokens` and more.
    """

    token_ids: np.ndarray
    inputs: dict


@dataclasses.dataclass(frozen=True)
class TrainRequest:
    """A forward pass, and a backward pass unless `forward_only`."""

    model_id: str
    seq_id: int
    examples: list
    loss: str
    config: dict
    forward_only: bool


def read_train_request(body):
    """Reads a `TrainRequest` of bytes."""
    message = proto.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused(
            "The request is no ForwardBackwardRequest of the tinker client: "
            f"{error}",
            422,
        ) from error
    config = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = getattr(value, value.WhichOneof("value") or "number")
    return TrainRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        examples=[_example(i, x) for i, x in enumerate(message.data)],
        loss=message.loss_fn,
        config=config,
        forward_only=message.forward_only,
    )


def _example(number, message):
    chunks = []
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise Refused(
                "This server takes text alone. Received: a chunk of "
                f"{chunk.WhichOneof('chunk')} in datum {number}"
            )
        chunks.append(_array(chunk.encoded_text.tokens, np.int32))
    inputs = {
        name: _tensor(f"`{name}` of datum {number}", tensor)
        for name, tensor in message.loss_fn_inputs.items()
    }
    token_ids = np.concatenate([np.zeros(0, np.int32), *chunks])
    return Example(token_ids, inputs)


def _tensor(what, message):
    if message.dtype not in DTYPES:
        raise Refused(f"{what} must be float32 or int64.", 422)
    dtype = DTYPES[message.dtype]
    shape = tuple(message.shape)
    if not message.HasField("sparse_csr"):
        values = _array(message.dense, dtype)
        if math.prod(shape or (len(values),)) != len(values):
            raise Refused(
                f"{what} has {len(values)} values, not those of shape "
                f"{shape}.",
                422,
            )
        return values.reshape(shape or -1)
    csr = message.sparse_csr
    values = _array(csr.values, dtype)
    starts = _array(csr.crow_indices, np.int64)
    columns = _array(csr.col_indices, np.int64)
    counts = np.diff(starts)
    valid = (
        len(shape) == 2
        and len(starts) == shape[0] + 1
        and (counts >= 0).all()
        and starts[0] == 0
        and starts[-1] == len(values) == len(columns)
        and ((columns >= 0) & (columns < shape[1])).all()
    )
    if not valid:
        raise Refused(f"{what} is no sparse matrix of shape {shape}.", 422)
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _array(data, dtype):
    if len(data) % np.dtype(dtype).itemsize:
        raise Refused("An array of the request is cut off.", 422)
    return np.frombuffer(data, dtype)


def train_response(logps, metrics):
    """Returns the bytes of a training result.

    Args:
        logps: list of float32 arrays, one for each example.
        metrics: dict of floats.
    """
    message = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics[name] = float(value)
    for array in logps:
        # One record each, since they may differ in their second axis.
        record = message.loss_fn_outputs.add(num_datums=1)
        array = np.ascontiguousarray(array, np.float32)
        data = record.fields["logprobs"]
        data.data = array.tobytes()
        data.offsets = np.array([0, array.nbytes], np.int64).tobytes()
        data.dtype = proto.DTYPE_FLOAT32
        data.trailing_shape.extend(array.shape[1:])
    return message.SerializeToString()


def sample_response(sequences, prompt_logps=None, top=None):
    """Returns the bytes of a sampling result.

    Args:
        sequences: list of tuples `(token_ids, logps, is_stopped, top)`.
        prompt_logps: float32 array, `nan` where there is none, or `None`.
        top: arrays `(ids, logps)` of shape `(tokens, k)`, the most probable
            tokens of the prompt, or `None`.
    """
    message = proto.SampleResponse()
    for token_ids, logps, is_stopped, own_top in sequences:
        sequence = message.sequences.add()
        sequence.stop_reason = (
            proto.STOP_REASON_STOP if is_stopped else proto.STOP_REASON_LENGTH
        )
        sequence.tokens = np.asarray(token_ids, np.int32).tobytes()
        sequence.logprobs = np.asarray(logps, np.float32).tobytes()
        if own_top is not None:
            _put_top(sequence.topk_sampled_logprobs, *own_top)
    if prompt_logps is not None:
        message.prompt_logprobs = np.asarray(
            prompt_logps, np.float32
        ).tobytes()
    if top is not None:
        _put_top(message.topk_prompt_logprobs, *top)
    return message.SerializeToString()


def _put_top(message, ids, logps):
    message.length, message.k = ids.shape
    message.token_ids = np.ascontiguousarray(ids, np.int32).tobytes()
    message.logprobs = np.ascontiguousarray(logps, np.float32).tobytes()


def read_prompt(body):
    """Returns the token ids of a JSON request's `prompt`, a list of ints."""
    found = []
    for chunk in field(field(body, "prompt", dict), "chunks", list):
        kind = chunk.get("type") if isinstance(chunk, dict) else None
        if kind != "encoded_text":
            raise Refused(
                "This server takes text alone. Received: a chunk of type "
                f"{kind!r}"
            )
        found += field(chunk, "tokens", list)
    if not all(type(x) is int for x in found):
        raise Refused("`tokens` of a prompt must be ints.", 422)
    return found
