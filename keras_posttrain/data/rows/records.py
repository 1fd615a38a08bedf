"""Examples as bytes, in files and between processes."""

import dataclasses
import itertools
import json
import struct

import numpy as np

from keras_posttrain.data.rows.distillation_example import DistillationExample
from keras_posttrain.data.rows.examples import (
    Example,
    columns_of,
    hashed,
)
from keras_posttrain.data.rows.images import Images
from keras_posttrain.data.rows.preference_encoder import Preference

EXAMPLES = {
    kind.__name__: kind
    for kind in (Example, DistillationExample, Preference, Images)
}
FIELDS = {
    kind: [field.name for field in dataclasses.fields(kind)]
    for kind in EXAMPLES.values()
}
JSON = json.JSONEncoder(separators=(",", ":"))
# The bytes before a record: how long the JSON is that describes it.
HEAD = struct.Struct("<I")
# The dtype, in a record, of a mask of zeros and ones.
BITS = "bits"


def pack(example):
    """Returns a record: JSON of the fields, then the bytes of arrays."""
    arrays = []
    head = JSON.encode(_describe(example, arrays)).encode()
    return b"".join([HEAD.pack(len(head)), head, *arrays])


def unpack(record):
    """Returns the example of a record, a `bytearray` that it keeps."""
    (size,) = HEAD.unpack_from(record)
    start = HEAD.size + size
    return _restore(json.loads(record[HEAD.size : start]), record, [start])


def _describe(value, arrays):
    """Returns what JSON can store, and appends the bytes of arrays."""
    if isinstance(value, np.ndarray):
        name, data = value.dtype.name, value.tobytes()
        if name == "float32":
            small = value.astype(np.uint8)
            # The bits are compared, as -0.0 equals 0.0.
            if small.astype(np.float32).tobytes() == data:
                name, data = BITS, small.tobytes()
        arrays.append(data)
        return {"": name, "shape": value.shape}
    if names := FIELDS.get(type(value)):
        found = {n: _describe(getattr(value, n), arrays) for n in names}
        return {**found, "": type(value).__name__}
    if isinstance(value, list):
        return [_describe(item, arrays) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _restore(value, record, at):
    """Returns the value that was described; `at` holds where arrays begin."""
    if isinstance(value, list):
        return [_restore(item, record, at) for item in value]
    if not isinstance(value, dict):
        return value
    if "shape" in value:
        name, shape = value[""], value["shape"]
        dtype = np.dtype(np.uint8 if name == BITS else name)
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(record, dtype, count, at[0]).reshape(shape)
        at[0] += array.nbytes
        return array.astype(np.float32) if name == BITS else array
    kind = EXAMPLES[value.pop("")]
    return kind(**{k: _restore(x, record, at) for k, x in value.items()})


@dataclasses.dataclass
class Part:
    """Examples as bytes.

    Args:
        records: bytes, their records one after the other.
        sizes: list of ints, the bytes of each.
        summary: dict of lists of ints, a number of each; see `summary_of`.
        hashed: bytes, what is hashed of them.
    """

    records: bytes
    sizes: list
    summary: dict
    hashed: bytes

    @classmethod
    def of(cls, examples):
        """Makes one of a list of examples that can be stored."""
        packed = [pack(getattr(x, "stored", x)) for x in examples]
        return cls(
            b"".join(packed),
            [len(record) for record in packed],
            columns_of(example.summary for example in examples),
            b"".join(hashed(example) for example in examples),
        )

    def examples(self):
        """Returns the list of examples."""
        ends = list(itertools.accumulate(self.sizes))
        return [
            unpack(bytearray(self.records[end - size : end]))
            for size, end in zip(self.sizes, ends)
        ]
