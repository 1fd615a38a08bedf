"""A workload's model in Tunix, with LoRA or not, and its tokenizer."""

import collections
import time

import jax
import jax.numpy as jnp
import qwix
import workloads
from flax import nnx
from tunix.models.llama3 import model as llama3


def build(model, seed=0):
    config = llama3.ModelConfig(
        vocab_size=model.vocab,
        num_layers=model.layers,
        embed_dim=model.hidden,
        hidden_dim=model.intermediate,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        rope_theta=int(model.rope_theta),
        norm_eps=model.norm_eps,
        weight_tying=model.tied,
    )
    net = llama3.Llama3(config, rngs=nnx.Rngs(0))
    for name, value in model.weights(seed).items():
        param = find(net, name)
        shape = param.get_value().shape
        # Kernels are (in, out), with a separate axis for heads.
        if not name.endswith("embed_tokens.weight"):
            value = value.T.reshape(shape)
        param.set_value(jnp.asarray(value))
    return net


def find(net, name):
    """Returns the parameter for a Hugging Face tensor name."""
    if name == "model.embed_tokens.weight":
        return net.embedder.input_embedding
    if name == "model.norm.weight":
        return net.final_norm.w
    if name == "lm_head.weight":
        return net.lm_head.w
    _, _, i, *part, last, _ = name.split(".")
    layer = net.layers[int(i)]
    if part == ["self_attn"]:
        return getattr(layer.attn, last).w
    if part == ["mlp"]:
        return getattr(layer.mlp, last).kernel
    return getattr(layer, last).w


def with_lora(net, quantize=None):
    """Adds adapters; `quantize` is `None`, `"int8"`, `"int4"` or `"nf4"`."""
    weights = {"weight_qtype": quantize, "tile_size": 64} if quantize else {}
    provider = qwix.LoraProvider(
        module_path=".*(" + "|".join(workloads.LINEARS) + ")",
        rank=workloads.LORA_RANK,
        alpha=workloads.LORA_ALPHA,
        **weights,
    )
    return qwix.apply_lora_to_model(
        net, provider, rngs=nnx.Rngs(0), **net.get_model_input()
    )


class IdTokenizer:
    """A tokenizer whose text is the ids, separated by spaces."""

    def encode(self, text, **kwargs):
        return [int(word) for word in text.split()]

    def decode(self, ids, **kwargs):
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self):
        return 0  # an id that means none: nothing is put before a prompt

    def eos_id(self):
        return workloads.EOS

    def pad_id(self):
        return workloads.PAD


def keep_metrics(trainer):
    """Returns a list for each name, to which logged values are appended.

    Tunix logs a step's values in the next step, the last ones at the end.
    """
    values, log = collections.defaultdict(list), trainer.metrics_logger.log

    def spy(prefix, name, value, *args, **kwargs):
        values[name].append(value)
        return log(prefix, name, value, *args, **kwargs)

    trainer.metrics_logger.log = spy
    return values


def timed_passes(trainer, data, passes):
    """Trains one step, then on all `data` several times.

    Returns:
        The arguments of `report.emit`.
    """
    trainer.is_managed_externally = True  # `train` may be called again

    def seconds(some):
        start = time.perf_counter()
        trainer.train(some)
        jax.block_until_ready(jax.tree.leaves(nnx.state(trainer.model)))
        return time.perf_counter() - start

    return {
        "first_step_s": seconds(data[:1]),
        "pass_s": [seconds(data) for _ in range(passes)],
        "steps": len(data),
    }
