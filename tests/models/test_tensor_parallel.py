"""What tensor parallelism sends and keeps, as the compiler reports it."""

import functools
import json

import keras
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import tensor_parallel
from tests.support import REFERENCE

LLAMA = REFERENCE / "models" / "llama3"
LAYERS, HIDDEN, ROWS, LENGTH = 2, 256, 8, 256
MODEL = 4


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Plans of LoRA on two times four devices, by `remat`."""
    path = tmp_path_factory.mktemp("model")
    config = json.loads((LLAMA / "config.json").read_text()) | {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": 768,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 16,
    }
    (path / "config.json").write_text(json.dumps(config))

    @functools.cache
    def plan(remat):
        with kpt.distribution.shapes_only():
            task = kpt.SFTTask.from_preset(
                str(path),
                load_weights=False,
                sequence_length=LENGTH,
                lora=kpt.LoRA(rank=2),
                remat=remat,
            )
        task.compile(keras.optimizers.SGD(0.1))
        both = functools.partial(
            kpt.distribution.fsdp_tensor_parallel, model=MODEL
        )
        return task.plan("cpu:8", both, batch_size=ROWS)

    return plan


@pytest.mark.parametrize(
    "remat, again", [("none", 0), ("selective", 1), ("full", 2)]
)
def test_what_is_sent(plans, remat, again):
    """Each pass gathers tokens twice a layer and sums them twice.

    In the backward pass of three products with the same input XLA would sum
    three gradients. Layers that are recomputed gather what their projections
    read again, `again` times.
    """
    plan = plans(remat)
    tokens = ROWS * LENGTH // 2
    share = 4 * tokens * HIDDEN * (MODEL - 1) / MODEL
    numbers = plan.measured.numbers
    gathered = numbers["bytes all-gather"] / (LAYERS * share)
    # Weights, once or twice, the head's inputs, and those of adapters' second
    # factors.
    weights = plan.ideal["weight all-gather"] / (LAYERS * share)
    least = 4 + again + weights / 2
    assert least < gathered < least + weights / 2 + 1 / LAYERS + 0.4
    # XLA's backend for CPUs sums whole arrays before it scatters them, and
    # the head's input has a gradient of all its tokens.
    summed = numbers["bytes all-reduce"] / (2 * LAYERS * share)
    assert 4 < summed < 4 + 1 / LAYERS + 0.4


def test_what_is_kept(plans):
    """A device keeps the inputs of its own tokens."""
    plan = plans("full")
    inputs = LAYERS * 4 * ROWS * LENGTH * HIDDEN // 8
    assert plan.known_temporaries["layer inputs"] == inputs
    more = plans("none").measured.numbers["temporaries"]
    assert plan.measured.numbers["temporaries"] < more
    kept, _ = plan.kept_by_remat["selective"]
    # Attention's outputs, and queries, keys and values of 16, 8 and 8 heads.
    assert kept == LAYERS * 4 * ROWS * LENGTH * 16 * (16 + 16 + 8 + 8) // 8


def test_tokens_that_cannot_be_split(eight_devices):
    """They are divided by rows alone."""
    distribution = kpt.distribution.fsdp_tensor_parallel(model=MODEL)
    keras.distribution.set_distribution(distribution)
    assert tensor_parallel.layouts_of(2 * MODEL).size == MODEL
    assert tensor_parallel.layouts_of(2 * MODEL + 2) is None
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    assert tensor_parallel.layouts_of(8 * MODEL) is None
