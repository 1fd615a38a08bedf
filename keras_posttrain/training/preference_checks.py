"""Checks of what users pass to tasks on preferences."""

import dataclasses
import os

import numpy as np

from keras_posttrain import _remote
from keras_posttrain.data.batches.packing import fine_lengths
from keras_posttrain.data.batches.preference import row_length
from keras_posttrain.data.rows.datasets import is_stream
from keras_posttrain.data.rows.examples import summary_of
from keras_posttrain.losses import (
    BradleyTerryLoss,
    KTOLoss,
    LabelledLoss,
    PairLoss,
    SumLoss,
)
from keras_posttrain.models.policy import PACKABLE_MODELS
from keras_posttrain.training import checks


def parts(loss):
    """Returns the losses that a loss is made of."""
    if isinstance(loss, SumLoss):
        return [part for inner in loss.losses for part in parts(inner)]
    return [loss]


def labelled(loss):
    """Returns whether a loss needs labelled completions, not pairs."""
    return isinstance(parts(loss)[0], LabelledLoss)


def mismatched(loss):
    """Returns whether a loss needs completions under other prompts."""
    return any(isinstance(part, KTOLoss) for part in parts(loss))


def preference_loss(loss):
    kinds = set()
    for part in parts(loss):
        if not isinstance(part, (PairLoss, LabelledLoss)):
            hint = "a loss such as `kpt.losses.DPOLoss()`"
            if isinstance(part, BradleyTerryLoss):
                hint = "`kpt.RewardTask`, which has scores"
            raise ValueError(
                "`loss` must be a loss of pairs (`kpt.losses.PairLoss`) or "
                "of labelled completions (`kpt.losses.LabelledLoss`). "
                f"Received: loss={loss!r}. Use {hint}."
            )
        kinds.add(isinstance(part, LabelledLoss))
    if len(kinds) > 1:
        raise ValueError(
            "The losses of a sum must all be of pairs or all of labelled "
            f"completions: a row is one or the other. Received: loss={loss!r}"
        )


def layout_arguments(policy, packing, share_prefix):
    checks.packing(packing)
    checks.flag("share_prefix", share_prefix)
    if share_prefix and not policy.packable:
        raise ValueError(
            f"{type(policy.backbone).__name__} has no attention that "
            "keeps two completions of one prompt apart. Use "
            f"share_prefix=False, or {PACKABLE_MODELS}."
        )


def packed(layout, packing, examples):
    """Sets the length of packed rows so that every example has room."""
    if is_stream(examples):
        needed = layout.together * layout.sequence_length
    else:
        needed = row_length(layout, examples)
    if packing is True:
        budget = fine_lengths(max(layout.sequence_length, needed))[-1]
    elif packing < needed:
        raise ValueError(
            "A packed row must have room for every pair, which is never "
            f"split. Received: packing={packing}, and a pair of {needed} "
            f"tokens. Use packing=True, or {needed} or more."
        )
    else:
        budget = packing
    return dataclasses.replace(layout, token_budget=budget)


def both_labels(loss, examples):
    if is_stream(examples):
        return
    labels = np.unique(summary_of(examples)["label"])
    if len(labels) == 1:
        raise ValueError(
            f"{type(parts(loss)[0]).__name__} learns from good and bad "
            "completions: the column 'label' must be True in some rows and "
            f"False in others. Received: label={bool(labels[0])} in all "
            f"{len(examples)} rows."
        )


def strangers(loss, batch_size):
    if mismatched(loss) and batch_size < 2:
        raise ValueError(
            f"{type(parts(loss)[0]).__name__} puts each completion of a "
            "batch under another prompt of it, to estimate its baseline: a "
            "batch must hold two. Received: "
            f"batch_size={batch_size}. Use 2 or more, or "
            "`APOZeroUnpairedLoss`, which has no baseline."
        )


def prompts(examples):
    """Refuses examples of which no prompt can be shared; returns them."""
    if is_stream(examples):
        return examples.map(_with_prompt)
    lacking = np.flatnonzero(summary_of(examples)["prompt"] == 0)
    if lacking.size:
        _with_prompt(examples[int(lacking[0])])
    return examples


def _with_prompt(example):
    if not len(example.prompt):
        raise ValueError(
            "With `share_prefix=True` the completions of a row must have "
            "a prompt in common. Received: none in row "
            f"{example.row} of the dataset. Use share_prefix=False."
        )
    return example


def reference_packs(reference, packs):
    if packs and not reference.policy.packable:
        kind = type(reference.policy.backbone).__name__
        raise ValueError(
            "The reference model cannot keep packed sequences apart. Use "
            "packing=False and share_prefix=False, or a reference of the "
            f"policy's family. Received: a reference with a {kind}"
        )


def reference_cache(directory, loss):
    """Refuses a reference cache that is impossible or unnecessary."""
    if directory is None:
        return
    if not isinstance(directory, (str, os.PathLike)):
        raise ValueError(
            "`reference_cache` must be the path of a directory, or None. "
            f"Received: reference_cache={directory!r}"
        )
    _remote.need_local("reference_cache", directory)
    if "ref_per_token_logps" not in loss.needs:
        raise ValueError(
            "The loss compares with no reference: there is nothing to keep. "
            f"Leave `reference_cache` out. Received: loss={loss!r}, "
            f"reference_cache={str(directory)!r}"
        )
    if mismatched(loss):
        raise ValueError(
            f"{type(parts(loss)[0]).__name__} puts completions under other "
            "rows' prompts, and under which ones changes with the order of "
            "the rows: what the reference makes of them cannot be kept. "
            "Leave `reference_cache` out, or use `APOZeroUnpairedLoss`. "
            f"Received: reference_cache={str(directory)!r}"
        )


def reference_stays(directory, moves):
    if directory is not None and moves:
        raise ValueError(
            "A reference that is updated gives other log-probabilities "
            "after: they cannot be kept. Leave out `reference_cache`, or "
            "the callback that updates the reference. Received: "
            f"reference_cache={str(directory)!r}"
        )


def reference_is_back(cached, lacking):
    """Refuses rows missing from the cache once the reference is freed."""
    if cached.kind == "copy":
        raise ValueError(
            "The reference is the policy when training began, of which only "
            f"the log-probabilities of that run's rows are kept, in "
            f"{str(cached.rows.directory)!r}. Received: {len(lacking)} "
            "completions that are not among them. Pass such rows as "
            "`validation_data` of that run, `evaluate` them before it, or "
            "leave `reference_cache` out."
        )
