"""A user's script, in each of two processes: loads and writes a model.

`processes_files.py ADDRESS INDEX FOLDER`.
"""

import pathlib
import sys

import keras

if __name__ == "__main__":
    keras.distribution.initialize(sys.argv[1], 2, int(sys.argv[2]))

import jax  # noqa: E402
import numpy as np  # noqa: E402

import keras_posttrain as kpt  # noqa: E402
from keras_posttrain.models import presets  # noqa: E402
from keras_posttrain.models.hf.export import export
from tests.distribution.sharded_files import filled_adapter  # noqa: E402
from tests.support import REFERENCE  # noqa: E402


def main(folder):
    assert jax.process_count() == 2 and jax.device_count() == 8
    layout = kpt.distribution.fsdp_tensor_parallel(data=2, model=4)
    keras.distribution.set_distribution(layout)
    model = presets.load_causal_lm(REFERENCE / "models/gemma2")
    adapter = filled_adapter(model)
    export(model, folder / "plain", max_shard_bytes=100_000)
    values = adapter.merged_values()
    export(model, folder / "merged", values=values)
    adapter.save(folder / "adapter")
    adapter.load(folder / "adapter")
    presets.save_to_preset(model, folder / "preset")
    again = presets.load_causal_lm(folder / "preset")
    for one, other in zip(model.variables, again.variables, strict=True):
        pairs = zip(
            one.value.addressable_shards, other.value.addressable_shards
        )
        for x, y in pairs:
            assert (np.asarray(x.data) == np.asarray(y.data)).all(), one.path
    # Where the first process cannot write, no process waits for it.
    blocked = folder / "a file"
    if jax.process_index() == 0:
        blocked.write_text("x")
    try:
        export(model, blocked)
    except (ValueError, OSError) as error:
        print(type(error).__name__, flush=True)
    print("equal")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[3]))
