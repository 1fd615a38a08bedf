"""What the compiler for TPUs makes of a step: bytes sent against the ideal."""

import functools
import json

import jax
import keras
import pytest

import keras_posttrain as kpt

pytest.importorskip("libtpu")

# Wide enough that weights weigh as they do in real models, beside tokens.
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = functools.partial(kpt.distribution.fsdp_tensor_parallel, model=2)
MODEL_ALONE = functools.partial(kpt.distribution.tensor_parallel, model=8)


@pytest.mark.parametrize(
    "topology, strategy, layers, lora, micro",
    [
        pytest.param("v5e:2x4", BOTH, 2, None, None, marks=pytest.mark.slow),
        # On a square grid XLA makes an all-reduce of a reduce-scatter.
        pytest.param(
            "v5e:4x4",
            kpt.distribution.fsdp,
            2,
            None,
            None,
            marks=pytest.mark.full,
        ),
        pytest.param(
            "v5e:2x2",
            kpt.distribution.fsdp,
            2,
            kpt.LoRA(rank=16),
            4,
            marks=pytest.mark.full,
        ),
        # The embedding's rows and the head's gradient are added up too, once
        # each beside the ideal's four times a layer: 18 times for 16 here.
        pytest.param(
            "v5e:2x4", MODEL_ALONE, 4, None, None, marks=pytest.mark.full
        ),
    ],
)
def test_a_step_sends_what_it_must(
    tmp_path, topology, strategy, layers, lora, micro
):
    sizes = SIZES | {"num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with kpt.distribution.shapes_only():
        task = kpt.SFTTask.from_preset(
            str(tmp_path),
            load_weights=False,
            dtype="bfloat16",
            sequence_length=512,
            remat="full",
            lora=lora,
        )
    task.compile(keras.optimizers.AdamW(1e-5))
    with jax.default_matmul_precision("default"):
        plan = task.plan(
            topology,
            strategy,
            batch_size=16 if topology == "v5e:4x4" else 8,
            micro_batch_size=micro,
            exact=True,
        )
    ratio = plan.collective_bytes / plan.ideal_bytes
    # Less than the ideal, as an embedding's tokens weigh less than it does.
    assert 0.5 < ratio <= 1.25, plan
