"""FLOPs, memory traffic and collectives of a compiled program.

They are counted from the program's text. XLA's own cost analysis counts the
body of a loop once; here every instruction counts as often as it runs, and
collectives are counted by kind.
"""

import collections
import dataclasses
import math
import operator
import re

import numpy as np

from keras_posttrain.distribution.collective_bytes import received

KINDS = (
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all",
    "collective-permute", "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
# Collectives over the data-center network, as the TPU compiler calls them.
MEGASCALE = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}
# The most iterations that a loop is evaluated for.
MAX_TRIPS = 2**17

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
# Opcodes that move no bytes, or whose bytes are counted elsewhere.
NO_TRAFFIC = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast",
    "while", "call", "conditional", "iota", "partition-id",
)  # fmt: skip
# Opcodes that read a part of their first operand.
SLICES = ("dynamic-slice", "gather", "slice")
# Parts of an operation's name that say how it is run.
NO_NAMES = {
    "body", "checkpoint", "closed_call", "cond", "custom_vjp_call",
    "rematted_computation", "remat", "shard_map", "while",
}  # fmt: skip
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
# Computations for a TPU's other cores end with the name of the thread.
_TAIL = re.compile(r"^\}(, execution_thread=\"[^\"]*\")?$")
_NAME = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|true_computation|false_computation)="
    r"%?([\w.\-]+)|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


# The networks of a device: that of its slice, and the data-center network,
# which joins slices.
ICI, DCN = "ici", "dcn"


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a program, over one network.

    Attributes:
        kind: str, such as `"all-gather"`.
        count: int, how many are run.
        num_bytes: float, a lower bound of the bytes that a device receives in
            all of them: `(n - 1) / n` of the full array if `n` devices gather
            or scatter it, twice that for an all-reduce.
        network: `"ici"`, the network of a slice, or `"dcn"`, the data-center
            network. A collective over devices of several slices counts on
            both; see `collective_bytes.received`.
    """

    kind: str
    count: int
    num_bytes: float
    network: str = ICI


@dataclasses.dataclass
class Part:
    """The work of a device in a part of a program: of one name, all layers.

    Attributes:
        count: int, how many instructions are run.
        flops: float, as of `Counts`.
        traffic: float, an upper bound of the bytes to and from memory.
        received: float, bytes that the program waits for.
        overlapped: float, bytes that arrive while other parts run.
    """

    count: float = 0
    flops: float = 0.0
    traffic: float = 0.0
    received: float = 0.0
    overlapped: float = 0.0


@dataclasses.dataclass(frozen=True)
class Counts:
    """The work of one device in a program.

    Attributes:
        flops: float, operations of all matrix products; a multiplication and
            an addition are two.
        flops_once: float, the same with the body of each loop counted once,
            as in XLA's cost analysis.
        collectives: tuple of `Collective`, most bytes first.
        traffic_again: float, an upper bound of the bytes to and from the
            device's memory in all iterations of loops but the first of each:
            an operand that is read in part counts in full.
        unknown_loops: int, loops whose number of iterations depends on data.
        parts: dict of `Part`s by name, see `part_name`.
    """

    flops: float
    flops_once: float
    collectives: tuple
    unknown_loops: int
    traffic_again: float = 0.0
    parts: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Instruction:
    name: str
    opcode: str
    shapes: list
    operands: list
    rest: str
    is_root: bool
    in_memory: float


def count(
    text,
    num_devices,
    data_dependent_trips=1,
    trips_by_name=None,
    num_slices=1,
):
    """Counts the work of a program.

    Args:
        text: str, `jax.stages.Compiled.as_text()`.
        num_devices: int, the devices that it was compiled for.
        data_dependent_trips: int, iterations to assume for a loop whose
            number of iterations depends on data.
        trips_by_name: dict from the name of a `jax.named_scope` right around
            such loops to the iterations to assume for them.
        num_slices: int, the slices that the devices are divided into, in
            the order of the program's devices.

    Returns:
        `Counts`.
    """
    module = _Module(text)
    trips = trips_by_name or {}
    devices = (num_devices, num_slices)
    walk = _Walk(module, devices, data_dependent_trips, trips)
    walk.computation(module.entry, 1, 1)
    by_kind = [
        Collective(kind, round(times), num_bytes, network)
        for (kind, network), (times, num_bytes) in walk.collectives.items()
    ]
    by_kind.sort(key=lambda c: -c.num_bytes)
    return Counts(
        walk.flops,
        walk.flops_once,
        tuple(by_kind),
        walk.unknown,
        walk.traffic - walk.traffic_once,
        dict(walk.parts),
    )


def part_name(module, instruction):
    """Names the part of a program that an instruction belongs to.

    It is what `jax.named_scope`, Keras layers and JAX's operations call it,
    without the numbers of layers, after the pass: `"forward"`, `"backward"`,
    `"recomputed"` or nothing.
    """
    path = _op_name(module, instruction)
    if path is None:
        # Kernels have names of their own.
        return re.sub(r"[.\d]+$", "", instruction.name)
    passes = {
        "rematted_computation": "recomputed ",
        "transpose(": "backward ",
        "jvp(": "forward ",
    }
    of_pass = next((x for word, x in passes.items() if word in path), "")
    names = []
    for name in path.split("/")[1:] or [path]:
        name = name.rpartition("(")[2].rstrip(")")
        name = re.sub(r"_\d+$", "", name)
        if name and name not in NO_NAMES:
            names.append(name)
    return of_pass + "/".join(names[-2:])


def _op_name(module, instruction):
    """Returns JAX's name of an operation, of a fusion that of its result."""
    found = re.search(r'op_name="([^"]*)"', instruction.rest)
    if found:
        return found[1]
    if instruction.opcode != "fusion":
        return None
    called = next(_called(instruction))
    inside = [module.roots[called], *module.computations[called].values()]
    names = (_op_name(module, x) for x in inside)
    return next((name for name in names if name), None)


class _Module:
    """The computations of a program, as dicts of instructions by name."""

    def __init__(self, text):
        self.computations, self.roots, self.entry = {}, {}, None
        current = None
        for line in text.splitlines():
            if current is None:
                head = _HEAD.match(line)
                if head:
                    current = self.computations[head[2]] = {}
                    name = head[2]
                    if head[1]:
                        self.entry = name
            elif _TAIL.match(line):
                current = None
            else:
                instruction = _instruction(line)
                if instruction is not None:
                    current[instruction.name] = instruction
                    if instruction.is_root:
                        self.roots[name] = instruction

    def users(self, name):
        """Returns lists of a computation's instructions by their operands."""
        found = collections.defaultdict(list)
        for user in self.computations[name].values():
            for operand in user.operands:
                found[operand].append(user)
        return found

    def parameters(self, name):
        """Returns the names of a computation's parameters by their number."""
        return {
            int(x.operands[0]): x.name
            for x in self.computations[name].values()
            if x.opcode == "parameter"
        }


def _instruction(line):
    named = _NAME.match(line)
    if named is None:
        return None
    rest = line[named.end() :]
    stop = _end_of_type(rest)
    shapes, in_memory = [], 0.0
    for dtype, dims, layout in _ARRAY.findall(rest[:stop]):
        shape = (dtype, tuple(int(n) for n in dims.split(",") if n))
        shapes.append(shape)
        # Memory spaces from `S(1)` on are on the chip itself.
        in_memory += 0 if "S(" in layout else _size([shape])
    opcode, _, rest = rest[stop:].strip().partition("(")
    inside = rest[: _end_of_operands(rest)]
    return _Instruction(
        named[2],
        opcode,
        shapes,
        re.findall(r"%([\w.\-]+)", inside) or [inside],
        rest[len(inside) + 1 :],
        bool(named[1]),
        in_memory,
    )


def _end_of_type(text):
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "({[") - (c in ")}]")
        if c == " " and depth == 0:
            return i
    return len(text)


def _end_of_operands(text):
    depth = 1
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i
    return len(text)


def _size(shapes):
    return sum(_itemsize(d) * math.prod(dims) for d, dims in shapes)


def _itemsize(dtype):
    if dtype == "pred":
        return 1
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) / 8 if bits else 0


class _Walk:
    """Walks through a program and counts each instruction as it runs."""

    def __init__(self, module, devices, trips, by_name):
        self.module = module
        self.num_devices, self.num_slices = devices
        self.trips, self.trips_by_name = trips, by_name
        self.flops = self.flops_once = 0.0
        self.traffic = self.traffic_once = 0.0
        self.unknown = 0
        self.collectives = collections.defaultdict(lambda: [0, 0.0])
        self.received = 0.0
        self.parts = collections.defaultdict(Part)

    def computation(self, name, times, once, fused=False):
        inside = self.module.computations[name]
        for instruction in inside.values():
            if instruction.opcode == "while":
                self._loop(inside, instruction, times, once)
                continue
            before = self.flops, self.received
            self._count(name, instruction, times, once, fused)
            if not fused and instruction.opcode not in NO_TRAFFIC:
                self._add_part(inside, instruction, times, *before)

    def _add_part(self, inside, instruction, times, flops, received):
        """Adds an instruction to its part, of what was counted before it."""
        part = self.parts[part_name(self.module, instruction)]
        part.count += times
        part.flops += self.flops - flops
        part.traffic += times * _moved(self.module, inside, instruction)
        is_overlapped = instruction.opcode.endswith("-start")
        is_overlapped |= "chain_id=" in instruction.rest
        if is_overlapped or instruction.opcode == "send":
            part.overlapped += self.received - received
        else:
            part.received += self.received - received

    def _count(self, name, instruction, times, once, fused):
        inside = self.module.computations[name]
        opcode = instruction.opcode
        if not fused and opcode not in NO_TRAFFIC:
            moved = _traffic(inside, instruction)
            self.traffic += times * moved
            self.traffic_once += once * moved
        flops = _flops(inside, instruction)
        self.flops += times * flops
        self.flops_once += once * flops
        kind = opcode.removesuffix("-start")
        if opcode == "send":
            self._between_slices(inside, instruction, times)
            return
        if kind in KINDS and _begins(inside, instruction):
            if name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # the form on TPUs
            self._collective(inside, instruction, kind, times)
            return
        if opcode in ("reduce", "reduce-window", "scatter", "sort"):
            return  # These apply elementwise computations.
        for called in _called(instruction):
            within = fused or opcode not in ("call", "conditional")
            self.computation(called, times, once, within)

    def _loop(self, inside, instruction, times, once):
        trips = _trips(self.module, inside, instruction)
        if trips is None:
            self.unknown += 1
            trips = self._assumed(instruction)
        body = _attribute(instruction, "body")
        self.computation(body, times * trips, once)

    def _assumed(self, loop):
        """Returns the iterations to assume for a loop."""
        for name, trips in self.trips_by_name.items():
            if re.search(rf'op_name="[^"]*/{name}/while"', loop.rest):
                return trips
        return self.trips

    def _collective(self, inside, instruction, kind, times):
        size = sum(_size(inside[name].shapes) for name in instruction.operands)
        group = _group(instruction.rest, self.num_devices)
        per_slice = self.num_devices // self.num_slices
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", instruction.rest)
        if pairs:
            pairs = re.findall(r"(\d+),(\d+)", pairs[1])
            crossing = [
                int(a) // per_slice != int(b) // per_slice for a, b in pairs
            ]
            share = sum(crossing) / len(crossing)
            self._received(kind, times, (size * (1 - share), size * share))
            return
        slices = len({device // per_slice for device in group})
        if kind == "all-gather":
            size *= len(group)
        moved = received(kind, size, len(group), slices)
        self._received(kind, times, moved)

    def _between_slices(self, inside, instruction, times):
        """Counts what TPUs send over the data-center network.

        Within a slice the compiler uses its other collectives.
        """
        found = re.search(
            r'_xla_megascale_transfer_type="(\w+)"', instruction.rest
        )
        if found is None:
            return
        size = _size(inside[instruction.operands[0]].shapes)
        target = re.search(
            r'_xla_megascale_target="\{([\d,]+)\}', instruction.rest
        )
        slices = self.num_slices
        if target:
            slices = target[1].count(",") + 1
        kind = MEGASCALE.get(found[1], "collective-permute")
        if kind == "all-gather":
            size *= slices
        moved = received(kind, size, slices, slices)
        self._received(kind, times, moved)

    def _received(self, kind, times, moved):
        for network, num_bytes in zip((ICI, DCN), moved):
            if num_bytes:
                found = self.collectives[kind, network]
                found[0] += times
                found[1] += times * num_bytes
                self.received += times * num_bytes * (network == ICI)


def _attribute(instruction, name):
    """Returns the text of an attribute, such as a computation's name."""
    return re.search(rf"\b{name}=%?([\w.\-]+)", instruction.rest)[1]


def _traffic(inside, instruction):
    """Returns the bytes that an instruction reads and writes in memory."""
    if instruction.opcode.endswith("-done"):
        return 0.0
    read = [inside[x].in_memory for x in instruction.operands if x in inside]
    return instruction.in_memory + sum(read)


def _moved(module, inside, instruction):
    """As `_traffic`, with the parts of arrays that are read and written.

    A slice of an array, or an array updated in place, counts as the slice.
    """
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in SLICES:
        rest = [inside[x].in_memory for x in operands[1:] if x in inside]
        return 2 * instruction.in_memory + sum(rest)
    if opcode == "dynamic-update-slice" and operands[1] in inside:
        return 2 * _size(inside[operands[1]].shapes)
    if opcode != "fusion":
        return _traffic(inside, instruction)
    called = next(_called(instruction))
    fused, users = module.computations[called], module.users(called)
    places = module.parameters(called)
    moved = instruction.in_memory
    for i, name in enumerate(operands):
        if name in inside and inside[name].in_memory:
            size = inside[name].in_memory
            moved += _read(module, users, places[i], size)
    roots = [module.roots[called]]
    if roots[0].opcode == "tuple":
        roots = [fused[name] for name in roots[0].operands]
    for root in roots:
        while root.opcode == "bitcast":
            root = fused[root.operands[0]]
        if root.opcode == "dynamic-update-slice" and instruction.in_memory:
            update = fused[root.operands[1]]
            moved -= _size(root.shapes) - _size(update.shapes)
    return max(moved, 0.0)


def _read(module, users, name, size):
    """Returns the bytes that a fusion reads of a parameter of `size` bytes.

    `users` are the instructions of the fusion by the names of operands.
    """
    found = 0.0
    for user in users[name]:
        if user.opcode == "fusion":
            called = next(_called(user))
            inner = module.parameters(called)[user.operands.index(name)]
            found += _read(module, module.users(called), inner, size)
        elif user.opcode == "bitcast":
            found += _read(module, users, user.name, size)
        elif user.operands[0] != name:
            return size
        elif user.opcode in SLICES:
            found += _size(user.shapes)
        elif user.opcode != "dynamic-update-slice":
            return size
    return min(found, size)


def _called(instruction):
    for one, several in _CALLED.findall(instruction.rest):
        yield from [one] if one else re.findall(r"[\w.\-]+", several)


def _begins(inside, instruction):
    """Returns `True` if a collective begins at this instruction.

    On TPUs a collective that overlaps with other instructions appears in each
    of them, as a chain; `AsyncCollectiveStart` takes the first of them.
    """
    if "chain_id=" not in instruction.rest:
        return True
    return any(
        'custom_call_target="AsyncCollectiveStart"' in other.rest
        and instruction.name in other.operands
        for other in inside.values()
    )


def _group(rest, num_devices):
    """Returns the devices in the first group of a collective, an array."""
    groups = re.search(r"replica_groups=(.*)", rest)
    text = groups[1] if groups else ""
    mesh = re.match(
        rf"mesh\[(.*?)\](?:, device_ids=\({_IOTA}\))? \{{(.*?)\}}", text
    )
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        sizes = {name: int(size) for name, size in sizes.items()}
        names = re.findall(r"'(\w+)'", mesh[4])
        devices = _iota(mesh[2] or str(math.prod(sizes.values())), mesh[3])
        first = tuple(slice(None) if n in names else 0 for n in sizes)
        return devices.reshape(list(sizes.values()))[first].reshape(-1)
    iota = re.match(rf"\[\d+,(\d+)\]<={_IOTA}", text)
    if iota:
        return _iota(iota[2], iota[3])[: int(iota[1])]
    listed = re.match(r"\{\{([\d,]+)\}", text)
    if listed:
        return np.array([int(n) for n in listed[1].split(",")])
    return np.arange(num_devices)


# The numbers from 0 on in a shape, and the order of its axes: `[2,4]T(1,0)`.
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _iota(shape, order):
    shape = [int(n) for n in shape.split(",")]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    if order:
        numbers = numbers.transpose([int(n) for n in order.split(",")])
    return numbers.reshape(-1)


def _flops(inside, instruction):
    """Returns the operations of a matrix product, 0 for other opcodes."""
    if instruction.opcode in ("dot", "convolution"):
        return _product(inside, instruction)
    if instruction.opcode == "custom-call":
        return _kernel(inside, instruction)
    return 0.0


def _product(inside, instruction):
    """Returns the operations of a `dot` or a `convolution`."""
    (_, out), *_ = instruction.shapes
    rest = instruction.rest
    left, right = (inside[x].shapes[0][1] for x in instruction.operands)
    if instruction.opcode == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
        summed = [left[int(i)] for i in axes[1].split(",") if i]
        return 2.0 * math.prod(out) * math.prod(summed)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    lhs, rhs, result = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", rest)
    window = dict(re.findall(r"(\w+)=([\w\-]+)", window[1] if window else ""))
    pairs = 1
    for i, axis in enumerate(sorted(c for c in lhs if c.isdigit())):
        pairs *= _pairs(
            left[lhs.index(axis)],
            right[rhs.index(axis)],
            out[result.index(axis)],
            {name: value.split("x")[i] for name, value in window.items()},
        )
    batches = re.search(r"batch_group_count=(\d+)", rest)
    batches = int(batches[1]) if batches else 1
    features = right[rhs.index("i")] * right[rhs.index("o")]
    return 2.0 * features * left[lhs.index("b")] / batches * pairs


# Products of rows sorted by expert: the TPU compiler's, and the kernel that
# `models/grouped_matmul.py` calls for the gradient of the experts' kernels.
GROUPED = ("ragged-dot", "tgmm")


def _grouped(instruction, arrays):
    """Returns the operations of `GROUPED`: all rows, each for one expert."""
    (_, out), *_ = instruction.shapes
    rows = max(dims[0] for dims in arrays if len(dims) == 2)
    if len(out) == 3:
        # The gradient of the kernels.
        return 2.0 * rows * math.prod(out[1:])
    return 2.0 * math.prod(out) * arrays[0][-1]


# The number of matrix products, each of queries by keys by head size, in the
# kernels that `models/tpu_attention.py` calls: XLA does not count them.
KERNELS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}


def _kernel(inside, instruction):
    """Returns the operations of a known kernel, 0 for other calls.

    Blocks of scores that are masked completely are skipped: of `n` by `n`
    blocks of a causal mask, `n * (n + 1) / 2` are computed. That a sliding
    window masks more is not counted.
    """
    if "tpu_custom_call" not in instruction.rest:
        return 0.0
    products = next(
        (n for name, n in KERNELS.items() if name in instruction.name), 0
    )
    given = [inside[x].shapes[0] for x in instruction.operands]
    arrays = [dims for dtype, dims in given if dtype in ("bf16", "f32")]
    if arrays and any(name in instruction.name for name in GROUPED):
        return _grouped(instruction, arrays)
    blocks = [dims for dtype, dims in given if dtype.startswith("s8")]
    if not products or len(arrays) < 2:
        return 0.0
    query, keys = arrays[0], arrays[1]
    n = blocks[0][-1] if blocks else 1
    full = 2.0 * products * math.prod(query) * keys[-2]
    return full * (n + 1) / (2 * n)


def _pairs(size, kernel, out, window):
    """Counts pairs of kernel and output positions that read an input.

    This is for one axis. XLA writes batched matrix products as convolutions,
    in which most pairs read padding and cost nothing.
    """
    stride = int(window.get("stride", 1))
    low = int(window.get("pad", "0_0").split("_")[0])
    into = int(window.get("lhs_dilate", 1))
    apart = int(window.get("rhs_dilate", 1))
    if kernel == 1 and into == stride == 1 and low == 0:
        return min(out, size)
    count = 0
    end = (size - 1) * into
    for k in range(kernel):
        # Outputs o with 0 <= o * stride - low + k * apart <= end, at a
        # position that holds an input after dilation.
        for o in range(out):
            at = o * stride - low + k * apart
            count += 0 <= at <= end and at % into == 0
    return count


# --- Loops -------------------------------------------------------------------


def _trips(module, inside, loop):
    """Returns the iterations of a loop, `None` if they depend on data."""
    known = re.search(r'known_trip_count[^}]*"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    condition = _attribute(loop, "condition")
    body = _attribute(loop, "body")
    root = module.roots[body]
    evaluate = _Evaluation(module)
    state = evaluate.tuple_of(inside, loop.operands[0], {})
    needed = [i for i, x in enumerate(state) if x is not None]
    for trips in range(MAX_TRIPS):
        continues = evaluate.root(condition, [state])
        if continues is None:
            return None
        if not continues:
            return trips
        arguments = {0: state}
        after = [None] * len(state)
        cache = {}
        for i in needed:
            after[i] = evaluate.scalar(
                module.computations[body], root.operands[i], arguments, cache
            )
        state = after
        needed = [i for i in needed if state[i] is not None]
    return None


class _Evaluation:
    """Evaluates the integers of a program."""

    BINARY = {
        "add": operator.add,
        "subtract": operator.sub,
        "multiply": operator.mul,
        "maximum": max,
        "minimum": min,
        "and": operator.and_,
        "or": operator.or_,
        "divide": lambda a, b: None if b == 0 else int(a / b),
    }
    SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")

    def __init__(self, module):
        self.module = module

    def root(self, computation, arguments):
        inside = self.module.computations[computation]
        root = self.module.roots[computation]
        given = dict(enumerate(arguments))
        return self.scalar(inside, root.name, given, {})

    def tuple_of(self, inside, name, arguments):
        """Returns the integers of a tuple, and `None` for its other items."""
        instruction = inside[name]
        if instruction.opcode == "tuple":
            cache = {}
            return [
                self.scalar(inside, x, arguments, cache)
                for x in instruction.operands
            ]
        if instruction.opcode == "parameter":
            found = arguments.get(int(instruction.operands[0]))
            if isinstance(found, list):
                return found
        return [None] * len(instruction.shapes)

    def scalar(self, inside, name, arguments, cache):
        """Returns the value of an integer scalar, or `None`."""
        if name not in cache:
            cache[name] = None
            cache[name] = self._scalar(inside, inside[name], arguments, cache)
        return cache[name]

    def _scalar(self, inside, instruction, arguments, cache):
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "get-tuple-element":
            return self._element(inside, instruction, arguments)
        if not instruction.shapes or math.prod(instruction.shapes[0][1]) != 1:
            return None
        if opcode == "constant":
            return _literal(operands[0])
        if opcode == "parameter":
            found = arguments.get(int(operands[0]))
            return None if isinstance(found, list) else found

        def value(i):
            return self.scalar(inside, operands[i], arguments, cache)

        if opcode in self.SAME:
            return value(0)
        if opcode == "fusion" or opcode == "call":
            called = next(_called(instruction))
            given = [value(i) for i in range(len(operands))]
            return self.root(called, given)
        if opcode in self.BINARY or opcode == "compare":
            a, b = value(0), value(1)
            if a is None or b is None:
                return None
            if opcode == "compare":
                how = _attribute(instruction, "direction")
                return getattr(operator, how.lower())(a, b)
            return self.BINARY[opcode](a, b)
        if opcode == "select":
            which = value(0)
            return None if which is None else value(1 if which else 2)
        if opcode == "not":
            found = value(0)
            return None if found is None else not found
        return None

    def _element(self, inside, instruction, arguments):
        index = int(_attribute(instruction, "index"))
        source = inside[instruction.operands[0]]
        if source.opcode == "while":
            # An item that the loop passes on unchanged has its first value.
            body = _attribute(source, "body")
            root = self.module.roots[body]
            if root.opcode != "tuple":
                return None
            kept = self.module.computations[body][root.operands[index]]
            if kept.opcode != "get-tuple-element":
                return None
            if int(_attribute(kept, "index")) != index:
                return None
            source = inside[source.operands[0]]
        found = self.tuple_of(inside, source.name, arguments)
        return found[index] if index < len(found) else None


def _literal(text):
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else None
