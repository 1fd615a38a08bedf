"""Checks of what users pass to tasks, before anything is compiled."""

import math
import numbers
import operator
import os

import jax
import keras
import numpy as np

from keras_posttrain import losses
from keras_posttrain.models import rematerialisation
from keras_posttrain.models.lora import Adapter, LoRA, attached
from keras_posttrain.models.policy import PACKABLE_MODELS


def lora(value):
    if value is not None and not isinstance(value, (LoRA, Adapter)):
        raise ValueError(
            "`lora` must be a `kpt.LoRA`, such as `kpt.LoRA(rank=16)`. "
            f"Received: lora={value!r}"
        )


def task_arguments(lora_, sequence_length, truncation, remat, chunk_size=None):
    lora(lora_)
    if chunk_size is not None:
        positive_int("chunk_size", chunk_size)
    is_int = isinstance(sequence_length, numbers.Integral)
    if not is_int or sequence_length < 2:
        raise ValueError(
            "`sequence_length` must be an int of at least 2, the tokens a "
            f"row may hold. Received: sequence_length={sequence_length!r}"
        )
    if truncation not in ("error", "drop", "cut"):
        raise ValueError(
            "`truncation` must be 'error', 'drop' or 'cut'. "
            f"Received: truncation={truncation!r}"
        )
    if remat not in (*rematerialisation.CHOICES, "auto"):
        raise ValueError(
            "`remat` must be 'none', 'attention', 'selective', 'outputs', "
            f"'full' or 'auto'. Received: remat={remat!r}"
        )


def seed(value):
    """Returns the seed of a run, an int, or raises a `ValueError`."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(
        value, bool
    )
    if not is_int or not 0 <= value < 2**31:
        raise ValueError(
            "`seed` must be an int from 0 to 2147483647, so that the run can "
            f"be repeated. Received: seed={value!r}"
        )
    return int(value)


def packing(value):
    """Checks a `packing` that may say how many tokens a row has."""
    is_flag = value is None or isinstance(value, bool)
    is_int = isinstance(value, numbers.Integral)
    if not is_flag and (not is_int or value < 1):
        raise ValueError(
            "`packing` must be True, False or a positive int, the tokens of "
            f"a packed row. Received: packing={value!r}"
        )


def callbacks(value):
    kinds = (list, tuple, keras.callbacks.Callback)
    if value is not None and not isinstance(value, kinds):
        raise ValueError(
            "`callbacks` must be a list of `keras.callbacks.Callback`. "
            f"Received: callbacks={value!r}"
        )


def flag(name, value):
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(
            f"`{name}` must be True or False. Received: {name}={value!r}"
        )


def memory(value):
    """Checks the `memory` of `suggest`, in bytes."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ValueError(
            "`memory` must be a positive number of bytes, such as 24 * 2**30, "
            f"or None for what is there. Received: memory={value!r}"
        )


def verbosity(value):
    if value != "auto" and value not in (0, 1, 2):
        raise ValueError(
            "`verbose` must be 'auto', 0 (silent), 1 (progress bar) or 2 (a "
            f"line an epoch). Received: verbose={value!r}"
        )


def compile_ahead(value):
    if value not in ("auto", True, False):
        raise ValueError(
            "`compile_ahead` must be 'auto', True or False. "
            f"Received: compile_ahead={value!r}"
        )


def steps_to_skip(steps):
    """Returns a frozenset of the steps that a run leaves out."""
    try:
        found = list(steps)
    except TypeError:
        found = [None]
    for step in found:
        is_int = isinstance(step, numbers.Integral) and step is not True
        if not is_int or step < 1:
            raise ValueError(
                "`skip_steps` must be ints, steps counted from 1. "
                f"Received: skip_steps={steps!r}"
            )
    return frozenset(map(int, found))


def skipped_are_run(skip_steps, num_steps):
    """Raises a `ValueError` for skipped steps that the run does not have.

    Args:
        skip_steps: set of ints.
        num_steps: int or `None`, the steps of the run, if known.
    """
    last = max(skip_steps, default=0)
    if num_steps is not None and last > num_steps:
        raise ValueError(
            f"`skip_steps` must name steps of the run, which has {num_steps}. "
            f"Received: {last}"
        )


def positive_int(name, value):
    """Returns a positive int, or raises a `ValueError`."""
    is_int = isinstance(value, numbers.Integral)
    if not is_int or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"`{name}` must be a positive int. Received: {name}={value!r}"
        )
    return int(value)


def stop_token_ids(value):
    """Returns a tuple of ids, or `"auto"`, for what a user passed."""
    if isinstance(value, str) and value == "auto":
        return value
    try:
        found = () if value is None else tuple(map(operator.index, value))
    except TypeError:
        raise ValueError(
            "`stop_token_ids` must be 'auto', None or ints. "
            f"Received: stop_token_ids={value!r}"
        ) from None
    return found


def finite(name, value):
    is_number = isinstance(value, numbers.Real)
    if isinstance(value, bool) or not is_number or not np.isfinite(value):
        raise ValueError(
            f"`{name}` must be a finite number. Received: {name}={value!r}"
        )


def path(name, value):
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(
            f"`{name}` must be a path. Received: {name}={value!r}"
        )


def task(value):
    """Raises a `ValueError` for what is no task."""
    if not isinstance(getattr(value, "causal_lm", None), keras.Model):
        raise ValueError(
            "`task` must be a task, such as a `kpt.SFTTask`; of a model "
            "`kpt.DPOTask(causal_lm)` makes one. "
            f"Received: task={value!r}"
        )


def strategy(value):
    if not callable(value):
        raise ValueError(
            "`strategy` must be a function of `devices` that returns a "
            "distribution, such as `kpt.distribution.fsdp`. "
            f"Received: strategy={value!r}"
        )


def not_negative(name, value):
    is_int = isinstance(value, numbers.Integral)
    if not is_int or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"`{name}` must be an int of at least 0. "
            f"Received: {name}={value!r}"
        )


# Losses by the task whose rows they are for.
LOSSES_OF_TASKS = {
    "GRPOTask": losses.PolicyLoss,
    "DPOTask": (losses.PairLoss, losses.LabelledLoss),
    "RewardTask": losses.BradleyTerryLoss,
    "PPOTask": losses.ValueLoss,
    "DistillTask": (
        losses.DistillationLoss,
        losses.ULDLoss,
        losses.HiddenStateLoss,
        losses.AttentionLoss,
    ),
}


def loss_of_completions(loss):
    """Raises a `ValueError` for a loss of other rows than completions."""
    parts = loss.losses if isinstance(loss, losses.SumLoss) else (loss,)
    for part in parts:
        for task, kinds in LOSSES_OF_TASKS.items():
            if isinstance(part, kinds):
                raise ValueError(
                    "`loss` must be a loss of single completions, such as "
                    f"`kpt.losses.SFTLoss()`. Received: loss={loss!r}. Use "
                    f"`kpt.{task}`, whose rows have what it needs."
                )


def compile_arguments(loss, loss_class, micro_batch_size, max_grad_norm):
    if not isinstance(loss, loss_class):
        raise ValueError(
            "`loss` must be 'auto' or a loss object such as "
            "`kpt.losses.SFTLoss()`; Keras losses see logits, which never "
            f"exist here. Received: loss={loss!r}"
        )
    if isinstance(loss, losses.TokenLoss):
        logps = jax.ShapeDtypeStruct((2, 3), "float32")
        found = jax.eval_shape(loss.token_loss, logps)
        if getattr(found, "shape", None) != logps.shape:
            raise ValueError(
                f"`token_loss` of {type(loss).__name__} must return an array "
                "of its argument's shape, the loss of each token. Received: "
                f"{found} for an argument of shape {logps.shape}"
            )
    if micro_batch_size is not None:
        positive_int("micro_batch_size", micro_batch_size)
    is_number = isinstance(max_grad_norm, numbers.Real)
    is_number = is_number and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (is_number and max_grad_norm > 0):
        raise ValueError(
            "`max_grad_norm` must be a positive float, or None for no "
            f"clipping. Received: max_grad_norm={max_grad_norm!r}"
        )


def router_loss(value, policy):
    """Raises a `ValueError` for what a model's routers cannot be given."""
    if value is None:
        return
    if not isinstance(value, losses.RouterLoss):
        raise ValueError(
            "`router_loss` must be a `kpt.losses.RouterLoss`, such as "
            "`kpt.losses.RouterLoss(balance=0.001)`, or None. "
            f"Received: router_loss={value!r}"
        )
    if not policy.has_experts:
        raise ValueError(
            "`router_loss` needs a mixture of experts whose layers run one "
            "by one, such as Mixtral, Qwen3-MoE or gpt-oss. Leave it out. "
            f"Received: router_loss={value!r} for a "
            f"{type(policy.backbone).__name__}"
        )


def own_adapter(policy):
    """Raises a `ValueError` where another task has taken the model over."""
    own = policy.adapter.stack if policy.adapter else ()
    if attached(policy.causal_lm) != own:
        raise ValueError(
            "Another task was made on this task's model, with an adapter "
            "that this one does not know: its results and files would lack "
            "it. Use the newer task, or load the model again."
        )
    for adapter in own:
        adapter.check_layers()


def expert_axis(policy, distribution=None):
    """Raises a `ValueError` for an axis of experts and a model without any.

    `distribution` is by default Keras's.
    """
    if distribution is None:
        distribution = keras.distribution.distribution()
    shards = getattr(distribution, "num_expert_shards", 1)
    if shards > 1 and not policy.has_experts:
        raise ValueError(
            "`kpt.distribution.fsdp(experts=...)` splits the experts of a "
            "mixture whose layers run one by one, such as Mixtral, Qwen3-MoE "
            "or gpt-oss. Use `kpt.distribution.fsdp()`, which splits all "
            f"models. Received: experts={shards} for a "
            f"{type(policy.backbone).__name__}"
        )


def context_axis(policy, distribution=None):
    """Raises a `ValueError` for a model whose rows must stay whole.

    `distribution` is by default Keras's.
    """
    if distribution is None:
        distribution = keras.distribution.distribution()
    count = getattr(distribution, "num_context_shards", 1)
    if count > 1 and not policy.can_split_rows:
        raise ValueError(
            "`kpt.distribution.fsdp(context=...)` splits the tokens of a row "
            "over devices. It needs a model whose layers run one by one and "
            "have no recurrent state, which Qwen 3.5 has. Use "
            "`kpt.distribution.fsdp()` with remat='full'. Received: "
            f"context={count} for a {type(policy.backbone).__name__}"
        )


def whole_rows(what):
    """Raises a `ValueError` if a layout splits the tokens of rows."""
    distribution = keras.distribution.distribution()
    count = getattr(distribution, "num_context_shards", 1)
    if count > 1:
        raise ValueError(
            f"{what} needs rows that each device has whole. Use "
            f"`kpt.distribution.fsdp()`. Received: context={count}"
        )


def placed(causal_lm):
    """Raises a `ValueError` for a model that was made before the mesh was."""
    distribution = keras.distribution.distribution()
    value = causal_lm.backbone.variables[0].value
    sharding = getattr(value, "sharding", None)
    if distribution is None or sharding is None:
        return
    mesh = distribution.device_mesh.backend_mesh
    ours, theirs = sharding.device_set, set(mesh.devices.flat)
    if ours != theirs:
        raise ValueError(
            "The distribution must be set before the model is made, which "
            "places its weights. Received: a distribution over "
            f"{len(theirs)} devices, weights on {len(ours)}. Call "
            "`keras.distribution.set_distribution(...)` first, then make the "
            "task; or remove it with `set_distribution(None)`."
        )


def trainable(value):
    """Raises a `ValueError` for a task that was made not to be trained."""
    if not value:
        raise ValueError(
            "The task was made with trainable=False, so there is nothing to "
            "train. Pass `lora=kpt.LoRA(...)` to train an adapter on its "
            "weights, or leave `trainable` out. Received: trainable=False"
        )


def may_train(policy, packing, callbacks=()):
    """Raises a `ValueError` for settings that no task can train with."""
    placed(policy.causal_lm)
    own_adapter(policy)
    if packing and not policy.packable:
        raise ValueError(
            f"{type(policy.backbone).__name__} has no attention that "
            "keeps packed sequences apart. Use packing=False, or "
            f"{PACKABLE_MODELS}."
        )
    if policy.adapter is not None and policy.adapter.is_merged:
        raise ValueError(
            "The adapter is merged into the weights; call "
            "`task.unmerge_adapter()` before training."
        )
    refused = (
        keras.callbacks.ModelCheckpoint,
        keras.callbacks.BackupAndRestore,
        keras.callbacks.OrbaxCheckpoint,
    )
    for callback in callbacks:
        if isinstance(callback, refused):
            raise ValueError(
                f"{type(callback).__name__} saves weights without the "
                "optimizer's place in the data, the step or the adapter's "
                "settings: a run it resumes is another run. Use "
                "`kpt.callbacks.Checkpoint(directory)`."
            )
        if not isinstance(callback, keras.callbacks.Callback):
            raise ValueError(
                "`callbacks` must be a list of `keras.callbacks.Callback`. "
                f"Received: {callback!r}"
            )


def no_loop(loop, method):
    """Raises a `ValueError` for a task that a `kpt.Loop` trains."""
    if loop is not None:
        raise ValueError(
            f"`{method}` is called while a `kpt.Loop` of the task is open. "
            f"Call `{method}` before or after its `with` block."
        )


def need_adapter(adapter, method):
    if adapter is None:
        raise ValueError(
            f"`{method}` needs an adapter; make the task with "
            "`lora=kpt.LoRA(...)`, or use `export` for whole weights."
        )


def may_have_metrics(task):
    """Raises a `ValueError` for a task whose rows have no one completion."""
    if not task.takes_metrics:
        raise ValueError(
            "`metrics` compare completions with those of the rows of a "
            f"`kpt.SFTTask`. Received: metrics for a {type(task).__name__}. "
            "Evaluate the same model by `kpt.SFTTask.from_task(task)`."
        )


def need_tokenizer(tokenizer, what):
    if tokenizer is None:
        raise ValueError(
            f"`{what}` needs a tokenizer, and this task has none. Pass "
            "`tokenizer=`, or make the task with `from_preset`."
        )
