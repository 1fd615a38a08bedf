"""Attention on CUDA GPUs by cuDNN's kernel and by JAX's Pallas kernel.

Neither stores scores in memory. cuDNN computes rows of one sequence each:
JAX's public function has no segments, and a mask would be an array of
`length * length` for each row. The Pallas kernel compares segment ids and
computes packed rows. What neither can compute is computed in blocks of scores
by XLA, as on a CPU: see `block_attention.py`.

No GPU has run this yet. Tests lower programs for CUDA, which JAX does without
a GPU, and run the Pallas kernel in JAX's interpreter.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp

from keras_posttrain import _console
from keras_posttrain.models import sharding

CUDNN, PALLAS, BLOCKS = "cudnn", "pallas", "blocks"
KERNELS = (CUDNN, PALLAS, BLOCKS)
CHOICES = ("auto", *KERNELS)
# The least compute capability of both kernels.
CAPABILITY = (8, 0)
# The largest heads of cuDNN, and those by compute capability 9.0.
CUDNN_HEAD, CUDNN_HEAD_90 = 128, 256
# The heads and the square blocks of scores with which JAX tests its Pallas
# kernel on GPUs.
PALLAS_HEADS = (32, 64, 128)
PALLAS_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """What a layer's attention asks of a kernel.

    Args:
        dtypes: tuple of the dtypes of queries, keys and values.
        head_dim: int.
        is_packed: bool, whether a row may hold several sequences.
        window: int or `None`, a sliding window shorter than the rows.
        special: str or `None`, what only blocks of scores can compute.
    """

    dtypes: tuple
    head_dim: int
    is_packed: bool
    window: int | None = None
    special: str | None = None

    @classmethod
    def of(cls, arrays, settings, *, is_packed, is_split, shares_prompts):
        """Describes a call of `attention.py:segment_attention`.

        Args:
            arrays: tuple of `query`, `key` and `value`.
            settings: dict of that function's `sliding_window`, `soft_cap`,
                `sinks` and `images`.
            is_packed: bool, as of the class.
            is_split: bool, whether devices share the tokens of a row.
            shares_prompts: bool, whether segments continue others.
        """
        special = {
            "rows split over devices": is_split,
            "shared prompts": shares_prompts,
            "images": settings["images"] is not None,
            "a soft cap of scores": settings["soft_cap"] is not None,
            "sinks": settings["sinks"] is not None,
        }
        length, _, head_dim = arrays[0].shape[1:]
        window = settings["sliding_window"]
        return cls(
            dtypes=tuple(x.dtype.name for x in arrays),
            head_dim=head_dim,
            is_packed=is_packed,
            window=window if (window or length) < length else None,
            special=next((x for x, holds in special.items() if holds), None),
        )


def obstacle(kernel, case, capability):
    """Returns why a kernel cannot compute a case, or `None`.

    Args:
        kernel: one of `KERNELS`.
        case: `Case`.
        capability: as of `sharding.compute_capability`.
    """
    if kernel == BLOCKS:
        return None
    if no_device := device_obstacle(capability):
        return no_device
    if case.special:
        return case.special
    if case.dtypes not in (("bfloat16",) * 3, ("float16",) * 3):
        return " and ".join(sorted(set(case.dtypes)))
    heads = f"heads of {case.head_dim}"
    if kernel == CUDNN:
        largest = CUDNN_HEAD if capability < (9, 0) else CUDNN_HEAD_90
        if case.head_dim > largest or case.head_dim % 8:
            return heads
        return "packed rows" if case.is_packed else None
    if case.head_dim not in PALLAS_HEADS:
        return heads
    return None if case.window is None else "a sliding window"


def device_obstacle(capability):
    """Returns why no kernel of this file runs on a device, or `None`."""
    if capability is None:
        return f"a device that is no CUDA GPU ({sharding.platform()!r})"
    if capability < CAPABILITY:
        found = ".".join(map(str, capability))
        return f"a GPU of compute capability {found}, below 8.0"
    return None


def check_choice(attention):
    """Raises a `ValueError` for a choice that is none, or not of this device.

    `attention` is the argument of a task.
    """
    if attention not in CHOICES:
        raise ValueError(
            "`attention` must be 'auto', 'blocks', 'cudnn' or 'pallas'. "
            f"Received: attention={attention!r}"
        )
    found = device_obstacle(sharding.compute_capability())
    if attention in (CUDNN, PALLAS) and found:
        raise ValueError(
            f"attention={attention!r} needs a CUDA GPU of compute capability "
            "8.0 or above. Use attention='auto', which chooses what the "
            f"device has. Received: {found}"
        )


class Chooser:
    """Chooses what computes the attention of each layer, and says so once.

    Args:
        wanted: one of `CHOICES`.
        is_silent: bool, whether it says nothing.
    """

    def __init__(self, wanted="auto", is_silent=False):
        self.wanted, self.is_silent, self._said = wanted, is_silent, set()

    @property
    def of_engine(self):
        """`Chooser` of an engine's rows, which packs them as it likes.

        It takes what it can, and says nothing.
        """
        wanted = BLOCKS if self.wanted == BLOCKS else "auto"
        return Chooser(wanted, is_silent=True)

    def kernel(self, case, layer):
        """Returns one of `KERNELS` and why cuDNN or Pallas was not chosen.

        The reason is a str or `None`. Where there is no choice, because the
        devices are no CUDA GPUs, both are `None`.

        Args:
            case: `Case`.
            layer: int, the number of the decoder layer, for messages.
        """
        capability = sharding.compute_capability()
        if self.wanted == BLOCKS:
            return BLOCKS, None
        if self.wanted != "auto":
            if reason := obstacle(self.wanted, case, capability):
                raise ValueError(
                    f"attention={self.wanted!r} cannot compute the attention "
                    f"of decoder layer {layer}. Use attention='auto', which "
                    f"chooses for each layer. Received: {reason}"
                )
            return self.wanted, None
        if capability is None:
            return None, None
        chosen = next(x for x in KERNELS if not obstacle(x, case, capability))
        fastest = PALLAS if case.is_packed else CUDNN
        return chosen, obstacle(fastest, case, capability)

    def say(self, found, is_packed):
        """Prints what computes the layers of a step, each line once.

        Args:
            found: list of the results of `kernel`, of all layers.
            is_packed: bool, as of `Case`.
        """
        counts = collections.Counter(x for x in found if x[0] is not None)
        known = sharding.compute_capability() is not None
        if self.is_silent or not counts or not known:
            return
        parts = [
            f"{kernel} in {count} layer{'s' if count > 1 else ''}"
            + (f" ({reason})" if reason else "")
            for (kernel, reason), count in counts.items()
        ]
        rows = "packed rows" if is_packed else "rows of one sequence"
        text = f"Attention of {rows}: {', '.join(parts)}."
        if text not in self._said:
            self._said.add(text)
            _console.say(text)


def attend(
    kernel, query, key, value, segment_ids, *, scale, window=None,
    interpret=False,
):  # fmt: skip
    """Computes `models/attention.py:segment_attention` by a kernel.

    The tokens of a segment are adjacent and in the order of their positions,
    and padding follows them. A mask that is causal by column is therefore
    causal by position, and a window of columns one of positions.

    Args:
        kernel: `"cudnn"`, for rows of one sequence each, or `"pallas"`.
        query, key, value, segment_ids, scale: as of `segment_attention`, in
            16 bits.
        window: int or `None`, tokens that a token sees, for cuDNN.
        interpret: bool, for tests without a GPU: JAX's interpreter runs the
            Pallas kernel, and XLA what cuDNN is asked for.
    """

    if window is not None and window >= query.shape[1]:
        window = None

    def local(query, key, value, segment_ids, _):
        if kernel == CUDNN:
            return _cudnn(query, key, value, scale, window, interpret)
        return _pallas(query, key, value, segment_ids, scale, interpret)

    return sharding.over_heads(local, query, key, value, segment_ids, None)


def _cudnn(query, key, value, scale, window, interpret):
    # The queries of padding see the sequence before it, which nothing reads.
    # cuDNN has no window together with lengths of sequences.
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla" if interpret else "cudnn",
    )


def _pallas(query, key, value, segment_ids, scale, interpret):
    # Importing Pallas's GPU kernels is slow, and only needed on GPUs.
    from jax.experimental.pallas.ops.gpu import attention as kernels

    rows, length, heads, head_dim = query.shape
    more = -length % PALLAS_BLOCK

    def padded(x):
        return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))

    query, key, value, segment_ids = map(
        padded, (query, key, value, segment_ids)
    )
    run = functools.partial(
        kernels.mha,
        segment_ids=segment_ids,
        sm_scale=scale,
        causal=True,
        block_sizes=kernels.BlockSizes(*[PALLAS_BLOCK] * 6),
        interpret=interpret,
    )
    # The heads that share a key are a batch, so that no key is copied.
    shape = (rows, length + more, key.shape[2], -1, head_dim)
    out = jax.vmap(run, (3, None, None), 3)(query.reshape(shape), key, value)
    return out.reshape(rows, -1, heads, head_dim)[:, :length]


def computes(primitive, parameters):
    """Returns whether an operation of a program is one of these kernels.

    For policies of `jax.checkpoint`, whose arguments these are: the kernels
    give their outputs and statistics no names.
    """
    if primitive.name == "dot_product_attention_fwd_wrapper":
        return True
    if primitive.name != "custom_vjp_call":
        return False
    inside = parameters["call_jaxpr"].jaxpr.eqns
    return any(x.params.get("name") == "mha" for x in inside)
