"""Small runs of every task, on one device and on meshes of eight.

`make` compiles a task, `mesh` names a distribution, `run` trains under it.
"""

import functools
import math
import pathlib
import re
from unittest import mock

import jax
import keras
import keras_hub
import numpy as np
import optax

import keras_posttrain as kpt
from keras_posttrain.models import sharding
from keras_posttrain.models.lora import Adapter, LoRA
from tests.support import (
    REFERENCE,
    load_json,
    one_layer,
    random_rows,
    weights,
)

PAIRS = load_json("dpo.json")["datasets"]["llama3"][:8]
PROMPTS = [{"prompt_ids": row["token_ids"]} for row in random_rows(8, 3, 6)]


def in_two_stages(mesh, name):
    names = ("outer", "inner")
    *slices, count = mesh.devices.shape
    finer = jax.sharding.Mesh(
        mesh.devices.reshape(*slices, count // 2, 2),
        (*mesh.axis_names[:-1], *names),
    )
    return sharding.Stages(finer, names, to_gather=True)


def mesh(name):
    """A distribution by name, None without one.

    `8x1` is FSDP over eight devices, `4x2` FSDP over four times tensor
    parallelism over two, `tp2` tensor parallelism alone, `dp` data
    parallelism, `ep4` FSDP with experts over groups of four, `cp4` FSDP with
    the tokens of a row over four, `2x4x1` two slices of FSDP over four.
    """
    if name is None:
        return None
    if name == "dp":
        return kpt.distribution.data_parallel()
    if name.startswith("ep"):
        return kpt.distribution.fsdp(experts=int(name[2:]))
    if name.startswith("cp"):
        return kpt.distribution.fsdp(context=int(name[2:]))
    if name.startswith("tp"):
        return kpt.distribution.tensor_parallel(model=int(name[2:]))
    *slices, data, model = map(int, name.split("x"))
    if slices:
        return kpt.distribution.hybrid(*slices, model=model)
    if model == 1:
        return kpt.distribution.fsdp(data)
    return kpt.distribution.fsdp_tensor_parallel(data, model)


def odd(completions):
    """A reward that differs among random completions."""
    return [sum(x % 2 for x in ids) / len(ids) for ids in completions]


def mixture(family):
    """A small random mixture of experts, which no directory here holds.

    `mixtral-short` has one layer.
    """
    family, _, is_short = family.partition("-")
    keras.utils.set_random_seed(0)
    sizes = dict(
        vocabulary_size=512,
        num_layers=1 if is_short else 2,
        hidden_dim=32,
        num_query_heads=4,
        num_key_value_heads=2,
        intermediate_dim=48,
        num_experts=4,
        top_k=2,
    )
    models = keras_hub.models
    if family == "mixtral":
        backbone = models.MixtralBackbone(**sizes)
        return models.MixtralCausalLM(backbone, preprocessor=None)
    backbone = models.Qwen3MoeBackbone(
        **sizes, head_dim=8, moe_intermediate_dim=16, norm_top_k_prob=True
    )
    return models.Qwen3MoeCausalLM(backbone, preprocessor=None)


@functools.cache
def directory(family):
    """The directory of a model; of `llama3-short` its first layer alone.

    The reference, if there is one, is next to it.
    """
    name, _, is_short = family.partition("-")
    path = REFERENCE / "models" / name
    if not path.is_dir():
        return path.with_name(family)
    if not is_short:
        return path
    short, other = one_layer(path), f"{path}_ref"
    if pathlib.Path(other).is_dir():
        short.with_name(f"{name}_ref").symlink_to(one_layer(other))
    return short


def sft(path, kwargs):
    if path.is_dir():
        made = kpt.SFTTask.from_preset(path, **kwargs)
    else:
        made = kpt.SFTTask(mixture(path.name), **kwargs)
    fit = {"dataset": random_rows(16, seed=1), "batch_size": 16, "epochs": 2}
    return made, {"micro_batch_size": 8}, fit


def packed(path, kwargs):
    made = kpt.SFTTask.from_preset(path, remat="full", **kwargs)
    rows = random_rows(40, seed=1)
    fit = {"dataset": rows, "batch_size": 8, "packing": True, "epochs": 2}
    return made, {"micro_batch_size": 8}, fit


def uneven(path, kwargs):
    """Rows that neither devices nor micro-batches share evenly."""
    made = kpt.SFTTask.from_preset(path, **kwargs)
    fit = {"dataset": random_rows(13, seed=1), "batch_size": 10}
    return made, {"micro_batch_size": 3}, fit


def dpo(path, kwargs, loss="auto", batch_size=8, micro_batch_size=None):
    # A reference of its own: its weights are split too.
    made = kpt.DPOTask.from_preset(path, reference=f"{path}_ref", **kwargs)
    fit = {"dataset": PAIRS, "batch_size": batch_size, "epochs": 2}
    return made, {"loss": loss, "micro_batch_size": micro_batch_size}, fit


def coupled(path, kwargs):
    """A loss that sorts the batch, of pairs that nothing shares evenly."""
    loss = kpt.losses.AOTLoss(paired=False)
    return dpo(path, kwargs, loss, batch_size=5, micro_batch_size=2)


def kto(path, kwargs):
    made, compiled, fit = dpo(path, kwargs, kpt.losses.KTOLoss(), batch_size=6)
    rows = [
        {
            "prompt_ids": pair["prompt_ids"],
            "completion_ids": pair[f"{side}_ids"],
            "label": side == "chosen",
        }
        for pair, side in zip(PAIRS, ["chosen", "rejected"] * 4)
    ]
    return made, compiled, {**fit, "dataset": rows}


def reward(path, kwargs):
    made = kpt.RewardTask.from_preset(path, **kwargs)
    return made, {}, {"dataset": PAIRS, "batch_size": 8, "epochs": 2}


def distill(path, kwargs):
    made = kpt.DistillTask.from_preset(path, teacher=f"{path}_ref", **kwargs)
    fit = {"dataset": random_rows(8, seed=1), "batch_size": 8, "epochs": 2}
    return made, {}, fit


def grpo(path, kwargs, **fit):
    made = kpt.GRPOTask.from_preset(path, **kwargs)
    compiled = {
        **sampled(made),
        "loss": kpt.losses.GRPOLoss(beta=0.01),
        "num_generations": 4,
    }
    return made, compiled, {"dataset": PROMPTS, "batch_size": 4, **fit}


def shared(path, kwargs):
    """Groups in rows that hold their prompt once."""
    return grpo(path, kwargs, packing=32, share_prefix=True)


def ppo(path, kwargs):
    made = kpt.PPOTask.from_preset(path, **kwargs)
    compiled = {**sampled(made), "num_iterations": 1}
    return made, compiled, {"dataset": PROMPTS, "batch_size": 8}


async def two_turns(chat, word):
    first = await chat(word)
    second = await chat(f"{word} again")
    return (len(first.text) % 2 + len(second.text) % 3) / 3


def episodes(path, kwargs):
    made = kpt.GRPOTask.from_preset(path, **kwargs)
    compiled = {
        "episode": two_turns,
        "num_generations": 4,
        "max_completion_length": 6,
    }
    rows = [{"word": word} for word in ("red", "blue", "green", "white")]
    return made, compiled, {"dataset": rows, "batch_size": 4}


def sampled(task):
    """Settings of a task that samples."""
    # Rewards of ids: the rows are tokenised.
    task.tokenizer = None
    return {"rewards": [odd], "max_completion_length": 6}


TASKS = {
    f.__name__: f
    for f in (
        sft, packed, uneven, dpo, coupled, kto, reward, distill, grpo, shared,
        episodes, ppo,
    )
}  # fmt: skip


def make(task, family, mode):
    """A task, compiled, and the arguments of its `fit`."""
    kwargs = {"sequence_length": 64}
    if mode == "lora":
        kwargs["lora"] = kpt.LoRA(rank=4, dropout=0.1)
    elif mode == "experts":
        kwargs["lora"] = kpt.LoRA(rank=4, targets=["q_proj", "experts"])
    made, compiled, fit = TASKS[task](directory(family), kwargs)
    if made.adapter is not None:
        # B is zero at the start, and then half of the gradients are.
        rng = np.random.default_rng(0)
        for b in made.adapter.b:
            b.assign(rng.normal(0, 0.05, b.shape).astype("float32"))
    made.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), **compiled)
    return made, fit


def filled_adapter(model):
    """An adapter whose products are not zero."""
    adapter = Adapter(model, LoRA(rank=4))
    rng = np.random.default_rng(0)
    for b in adapter.b:
        b.assign(rng.normal(0, 0.05, b.shape).astype("float32"))
    return adapter


def run(name, task, family, mode):
    """Trains under the mesh of that name; a dict of what came of it.

    `8x1 stages` is FSDP that gathers and scatters in two stages, as over many
    TPUs.
    """
    if name is not None and name.endswith(" stages"):
        with mock.patch.object(sharding, "two_stages", in_two_stages):
            return run(name.split()[0], task, family, mode)
    distribution = mesh(name)
    keras.distribution.set_distribution(distribution)
    made, fit = make(task, family, mode)
    out = {"history": made.fit(**fit, verbose=0).history}
    assert made.compiled_train_step._cache_size() == 1, "compiled again"
    out["weights"] = weights(made)
    if task in ("grpo", "shared", "ppo"):
        out["tokens"] = made.generate(
            PROMPTS,
            max_tokens=8,
            seed=3,
            stop_token_ids=None,
            return_token_ids=True,
        )
    if task == "uneven":
        rows = random_rows(5, seed=2)
        ask = {"max_tokens": 5, "temperature": 0, "stop_token_ids": None}
        out |= {
            "log_probs": np.concatenate(made.log_probs(rows, batch_size=3)),
            "evaluated": made.evaluate(rows, batch_size=3),
            "tokens": made.generate(PROMPTS[0], return_token_ids=True, **ask),
        }
    if distribution is not None:
        check_layouts(made, distribution)
    return out


def check_layouts(task, distribution):
    """Weights, optimizer and copies: every array is where it should be."""
    if not isinstance(distribution, kpt.distribution.ShardedWeights):
        return
    split = {}
    for v in task.variables + list(task.optimizer.variables):
        expected = distribution.get_variable_layout(v).backend_layout
        rank = len(v.shape)
        assert v.value.sharding.is_equivalent_to(expected, rank), v.path
        split[v.path] = not v.value.sharding.is_fully_replicated
        if "norm" in v.path:
            assert not split[v.path], v.path
        elif rank > 1 and "lora" not in v.path and "bias" not in v.path:
            assert split[v.path], f"{v.path} {v.shape} is replicated"
    for v in task.trainable_variables:
        name = v.path.replace("/", "_")
        moments = [
            m for m in task.optimizer.variables if m.path.endswith(f"{name}_")
            or f"/{name}_momentum" in m.path
        ]  # fmt: skip
        assert moments, v.path
        for m in moments:
            same = v.value.sharding.is_equivalent_to(
                m.value.sharding, len(v.shape)
            )
            assert same, m.path
    if task.adapter is not None:
        for pair in task.adapter.pairs:
            kernel = set(filter(None, pair.kernels[0].value.sharding.spec))
            factors = [
                v for v in task.adapter.variables if pair.name in v.path
            ]
            found = {a for v in factors for a in v.value.sharding.spec}
            assert found - {None} == kernel, (pair.name, found, kernel)


def check_optimizers():
    """Float32 masters and Optax's state lie as the weights do."""
    adam = functools.partial(keras.optimizers.AdamW, 1e-3)
    adamw = functools.partial(optax.adamw, 1e-3)
    for name, optimizer in (("4x2", adam), ("8x1", adamw)):
        # An optimizer has variables: it is made under the distribution.
        keras.distribution.set_distribution(mesh(name))
        task = kpt.SFTTask.from_preset(
            directory("qwen2-short"), sequence_length=64, dtype="bfloat16"
        )
        task.compile(optimizer=optimizer())
        task.fit(random_rows(8), batch_size=8, verbose=0)
        by_shape = {}
        for v in task.trainable_variables:
            spec = v.value.sharding.spec
            by_shape.setdefault(tuple(v.shape), set()).add(spec)
        big = [v for v in task.optimizer.variables if len(v.shape) > 1]
        # Two moments and a master for each.
        count = sum(len(v.shape) > 1 for v in task.trainable_variables)
        assert len(big) == 3 * count, (len(big), count)
        for v in big:
            assert v.value.sharding.spec in by_shape[tuple(v.shape)], v.path
            assert v.dtype == "float32"


def collectives(task, rows=16, length=64):
    """Returns `{(operation, shape, purpose)}` of what a step sends."""
    data = keras.distribution.distribution().get_data_layout((rows, length))

    def put(x):
        return jax.device_put(np.asarray(x, "int32"), data.backend_layout)

    grid = np.ones((rows, length))
    batch = {
        "token_ids": put(grid * 5),
        "segment_ids": put(grid),
        "positions": put(np.arange(length) * grid),
        "sequence_ids": put(np.arange(rows)[:, None]),
        "completion_mask": put(grid).astype("float32"),
        "sequence_mask": put(grid[:, :1]).astype("float32"),
        # Of pairs.
        "margins": put(0 * grid[:, :1]).astype("float32"),
    }
    changing = {
        "trainable": [v.value for v in task.trainable_variables],
        "optimizer": [v.value for v in task.optimizer.variables],
        "metrics": [v.value for v in task.metrics_variables],
        "step": np.int32(0),
        "seed": np.int32(0),
    }
    held = task._step.held([v.value for v in task.non_trainable_variables])
    step = task.compiled_train_step
    text = step.lower(changing, held, batch).compile().as_text()
    found = set()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all"
    for line in text.splitlines():
        source = re.search(r'op_name="([^"]*)"', line)
        line = re.sub(r"/\*.*?\*/|\{[^}]*\}", "", line)
        sent = re.search(rf"= (.*?) ({kinds})(-start)?\(", line)
        for dims in re.findall(r"\[([\d,]+)\]", sent[1]) if sent else ():
            shape = tuple(map(int, dims.split(",")))
            found.add((sent[2], shape, source[1] if source else ""))
    assert found
    return found


def check_what_is_sent(task, family, name, rows=16, length=72):
    """Under FSDP weights and their gradients are sent, and of activations
    only the embedding's rows.

    With a model axis as well, its devices gather what a layer reads of their
    own rows, and its outputs are added up.
    """
    keras.distribution.set_distribution(mesh(name))
    made, _ = make(task, family, "full")
    made.compile(optimizer=keras.optimizers.SGD(0.1))
    if task == "distill":
        made._make_teachers()
    backbone = made.causal_lm.backbone
    hidden, data = backbone.hidden_dim, int(name.split("x")[0])
    # Tokens of all devices and of each: no weight has such an axis.
    tokens = {rows * length, rows * length // data}
    for kind, shape, source in collectives(made, rows, length):
        leading = {math.prod(shape[:n]) for n in range(1, len(shape))}
        if not leading & tokens or shape[-1] < hidden // 8:
            continue
        # XLA cannot choose the best experts where the tokens are.
        if shape[-1] == getattr(backbone, "num_experts", None):
            continue
        # Shares of what the tokens of one device have, added up.
        own = rows * length // data
        is_sum = kind == "all-reduce" and math.prod(shape) <= own * hidden
        # Those of the same rows, which the model axis splits.
        is_sum |= kind == "all-gather" and leading & tokens == {own}
        # The embedding's rows, looked up where they are.
        is_lookup = "token_embedding" in source
        allowed = data < 8 and (is_sum or is_lookup)
        # Of the columns that a device looked up, each token's go to its own.
        allowed |= kind == "all-to-all" and shape[-1] <= hidden // data
        assert allowed, (task, family, name, kind, shape, source)


def check_dropout_sends_nothing(family, name):
    """Each device draws the masks of LoRA's dropout for its own inputs."""
    keras.distribution.set_distribution(mesh(name))
    made, _ = make("sft", family, "lora")
    assert made.adapter.lora.dropout
    sources = {source for *_, source in collectives(made)}
    assert not [source for source in sources if "bernoulli" in source]


@functools.cache
def alone(task, family, mode):
    """Returns the results of a run on one device."""
    return run(None, task, family, mode)


def check_same_numbers(task, family, mode, meshes):
    """The same training on one device and on each mesh."""
    for name in meshes:
        many = run(name, task, family, mode)
        what = f"{task} {family} {mode} {name}"
        compare(alone(task, family, mode), many, what)


def numbers(found):
    """Returns the results compared to a few units in the fifth place."""
    history = {
        key: values
        for key, values in found["history"].items()
        if not key.startswith("time/")
    }
    for key, value in found.get("evaluated", {}).items():
        history[f"evaluated/{key}"] = value
    if "log_probs" in found:
        history["log_probs"] = found["log_probs"]
    return history


def compare(one, many, what):
    for key, values in numbers(one).items():
        np.testing.assert_allclose(
            numbers(many)[key],
            values,
            rtol=2e-5,
            atol=1e-5,
            err_msg=f"{what} {key}",
        )
    # In order: Keras numbers some layers on, from model to model.
    pairs = zip(one["weights"].items(), many["weights"].values(), strict=True)
    for (key, value), other in pairs:
        np.testing.assert_allclose(
            other, value, atol=2e-6, err_msg=f"{what} {key}"
        )
    assert one.get("tokens") == many.get("tokens"), what
