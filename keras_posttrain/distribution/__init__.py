"""Meshes of devices, and how a model lies on them.

On several hosts the same script is started in a process on each, and says so
before anything else; on a TPU pod without arguments:

```python
keras.distribution.initialize(
    job_addresses="10.0.0.1:8476", num_processes=2, process_id=0
)
keras.distribution.set_distribution(kpt.distribution.fsdp())
task = kpt.SFTTask.from_preset("llama3_8b_en", dtype="bfloat16")
```

All processes read all rows, and each puts the rows of its own devices into
batches. They sample together; each judges its share of the prompts. The first
one writes logs, exports and adapters; `kpt.callbacks.Checkpoint` needs a
directory that all of them reach. One that is lost ends the others.

On Pathways one process drives all devices; it begins with
`import pathwaysutils; pathwaysutils.initialize()` in place of
`keras.distribution.initialize`. This package does not import it, and was not
tried on it.
"""

from keras_posttrain.distribution.abstract import shapes_only
from keras_posttrain.distribution.plan import Plan
from keras_posttrain.distribution.search import search
from keras_posttrain.distribution.strategies import (
    ShardedWeights,
    data_parallel,
    fsdp,
    fsdp_tensor_parallel,
    tensor_parallel,
)

__all__ = [
    "Plan",
    "ShardedWeights",
    "data_parallel",
    "fsdp",
    "fsdp_tensor_parallel",
    "search",
    "shapes_only",
    "tensor_parallel",
]
