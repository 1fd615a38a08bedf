"""Checks of what users pass to tasks, before anything is compiled."""

import math
import numbers

import jax
import keras
import numpy as np

from keras_posttrain.losses import TokenLoss
from keras_posttrain.models.lora import Adapter, LoRA, attached


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
    if remat not in ("none", "full"):
        raise ValueError(
            f"`remat` must be 'none' or 'full'. Received: remat={remat!r}"
        )


def seed(value):
    """Raises a `ValueError` for what cannot be the seed of a run."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(
        value, bool
    )
    if not is_int or not 0 <= value < 2**31:
        raise ValueError(
            "`seed` must be an int from 0 to 2147483647, so that the run can "
            f"be repeated. Received: seed={value!r}"
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
    is_int = isinstance(value, numbers.Integral) and value is not True
    if not is_int or value < 1:
        raise ValueError(
            f"`{name}` must be a positive int. Received: {name}={value!r}"
        )


def compile_arguments(loss, loss_class, micro_batch_size, max_grad_norm):
    if not isinstance(loss, loss_class):
        raise ValueError(
            "`loss` must be 'auto' or a loss object such as "
            "`kpt.losses.SFTLoss()`; Keras losses see logits, which never "
            f"exist here. Received: loss={loss!r}"
        )
    if isinstance(loss, TokenLoss):
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
    if max_grad_norm is not None and not (is_number and max_grad_norm > 0):
        raise ValueError(
            "`max_grad_norm` must be a positive float, or None for no "
            f"clipping. Received: max_grad_norm={max_grad_norm!r}"
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


def may_train(policy, packing, callbacks=()):
    """Raises a `ValueError` for settings that no task can train with."""
    own_adapter(policy)
    if packing and not policy.packable:
        raise ValueError(
            f"{type(policy.backbone).__name__} has no attention that "
            "keeps packed sequences apart. Use packing=False, or a Gemma "
            "1-3, Llama, Mistral or Qwen 2-3 preset."
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


def need_adapter(adapter, method):
    if adapter is None:
        raise ValueError(
            f"`{method}` needs an adapter; make the task with "
            "`lora=kpt.LoRA(...)`, or use `export` for whole weights."
        )


def need_tokenizer(tokenizer, what):
    if tokenizer is None:
        raise ValueError(
            f"`{what}` needs a tokenizer, and this task has none. Pass "
            "`tokenizer=`, or make the task with `from_preset`."
        )


def refuse_keras_weights(method):
    raise ValueError(
        f"`{method}` knows only whole models, without the adapter's settings "
        "or the optimizer. Use `save_adapter`/`load_adapter` for an adapter, "
        "`export` or `save_to_preset` for a model, and "
        "`kpt.callbacks.Checkpoint(directory)` for a run."
    )
