"""What a program needs of some hardware, before that is rented.

It knows no task: `planning/train_plan.py` passes in what was compiled.
"""

import dataclasses
import re

from keras_posttrain.distribution import hlo
from keras_posttrain.distribution.topology import Topology


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the compiler says of one program, on one device.

    Attributes:
        numbers: dict of floats: `temporaries` (the most bytes alive at once
            beside the arguments), `set aside` (bytes that the compiler has
            for them: while there is room it packs them loosely), `program`
            (bytes), `flops`, `traffic` (bytes to and from memory), and
            `count kind` and `bytes kind` for each kind of collective.
        unknown_loops: int, see `hlo.Counts`.
    """

    numbers: dict
    unknown_loops: int = 0

    def at_depth(self, depth, own, other, other_depth):
        """Numbers of another depth, each on a line through two.

        Args:
            depth: int, the layers asked for.
            own: int, those of `self`.
            other: `Measured` of `other_depth` layers, more than `own`.
            other_depth: int.

        Returns:
            A `Measured`.
        """
        far = (depth - own) / (other_depth - own)
        numbers = {}
        for name in self.numbers | other.numbers:
            a = self.numbers.get(name, 0.0)
            b = other.numbers.get(name, 0.0)
            numbers[name] = max(a + (b - a) * far, 0.0)
        return Measured(numbers, other.unknown_loops)

    def collectives(self):
        """Tuple of `hlo.Collective`, most bytes first."""
        found = [
            hlo.Collective(
                kind,
                round(self.numbers[f"count {kind}"]),
                self.numbers[f"bytes {kind}"],
            )
            for kind in hlo.KINDS
            if f"bytes {kind}" in self.numbers
        ]
        return tuple(sorted(found, key=lambda c: -c.num_bytes))


def measure(compiled, num_devices, data_dependent_trips):
    """What a compiled program does and takes.

    Args:
        compiled: `jax.stages.Compiled`.
        num_devices, data_dependent_trips: as in `hlo.count`.

    Returns:
        A `Measured`.
    """
    counts = hlo.count(compiled.as_text(), num_devices, data_dependent_trips)
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    # XLA looks at a loop's body once.
    other = max(cost.get("flops", 0.0) - counts.flops_once, 0.0)
    traffic = float(cost.get("bytes accessed", 0.0)) + counts.traffic_again
    alive = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    if alive <= 0:
        alive = memory.temp_size_in_bytes  # a host's compiler tells no peak
    numbers = {
        "temporaries": float(alive),
        "set aside": float(memory.temp_size_in_bytes),
        "program": float(memory.generated_code_size_in_bytes),
        "flops": counts.flops + other,
        "traffic": traffic,
    }
    for collective in counts.collectives:
        numbers[f"count {collective.kind}"] = collective.count
        numbers[f"bytes {collective.kind}"] = collective.num_bytes
    return Measured(numbers, counts.unknown_loops)


def out_of_memory(error):
    """`(bytes needed, bytes there are)` of a compiler's complaint.

    Args:
        error: exception of a compilation.

    Returns:
        Two floats, either `None` where it names none; `None` where the
        complaint is another.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    number = r"([\d.]+)([KMGT])"
    need = re.search(rf"(?:temporaries \(|Used ){number}", text)
    have = re.search(rf"(?:available HBM \(| of ){number}", text)
    return _bytes(need), _bytes(have)


def _bytes(found):
    if found is None:
        return None
    return float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step needs of some hardware, by the compiler for it.

    `print(plan)` shows all of it. Numbers are of one chip where they do not
    say otherwise. The times are estimates, a roofline: what the chip's
    published rates allow at best, not a measurement.

    Attributes:
        name: str, what was compiled.
        topology: `Topology`.
        layout: str, the mesh.
        settings: dict, what was asked for.
        num_layers: int, decoder layers of the model.
        compiled_layers: tuple of ints: the depths that were compiled. Where
            these are two, all numbers but the arguments' lie on a line
            through both. All 32 layers of Llama-3-8B gave the line's FLOPs
            and bytes sent to 0.3 %, and its memory to 0.6 % on v5e:8x8 and
            v5p:2x2x4. Where less than `set_aside` is there the compiler
            starts again, packs closer and orders otherwise: on v5e:4x4 it
            came to 5 % more, and to 8 % less with Gemma-2-9B.
        parameters, trainable_parameters: ints, of the whole model.
        arguments: dict of floats, bytes by kind that are there before the
            step: `"weights"`, `"optimizer"` (with float32 masters),
            `"reference"` or `"teacher"`, `"batch"`, `"cache"`.
        known_temporaries: dict of floats, bytes that must be among the
            temporaries, by shapes: `"gradients"`, `"layer inputs"`.
        measured: `Measured`, or `None` where the compiler gave up.
        capacity: float, bytes of memory, or `None` where it is not known.
        tokens: int, tokens of a step on all chips.
        model_flops: float, operations that the model asks for by formula,
            on all chips.
        ideal: dict of floats, bytes by purpose that the layout sends by
            the book; a program may send less.
        refusal: str or `None`, what the compiler said.
        refused_bytes: float or `None`, the memory it asked for.
        advice: tuple of str, what to change where it does not fit, or may not.
    """

    name: str
    topology: Topology
    layout: str
    settings: dict
    num_layers: int
    compiled_layers: tuple
    parameters: int
    trainable_parameters: int
    arguments: dict
    known_temporaries: dict
    measured: Measured | None
    capacity: float | None
    tokens: int
    model_flops: float
    ideal: dict
    refusal: str | None = None
    refused_bytes: float | None = None
    advice: tuple = ()

    @property
    def num_devices(self):
        return len(self.topology.devices)

    @property
    def needed(self):
        """Float, bytes of memory in all, or `None` where unknown."""
        there = sum(self.arguments.values())
        if self.measured is None:
            if self.refused_bytes is None:
                return None
            return there + self.refused_bytes
        numbers = self.measured.numbers
        return there + numbers["temporaries"] + numbers["program"]

    @property
    def set_aside(self):
        """Float, bytes of memory that are filled before all is packed close.

        `needed`, with what lies between temporaries; `None` where unknown.
        """
        if self.measured is None:
            return None
        numbers = self.measured.numbers
        there = sum(self.arguments.values()) + numbers["program"]
        return there + max(numbers["set aside"], numbers["temporaries"])

    @property
    def fits(self):
        """Bool: whether the memory holds it, as far as is known."""
        if self.refusal is not None:
            return False
        return self.capacity is None or self.needed <= self.capacity

    @property
    def flops(self):
        """Float, operations of a step on all chips."""
        if self.measured is None:
            return None
        return self.measured.numbers["flops"] * self.num_devices

    @property
    def collectives(self):
        """Tuple of `hlo.Collective`."""
        return () if self.measured is None else self.measured.collectives()

    @property
    def collective_bytes(self):
        """Float, bytes that a chip receives in a step."""
        return sum(c.num_bytes for c in self.collectives)

    @property
    def ideal_bytes(self):
        """Float, what the layout would send by the book."""
        return sum(self.ideal.values())

    @property
    def seconds(self):
        """Dict of floats: the step's time by what bounds it, or `None`."""
        chip = self.topology.chip
        if self.measured is None or chip is None:
            return None
        numbers = self.measured.numbers
        return {
            "compute": numbers["flops"] / chip.flops,
            "memory": numbers["traffic"] / chip.bandwidth,
            "network": self.collective_bytes / chip.interconnect,
        }

    @property
    def step_seconds(self):
        """Float: the longest of `seconds`, as if the others hid behind it."""
        return max(self.seconds.values()) if self.seconds else None

    @property
    def tokens_per_second(self):
        """Float, on all chips, or `None`."""
        return self.tokens / self.step_seconds if self.seconds else None

    def __str__(self):
        from keras_posttrain.distribution.plan_table import table

        return table(self)
