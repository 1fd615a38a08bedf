"""Numbers of layers that a plan compiles, and the plan built from them."""

import jax

from keras_posttrain.distribution.plan import Plan, out_of_memory
from keras_posttrain.models import quantized


def assemble(name, hardware, distribution, layers, depths, compiled, **fields):
    """Builds a `Plan` from the programs of few layers.

    Args:
        name: str, what is compiled.
        hardware: `Topology`.
        distribution: `keras.distribution.Distribution`.
        layers: int, those of the model.
        depths: tuple of one or two ints, the layers to compile.
        compiled: function of a number of layers to a `Measurement`.
        **fields: further fields of `Plan`.
    """
    found, refusal = measured(compiled, layers, depths)
    mesh = distribution.device_mesh
    layout = ", ".join(
        f"{n} along {axis!r}" for axis, n in zip(mesh.axis_names, mesh.shape)
    )
    experts = getattr(distribution, "num_expert_shards", 1)
    if experts > 1:
        layout += f", experts over {experts} of them"
    context = getattr(distribution, "num_context_shards", 1)
    if context > 1:
        layout += f", tokens of a row over {context} of them"
    return Plan(
        name=name,
        topology=hardware,
        layout=f"{type(distribution).__name__}: {layout}",
        num_layers=layers,
        compiled_layers=depths,
        measured=found,
        capacity=hardware.chip.memory if hardware.chip else None,
        **refusal,
        **fields,
    )


def measured(compiled, layers, depths):
    """Measures the program of all layers, or refuses it.

    Returns:
        `(Measurement or None, refusal)`: a dict of the fields of a `Plan` that
        say why the compiler refused.
    """
    try:
        found = [compiled(depth) for depth in depths]
    except jax.errors.JaxRuntimeError as error:
        figures = out_of_memory(error)
        if figures is None:
            raise
        text = str(error).split("\n")[0]
        return None, {"refusal": text, "refused_bytes": figures[0]}
    if len(found) == 1:
        return found[0], {}
    a, b = depths
    return found[0].at_depth(layers, a, found[1], b), {}


def to_compile(planned, exact):
    """Returns the numbers of layers to compile: all, or one and two periods.

    `planned` is a `PlannedTask` with all layers; `exact` asks for all. With
    codes it is two and three periods: the compiler's memory for one layer of
    codes is not on the line through the others.
    """
    layers = planned.policy.layers
    policies = [planned.policy, *(m.policy for m in planned.companions)]
    packable = all(policy.packable for policy in policies)
    period = _period(layers)
    every = exact or planned.task.needs_all_layers or not packable
    first = 2 if quantized.kernels(planned.task.causal_lm) else 1
    if every or len(layers) <= (first + 1) * period:
        return (len(layers),)
    return (first * period, (first + 1) * period)


def of_companions(planned, chosen):
    """Returns the layers to compile of companions that are another model.

    `chosen` is what `to_compile` gave.

    Returns:
        `(count, depths)`: their layers, and a dict from each of `chosen` to
        a tuple: one number of their layers, `None` for all of them, or two
        with a line through both.
    """
    models = [m for m in planned.companions if m.kind == "model"]
    if not models or len(chosen) == 1:
        return 0, {depth: (None,) for depth in chosen}
    own, theirs = planned.policy.layers, models[0].policy.layers
    count, period = len(theirs), _period(theirs)
    if (count, period) == (len(own), _period(own)):
        return count, {depth: (depth,) for depth in chosen}
    line = (period, 2 * period) if count > 2 * period else (None,)
    return count, {depth: line for depth in chosen}


def _period(layers):
    """Computes the period of the pattern of layer kinds."""

    def kind(layer):
        windows = []
        for part in layer._flatten_layers():
            for name in ("sliding_window_size", "sliding_window"):
                windows.append(getattr(part, name, None))
            windows.append(getattr(part, "use_sliding_window_attention", 0))
        shapes = [tuple(v.shape) for v in layer.variables]
        return str((windows, shapes))

    kinds = [kind(layer) for layer in layers]
    for period in range(1, len(kinds)):
        again = [kinds[i % period] for i in range(len(kinds))]
        if again == kinds:
            return period
    return len(kinds)
