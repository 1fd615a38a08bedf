"""Device meshes, and how a model is placed on them.

On several hosts the same script runs in one process per host. Its first line
connects the processes; on a TPU pod the call needs no arguments:

```python
keras.distribution.initialize(
    job_addresses="10.0.0.1:8476", num_processes=2, process_id=0
)
keras.distribution.set_distribution(kpt.distribution.fsdp())
task = kpt.SFTTask.from_preset("llama3_8b_en", dtype="bfloat16")
```

All processes read all rows, and each builds the rows of its own devices. They
sample together, and each scores its share of the prompts. The first process
writes logs, exports and adapters; `kpt.callbacks.Checkpoint` needs a directory
that all of them can reach.

If a process is lost, JAX ends the others, at the latest after 100 seconds
without a heartbeat. `jax.distributed.initialize` can be called in place of
`keras.distribution.initialize`: its argument `heartbeat_timeout_seconds` sets
that time. `keras.utils.set_random_seed` must then be called with the same seed
in all processes.

On Pathways one process drives all devices, and `import pathwaysutils;
pathwaysutils.initialize()` takes the place of `keras.distribution.initialize`.
This package does not import it and has not been tested with it.
"""

from typing import TYPE_CHECKING

from keras_posttrain import _lazy_imports

if TYPE_CHECKING:
    from keras_posttrain._variables import shapes_only
    from keras_posttrain.distribution.layout_search import search
    from keras_posttrain.distribution.plan import Plan
    from keras_posttrain.distribution.strategies import (
        ShardedWeights,
        data_parallel,
        fsdp,
        fsdp_tensor_parallel,
        hybrid,
        split,
        tensor_parallel,
    )

__all__ = [
    "Plan",
    "ShardedWeights",
    "data_parallel",
    "fsdp",
    "fsdp_tensor_parallel",
    "hybrid",
    "search",
    "shapes_only",
    "split",
    "tensor_parallel",
]

__getattr__, __dir__ = _lazy_imports.attach(__name__)
