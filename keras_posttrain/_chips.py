"""Published rates and memory of chips."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """The published rates of a chip.

    Attributes:
        name: str.
        device_kind: str, JAX's name of it.
        memory: float, bytes of HBM that a program may use.
        flops: float, peak bfloat16 operations per second.
        bandwidth: float, bytes per second from HBM.
        interconnect: float, bytes per second over all links of the chip.
        dims: int, the number of axes of its network.
        dcn: float, bytes per second of its share of the data-center network.
    """

    name: str
    device_kind: str
    memory: int
    flops: float
    bandwidth: float
    interconnect: float
    dims: int
    dcn: float


# https://cloud.google.com/tpu/docs/v5e, /v5p and /v6e: "Peak compute per chip
# (bf16)", "HBM capacity and bandwidth" and "Inter-chip interconnect
# bandwidth": 1600, 4800 and 3200 Gbit/s. Later versions of the pages give
# twice as much, the sum of both directions. "Data center network bandwidth per
# Pod" of 256 chips is 6.4 Tbit/s for v5e and 25.6 for v6e; that "per chip" 50
# Gbit/s for v5p. v4 has no entry, because the
# compiler sees two devices per chip where a run sees one.
# The memory is the part of 16, 95 and 32 GB that libtpu 0.0.42 reports as
# available.
GIB, GB, GBIT = 2**30, 1e9, 1e9 / 8
CHIPS = {
    "v5e": Chip(
        "v5e",
        "TPU v5 lite",
        15.75 * GIB,
        197e12,
        819 * GB,
        1600 * GBIT,
        2,
        25 * GBIT,
    ),
    "v5p": Chip(
        "v5p",
        "TPU v5",
        95.74 * GIB,
        459e12,
        2765 * GB,
        4800 * GBIT,
        3,
        50 * GBIT,
    ),
    "v6e": Chip(
        "v6e",
        "TPU v6 lite",
        31.25 * GIB,
        918e12,
        1600 * GB,
        3200 * GBIT,
        2,
        100 * GBIT,
    ),
}


def published_memory(device):
    """Returns the bytes of memory of a kind of device, `None` if unknown."""
    for chip in CHIPS.values():
        if chip.device_kind == device.device_kind:
            return chip.memory
    return None
