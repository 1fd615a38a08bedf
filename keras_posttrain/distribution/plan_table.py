"""The printed form of a plan."""

from keras_posttrain.distribution.hlo import DCN, ICI

# The parts of a program that are shown.
NUM_PARTS = 10


def table(plan):
    """Formats a `Plan` as text, one figure per line."""
    lines = [f"{plan.name} on {plan.topology.name}, {plan.layout}"]
    lines += _rows([(k, str(v)) for k, v in plan.settings.items()])
    lines += _rows(
        [
            ("parameters", f"{plan.parameters:,}"),
            ("trainable parameters", f"{plan.trainable_parameters:,}"),
        ]
    )
    if len(plan.compiled_layers) > 1:
        depths = " and ".join(map(str, plan.compiled_layers))
        lines += _rows([("layers compiled", f"{depths} of {plan.num_layers}")])
    lines += _memory(plan)
    if plan.measured is not None:
        lines += _work(plan) + _remat(plan) + _network(plan) + _time(plan)
    if plan.refusal:
        lines += ["The compiler reported:", f"  {plan.refusal}"]
    if plan.advice:
        lines += ["Suggestions:", *(f"  - {x}" for x in plan.advice)]
    return "\n".join(lines)


def readable(num_bytes):
    """Formats bytes with a unit, such as `"1.5 GiB"`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def _rows(pairs, indent="  "):
    return [f"{indent}{name:<36} {value:>22}" for name, value in pairs]


def _memory(plan):
    pairs = [(k, readable(v)) for k, v in plan.arguments.items() if v]
    if plan.measured is not None:
        rest = plan.measured.numbers["temporaries"]
        for name, value in plan.known_temporaries.items():
            value = min(value, rest)
            rest -= value
            if value:
                pairs.append((f"temporaries: {name}", readable(value)))
        pairs.append(("temporaries: other", readable(rest)))
        pairs.append(("program", readable(plan.measured.numbers["program"])))
    elif plan.refused_bytes:
        pairs.append(("temporaries", readable(plan.refused_bytes)))
    if plan.needed is not None:
        pairs.append(("total", readable(plan.needed)))
    if plan.capacity is not None:
        verdict = "fits" if plan.fits else "does not fit"
        pairs.append((f"available ({verdict})", readable(plan.capacity)))
    return ["Memory per chip", *_rows(pairs)]


def _work(plan):
    share = plan.model_flops / plan.flops if plan.flops else 0.0
    return [
        "Work per step, all chips",
        *_rows(
            [
                ("tokens", f"{plan.tokens:,}"),
                ("FLOPs", f"{plan.flops:.4g}"),
                ("model FLOPs (by formula) / FLOPs", f"{share:.1%}"),
            ]
        ),
    ]


def _remat(plan):
    if not plan.kept_by_remat:
        return []
    pairs = [
        (
            f"remat={choice!r}",
            f"{readable(kept)}, {again / plan.model_flops:.1%}",
        )
        for choice, (kept, again) in plan.kept_by_remat.items()
    ]
    head = (
        "Kept per chip next to layer inputs, and computed again / model "
        "FLOPs (by formula)"
    )
    return [head, *_rows(pairs)]


def _network(plan):
    if plan.num_devices == 1:
        return []
    head = "Bytes received per chip and step"
    slices = plan.topology.num_slices
    if slices == 1:
        return _received(head, plan, ICI, plan.collective_bytes, plan.ideal)
    found = []
    if plan.num_devices > slices:
        own = f"{head}, within a slice"
        found = _received(own, plan, ICI, plan.collective_bytes, plan.ideal)
    other = f"{head}, from other slices"
    return found + _received(other, plan, DCN, plan.dcn_bytes, plan.ideal_dcn)


def _received(head, plan, network, total, ideal):
    pairs = [
        (f"{c.kind} x {c.count}", readable(c.num_bytes))
        for c in plan.collectives
        if c.network == network
    ]
    pairs.append(("total", readable(total)))
    pairs += [(f"ideal: {k}", readable(v)) for k, v in ideal.items() if v]
    if sum(ideal.values()):
        pairs.append(("total / ideal", f"{total / sum(ideal.values()):.2f}"))
    return [head, *_rows(pairs)]


def _time(plan):
    if not plan.seconds:
        return []
    pairs = [(k, f"{v:.4g} s") for k, v in plan.seconds.items()]
    pairs.append(("step (the longest of these)", f"{plan.step_seconds:.4g} s"))
    pairs.append(("tokens per second", f"{plan.tokens_per_second:,.0f}"))
    utilization = f"{plan.mfu:.1%}, {plan.hfu:.1%}"
    pairs.append(("MFU, HFU (upper bounds)", utilization))
    head = "Estimated step time (roofline from published rates)"
    lines = [head, *_rows(pairs)]
    total = plan.serial_seconds
    if total:
        lines.append(f"Costliest of parts that take {total:.4g} s one by one")
    for part in plan.parts[:NUM_PARTS]:
        share = f"{part.seconds:.3g} s, {part.seconds / total:.1%}"
        lines.append(f"  {part.name:<46} {share}, {part.bound}")
    return lines
