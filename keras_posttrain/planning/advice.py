"""Advice for a plan that does not fit, with numbers."""

from keras_posttrain.distribution.plan_table import readable
from keras_posttrain.models.quantized import quantization_of

# Share of a chip's memory that a compiler may reserve; above it, it compiles
# again. Llama-3-8B on v5e:4x4 agrees with the linear extrapolation with 25
# layers, 93 %, and is 7 % of its temporaries above it with 28, 98 %.
ROOM = 0.95
# Of a chip's memory: by the line, too much for any packing. All layers of
# Gemma-2-9B there came to 8 % less than the line.
HOPELESS = 1.1


def advise(plan, policy):
    """Lists what would help a plan that does not, or may not, fit.

    Args:
        plan: `Plan` of a training step.
        policy: `Policy` of the task.

    Returns:
        Tuple of str.
    """
    if plan.fits:
        return _doubt(plan)
    found, chip = [], plan.arguments
    inputs = plan.known_temporaries["layer inputs"]
    if plan.needed is not None:
        over = plan.needed - plan.capacity
        found.append(f"It lacks {readable(max(over, 0.0))} on each chip.")
    if policy.remat == "none" and plan.settings["remat"] == "none":
        found.append(
            "remat='full' keeps the inputs of the layers alone for the "
            f"backward pass, {readable(inputs)}."
        )
    rows = plan.settings["micro_batch_size"] or plan.settings["batch_size"]
    if plan.measured is not None and rows > plan.num_devices:
        rest = plan.measured.numbers["temporaries"]
        found.append(
            f"micro_batch_size={rows // 2} halves what activations take of "
            f"the {readable(rest)} of temporaries, for float32 gradients "
            "that are added up."
        )
    elif policy.can_split_rows and plan.num_devices > 1:
        found.append(
            "kpt.distribution.fsdp(context=2) and half as many rows at once "
            "leave a device half a row, which halves what activations take."
        )
    state = sum(size for name, size in chip.items() if name != "batch")
    found.append(
        f"Twice the chips, under FSDP, hold {readable(state / 2)} less each "
        "of weights and optimizer state."
    )
    if policy.adapter is None:
        found.append(
            "lora=kpt.LoRA(...) needs hardly any of the optimizer's "
            f"{readable(chip['optimizer'])} and of the gradients' "
            f"{readable(plan.known_temporaries['gradients'])}."
        )
    elif quantization_of(policy.causal_lm) is None and any(
        v.dtype == "float32" and v.ndim > 1
        for v in policy.causal_lm.non_trainable_variables
    ):
        found.append(
            "dtype='bfloat16' halves the frozen weights, "
            f"{readable(chip['weights'] / 2)} less."
        )
    return (*found, *_doubt(plan))


def _doubt(plan):
    """Advises if an extrapolation does not prove that a plan fits or not."""
    depths, capacity = plan.compiled_layers, plan.capacity
    if len(depths) == 1 or not capacity or plan.measured is None:
        return ()
    if plan.set_aside <= ROOM * capacity or plan.needed > HOPELESS * capacity:
        return ()
    return (
        f"exact=True compiles all {plan.num_layers} layers. By those of "
        f"{depths[0]} and {depths[1]} {plan.needed / capacity:.0%} of the "
        f"chip's memory are in use at once and {plan.set_aside / capacity:.0%}"
        " when packed loosely. Where that is too much the compiler packs "
        "closely; all layers may differ from it by a few percent.",
    )
