"""The resources that a compiled program needs of given hardware.

This module knows no task: `planning/` passes in the compiled programs.
"""

import collections
import dataclasses
import functools
import re

from keras_posttrain.distribution import hlo
from keras_posttrain.distribution.plan_table import table
from keras_posttrain.distribution.topology import Topology


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The compiler's figures for one program on one device.

    Attributes:
        numbers: dict of floats: `temporaries` (the most bytes in use at once
            in addition to the arguments), `set aside` (bytes that the compiler
            reserves for them: it packs loosely while there is room),
            `program` (bytes), `flops`, `traffic` (bytes to and from memory),
            and `count kind` and `bytes kind` for each kind of collective,
            `count dcn kind` and `bytes dcn kind` over the data-center
            network, and `part field name` for each field of each `hlo.Part`.
        unknown_loops: int, see `hlo.Counts`.
    """

    numbers: dict
    unknown_loops: int = 0

    def at_depth(self, depth, own, other, other_depth):
        """Extrapolates linearly to `depth` layers.

        `self` has `own` layers, `other`, of a deeper model, `other_depth`.
        """
        fraction = (depth - own) / (other_depth - own)
        numbers = {}
        for name in self.numbers | other.numbers:
            a = self.numbers.get(name, 0.0)
            b = other.numbers.get(name, 0.0)
            numbers[name] = max(a + (b - a) * fraction, 0.0)
        return Measurement(numbers, other.unknown_loops)

    def collectives(self):
        """Returns a tuple of `hlo.Collective`, most bytes first."""
        found = [
            hlo.Collective(
                kind,
                round(self.numbers[f"count {name}"]),
                self.numbers[f"bytes {name}"],
                network,
            )
            for kind in hlo.KINDS
            for network in (hlo.ICI, hlo.DCN)
            if f"bytes {(name := _name(kind, network))}" in self.numbers
        ]
        return tuple(sorted(found, key=lambda c: -c.num_bytes))

    def parts(self):
        """Returns a dict of `hlo.Part`s by name."""
        found = collections.defaultdict(hlo.Part)
        for key, value in self.numbers.items():
            if key.startswith("part "):
                _, field, name = key.split(" ", 2)
                setattr(found[name], field, value)
        return dict(found)


def _name(kind, network):
    return kind if network == hlo.ICI else f"{network} {kind}"


def measure(program, hardware, *trips):
    """Reads the `Measurement` of a `programs.Program` for a `Topology`.

    `trips` are as in `hlo.count`.
    """
    counts = hlo.count(
        program.text,
        len(hardware.devices),
        *trips,
        num_slices=hardware.num_slices,
    )
    # XLA counts a loop's body once.
    elementwise = max(program.flops - counts.flops_once, 0.0)
    in_use = program.peak - program.arguments
    if in_use <= 0:
        # The compiler for CPUs reports no peak.
        in_use = program.temporaries
    numbers = {
        "temporaries": float(in_use),
        "set aside": float(program.temporaries),
        "program": float(program.code),
        "flops": counts.flops + elementwise,
        "traffic": program.traffic + counts.traffic_again,
    }
    for collective in counts.collectives:
        name = _name(collective.kind, collective.network)
        numbers[f"count {name}"] = collective.count
        numbers[f"bytes {name}"] = collective.num_bytes
    for name, part in counts.parts.items():
        for field, value in dataclasses.asdict(part).items():
            numbers[f"part {field} {name}"] = float(value)
    return Measurement(numbers, counts.unknown_loops)


def out_of_memory(error):
    """Parses the compiler's error for a program that exceeds the memory.

    Returns:
        Tuple `(needed, available)` of bytes, each a float or `None` if the
        message does not state it. `None` for any other error.
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
class PlannedPart:
    """A part of a step: all operations of one name, of all layers.

    Attributes:
        name: str, the pass (`"forward"`, `"backward"`, `"recomputed"`) and
            what Keras and JAX call the operation.
        seconds: float, an estimate for one chip: the longer of its operations
            and of its bytes to and from memory at the published rates, and
            the bytes that it waits for.
        bound: str, what takes longest: `"compute"`, `"memory"` or
            `"network"`.
        flops, traffic, received: floats, a chip's operations, bytes to and
            from memory (an upper bound), and bytes that it waits for.
    """

    name: str
    seconds: float
    bound: str
    flops: float
    traffic: float
    received: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The resources of a step on given hardware, from its own compiler.

    `print(plan)` shows all of it. Figures are per chip unless stated
    otherwise. The times are not measured: they are a roofline estimate from
    the chip's published rates.

    Attributes:
        name: str, the compiled program.
        topology: `Topology`.
        layout: str, the mesh.
        settings: dict, the settings of the step.
        num_layers: int, decoder layers of the model.
        compiled_layers: tuple of ints: the depths that were compiled. If
            there are two, all figures except the arguments' are extrapolated
            linearly from both. For Llama-3-8B the FLOPs and bytes sent of all
            32 layers were within 0.3 % of the extrapolation, and the memory
            within 0.6 % on v5e:8x8 and v5p:2x2x4. If less memory than
            `set_aside` is available, the compiler starts again with closer
            packing and another order: on v5e:4x4 the memory was 5 % above
            the extrapolation, and 8 % below it for Gemma-2-9B.
        parameters, trainable_parameters: ints, for the model on all chips.
        arguments: dict of floats, bytes by kind that are in memory before the
            step: `"weights"`, `"optimizer"` (with float32 masters),
            `"reference"` or `"teacher"`, `"batch"`, `"cache"`.
        known_temporaries: dict of floats, bytes of temporaries known from
            their shapes: `"gradients"`, `"layer inputs"`.
        measured: `Measurement`, or `None` if the program did not compile.
        capacity: float, bytes of memory, or `None` if unknown.
        tokens: int, tokens of a step on all chips.
        model_flops: float, operations of the model by formula, on all chips.
        ideal: dict of floats, the ideal bytes by purpose within a slice; see
            `ideal_bytes` in `collective_bytes.py`. A program may send less.
        ideal_dcn: dict of floats, the same from slice to slice, over the
            data-center network.
        kept_by_remat: dict from each choice of `remat` to a pair of floats,
            by formula: the bytes that it keeps for the backward pass, next
            to the layers' inputs, and the operations that are computed again,
            on all chips. The bytes of `"none"` are an estimate.
        refusal: str or `None`, the compiler's error.
        refused_bytes: float or `None`, the memory that it asked for.
        advice: tuple of str, changes to make if it does not, or may not, fit.

    Example:

    ```python
    plan = task.plan("cpu:1", batch_size=8)
    plan.tokens, plan.parameters
    print(plan)
    ```
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
    measured: Measurement | None
    capacity: float | None
    tokens: int
    model_flops: float
    ideal: dict
    kept_by_remat: dict = dataclasses.field(default_factory=dict)
    refusal: str | None = None
    refused_bytes: float | None = None
    advice: tuple = ()
    ideal_dcn: dict = dataclasses.field(default_factory=dict)

    @property
    def num_devices(self):
        return len(self.topology.devices)

    @property
    def needed(self):
        """Float, total bytes of memory, or `None` if unknown."""
        arguments = sum(self.arguments.values())
        if self.measured is None:
            if self.refused_bytes is None:
                return None
            return arguments + self.refused_bytes
        numbers = self.measured.numbers
        return arguments + numbers["temporaries"] + numbers["program"]

    @property
    def set_aside(self):
        """Float, bytes of memory with loosely packed temporaries.

        This is `needed` plus the gaps between temporaries; `None` if unknown.
        """
        if self.measured is None:
            return None
        numbers = self.measured.numbers
        fixed = sum(self.arguments.values()) + numbers["program"]
        return fixed + max(numbers["set aside"], numbers["temporaries"])

    @property
    def fits(self):
        """Bool, `True` if it fits into the memory, as far as is known."""
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
        """Float, bytes that a chip receives of its slice in a step."""
        return self._received(hlo.ICI)

    @property
    def dcn_bytes(self):
        """Float, bytes that a chip receives of other slices in a step."""
        return self._received(hlo.DCN)

    def _received(self, network):
        return sum(
            c.num_bytes for c in self.collectives if c.network == network
        )

    @property
    def ideal_bytes(self):
        """Float, the ideal for `collective_bytes`."""
        return sum(self.ideal.values())

    @property
    def ideal_dcn_bytes(self):
        """Float, the ideal for `dcn_bytes`."""
        return sum(self.ideal_dcn.values())

    @property
    def seconds(self):
        """Dict of floats, the step's seconds by bound, or `None`."""
        chip = self.topology.chip
        if self.measured is None or chip is None:
            return None
        numbers = self.measured.numbers
        found = {
            "compute": numbers["flops"] / chip.flops,
            "memory": numbers["traffic"] / chip.bandwidth,
            "network": self.collective_bytes / chip.interconnect,
        }
        if self.topology.num_slices > 1:
            found["data-center network"] = self.dcn_bytes / chip.dcn
        return found

    @functools.cached_property
    def parts(self):
        """Tuple of `PlannedPart`, those that take longest first.

        It is empty where the chip's rates are not known.
        """
        chip = self.topology.chip
        if self.measured is None or chip is None:
            return ()
        found = []
        for name, part in self.measured.parts().items():
            seconds = {
                "compute": part.flops / chip.flops,
                "memory": part.traffic / chip.bandwidth,
                "network": part.received / chip.interconnect,
            }
            total = max(seconds["compute"], seconds["memory"])
            total += seconds["network"]
            found.append(
                PlannedPart(
                    name,
                    total,
                    max(seconds, key=seconds.get),
                    part.flops,
                    part.traffic,
                    part.received,
                )
            )
        return tuple(sorted(found, key=lambda part: -part.seconds))

    @property
    def serial_seconds(self):
        """Float, the sum over `parts`, or `None`.

        It is an estimate of a step whose parts run one after another. Bytes
        that arrive while others run are left out.
        """
        return sum(p.seconds for p in self.parts) if self.parts else None

    @property
    def step_seconds(self):
        """Float, the longest of `seconds`: the others overlap with it."""
        return max(self.seconds.values()) if self.seconds else None

    @property
    def tokens_per_second(self):
        """Float, on all chips, or `None`."""
        return self.tokens / self.step_seconds if self.seconds else None

    @property
    def mfu(self):
        """Float, `model_flops` by the chips' peak in `step_seconds`.

        An upper bound of the model FLOPs utilization
        ([Chowdhery et al., 2022](https://arxiv.org/abs/2204.02311), appendix
        B), as the step takes at least `step_seconds`; or `None`. Attention
        counts the pairs of tokens that see each other alone, and what is
        computed again for the backward pass does not count.
        """
        return self._share_of_peak(self.model_flops)

    @property
    def hfu(self):
        """Float, `flops` by the chips' peak in `step_seconds`, or `None`.

        An upper bound of the hardware FLOPs utilization: all operations of
        the program count, also those that are repeated.
        """
        return self._share_of_peak(self.flops)

    def _share_of_peak(self, flops):
        if not self.seconds:
            return None
        peak = self.topology.chip.flops * self.num_devices
        return flops / (peak * self.step_seconds)

    def __str__(self):
        return table(self)
