"""The compiled programs of the built-in engine, over a cache of slots.

A slot holds one sequence. Prompts are filled in, then all slots step forward
together, each at its own length, many steps to a call. Which request sits in
which slot is the business of `rollout/native.py`.
"""

import contextlib
import typing

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain.data.batches.assembly import Segment, assemble
from keras_posttrain.data.batches.packing import pack
from keras_posttrain.models.attention import KeyValues
from keras_posttrain.rollout.native.sampling import sample

# Steps of one call: the tokens of a call lie in a small cache of their own
# until it ends, and slots whose sequence ended idle for the rest of it.
STEPS = 32
# Tokens of prompts that go through the model at once, at least.
PREFILL_TOKENS = 1024


class Weights(typing.NamedTuple):
    """The task's arrays, and whether the adapter is added by its layers."""

    trainable: list
    frozen: list
    adapted: bool


@contextlib.contextmanager
def using(task, adapted, weights):
    """A scope in which the task has these arrays, its adapter on or off."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(task.using_weights(*weights))
        if task.adapter is not None and not adapted:
            stack.enter_context(task.adapter.disabled())
        yield


def model_inputs(rows, length, num_rows):
    """The arrays that a forward pass reads.

    Args:
        rows: list of lists of sequences of token ids.
        length: int, tokens of a row.
        num_rows: int.

    Returns:
        Dict of `token_ids`, `segment_ids` and `positions`.
    """
    batch, _ = assemble(
        [[Segment(ids) for ids in row] for row in rows],
        length=length,
        num_rows=num_rows,
        max_sequences=max(map(len, rows)),
        pad_id=0,
    )
    names = ("token_ids", "segment_ids", "positions")
    return {name: batch[name] for name in names}


def power_of_two(n, at_least=1):
    return max(1 << max(n - 1, 0).bit_length(), at_least)


def bucket(tokens, at_least=128):
    """The length that serves so many tokens: few lengths, few programs."""
    size = power_of_two(tokens, at_least)
    less = size * 3 // 4
    return less if at_least < size and tokens <= less else size


class Placement:
    """Where arrays lie: slots over the data axis, heads over the other.

    Read from Keras's distribution; without one all lies on one device.
    """

    def __init__(self, kv_heads):
        distribution = keras.distribution.distribution()
        self.mesh, self.shards, self.head_shards = None, 1, 1
        if distribution is None:
            return
        self.mesh = distribution.device_mesh.backend_mesh
        self.data = distribution.batch_dim_name
        self.shards = self.mesh.shape[self.data]
        others = [a for a in self.mesh.axis_names if a != self.data]
        self.heads = others[0] if len(others) == 1 else None
        if self.heads and kv_heads % self.mesh.shape[self.heads]:
            self.heads = None
        if self.heads:
            self.head_shards = self.mesh.shape[self.heads]

    def key(self):
        return None if self.mesh is None else (self.mesh, self.heads)

    def cache(self, tree):
        """`(slots, kv_heads, …)` arrays of a cache, inside a program."""
        if self.mesh is None:
            return tree
        return self._constrain(tree, self.data, self.heads)

    def rows(self, tree):
        """Arrays whose first axis is slots or rows, inside a program."""
        if self.mesh is None:
            return tree
        return self._constrain(tree, self.data)

    def whole(self, tree):
        """Arrays that every process reads, inside a program."""
        return tree if self.mesh is None else self._constrain(tree)

    def _constrain(self, tree, *axes):
        spec = jax.sharding.PartitionSpec(*axes)
        sharding = jax.sharding.NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(tree, sharding)


class SlotDecoder:
    """A cache of slots, and what is done with it.

    Args:
        task: the task whose policy decodes.
        kv_shapes: list of `(kv_heads, head_dim)`, one a layer.
        dtype: of keys and values.
        note: `f(text)`, told of every program that is compiled.
    """

    def __init__(self, task, kv_shapes, dtype, note):
        self.task, self.kv_shapes, self.dtype = task, kv_shapes, dtype
        self.placement = Placement(kv_shapes[0][0])
        self._note = note
        self.cache, self.slots, self.tokens = None, 0, 0
        self._prefill = jax.jit(self._prefill, static_argnums=0)
        self._fill = jax.jit(self._fill, donate_argnums=0, static_argnums=4)
        self._copy = jax.jit(self._copy, donate_argnums=0, static_argnums=3)
        self._decode = jax.jit(
            self._decode, static_argnums=0, donate_argnums=2
        )
        self._resize = jax.jit(self._resize, static_argnums=2)
        self._zeros = jax.jit(self._zeros, static_argnums=(0, 1))

    def token_bytes(self):
        """Bytes that a token takes on its device, over all layers."""
        size = jnp.dtype(self.dtype).itemsize
        per_layer = [2 * heads * dim * size for heads, dim in self.kv_shapes]
        return sum(per_layer) // self.placement.head_shards

    # The cache

    def allocate(self, slots, tokens):
        self.slots, self.tokens = slots, tokens
        self.cache = self._zeros(slots, tokens)

    def _zeros(self, slots, tokens):
        return [
            self.placement.cache(
                KeyValues.zeros(slots, tokens, heads, dim, self.dtype)
            )
            for heads, dim in self.kv_shapes
        ]

    def resize(self, index, tokens):
        """Keeps the slots of `index`, with room for `tokens` each.

        Layer by layer, so that one layer at most exists twice.
        """
        index = np.asarray(index, "int32")
        self.slots, self.tokens = len(index), tokens
        for i, layer in enumerate(self.cache):
            self.cache[i] = self._resize(layer, index, tokens)

    def _resize(self, layer, index, tokens):
        return self.placement.cache(layer.resize(index, tokens))

    def free(self):
        self.cache = None

    # Prompts

    def prefill(self, weights, prompts, slots):
        """Computes prompts and puts each in its slots.

        Args:
            weights: `Weights`.
            prompts: list of sequences of token ids.
            slots: list of lists of ints, the slots of each prompt.
        """
        longest = max(map(len, prompts))
        room = power_of_two(max(longest, PREFILL_TOKENS))
        rows = self.placement.shards
        for part in self._parts(prompts, room, rows):
            self._prefill_part(
                weights, [(prompts[i], slots[i]) for i in part], rows
            )

    @staticmethod
    def _parts(prompts, room, rows):
        """Which prompts go through the model together."""
        packed = pack([len(p) for p in prompts], room, max_sequences=2**30)
        for i in range(0, len(packed), rows):
            yield [p for row in packed[i : i + rows] for p in row]

    def _prefill_part(self, weights, part, num_rows):
        lengths = [len(p) for p, _ in part]
        total = -(-sum(lengths) // num_rows)
        length = power_of_two(max(total, *lengths), 64)
        rows = pack(lengths, length, max_sequences=2**30)
        while len(rows) > num_rows:
            length *= 2
            rows = pack(lengths, length, max_sequences=2**30)
        ids = [[part[i][0] for i in row] for row in rows]
        batch = model_inputs(ids, length, num_rows)
        starts, targets = [], []
        for r, row in enumerate(rows):
            at = r * length
            for i in row:
                starts += [at] * len(part[i][1])
                targets += part[i][1]
                at += lengths[i]
        width = min(power_of_two(max(lengths), 64), self.tokens)
        self._note(f"prefill of {num_rows} x {length} tokens")
        kept = self._prefill(weights.adapted, weights[:2], batch)
        starts, targets = self._padded(starts, targets)
        self._note(f"fill of {len(starts)} of {self.slots} slots")
        self.cache = self._fill(self.cache, kept, starts, targets, width)

    def _padded(self, sources, targets):
        """Both filled up to a usual size, with a slot that there is not."""
        size = min(power_of_two(len(targets), 8), self.slots)
        more = size - len(targets)
        sources = np.array(sources + [0] * more, "int32")
        return sources, np.array(targets + [self.slots] * more, "int32")

    def _prefill(self, adapted, weights, batch):
        batch = self.placement.rows(batch)
        with using(self.task, adapted, weights):
            return self.task.policy.prefill(batch)

    def _fill(self, cache, kept, starts, slots, width):
        places = starts[:, None] + jnp.arange(width)
        # Behind its prompt a slot takes what comes: never seen, its length
        # says so.
        places = jnp.minimum(places, kept[0][0].shape[0] - 1)
        return [
            self.placement.cache(layer.fill(slots, k[places], v[places]))
            for layer, (k, v) in zip(cache, kept)
        ]

    def copy(self, sources, targets, longest):
        """Copies prompts of up to `longest` tokens from slots to slots."""
        width = min(power_of_two(longest, 64), self.tokens)
        sources, targets = self._padded(sources, targets)
        self._note(f"copy of {len(sources)} of {self.slots} slots")
        self.cache = self._copy(self.cache, sources, targets, width)

    def _copy(self, cache, sources, targets, width):
        def layer(old):
            keys = old.keys[sources, :, :, :width].transpose(0, 3, 1, 2)
            values = old.values[sources, :, :width].transpose(0, 2, 1, 3)
            return self.placement.cache(old.fill(targets, keys, values))

        return [layer(old) for old in cache]

    # Steps

    def decode(self, weights, state, floor, steps=STEPS):
        """Steps until few slots are active.

        Args:
            weights: `Weights`.
            state: dict of arrays with a leading slots axis: `token` (int32,
                the last token, not in the cache yet), `length` (int32, the
                tokens in the cache), `remaining` (int32, tokens it may still
                have), `active` (bool), `keys` (uint32, `(slots, 2)`),
                `temperature` (float32), `stop` (int32, `(slots, ids)`, -1
                where unused); and where a slot's distribution is cut short
                `top_k` (int32), `top_p` and `min_p` (float32).
            floor: int, ends when no more slots than this are active.
            steps: int, ends after so many steps.

        Returns:
            Dict of numpy arrays: `tokens` and `logps` `(STEPS, slots)`,
            `taken` (how many of them are a slot's), `active` and `stopped`
            `(slots,)`.
        """
        self._note(
            f"decode of {self.slots} slots x {self.tokens} tokens"
            + (", truncated" if "top_k" in state else "")
            + (f", {state['stop'].shape[1]} stop ids")
        )
        limits = np.array([floor, min(steps, STEPS)], "int32")
        self.cache, out = self._decode(
            weights.adapted, weights[:2], self.cache, state, limits
        )
        return jax.tree.map(np.asarray, out)

    def _decode(self, adapted, weights, cache, state, limits):
        slots = state["token"].shape[0]
        state = self.placement.rows(state)
        cuts = {k: state[k] for k in ("top_k", "top_p", "min_p") if k in state}
        recent = [
            KeyValues.zeros(slots, STEPS, heads, dim, self.dtype)
            for heads, dim in self.kv_shapes
        ]
        carry = {
            "step": jnp.int32(0),
            "token": state["token"],
            "active": state["active"],
            "stopped": jnp.zeros(slots, bool),
            "taken": jnp.zeros(slots, "int32"),
            "tokens": jnp.zeros((STEPS, slots), "int32"),
            "logps": jnp.zeros((STEPS, slots), "float32"),
            "recent": self.placement.cache(recent),
        }

        def go_on(carry):
            active = jnp.sum(carry["active"], dtype="int32")
            return (carry["step"] < limits[1]) & (active > limits[0])

        def body(carry):
            step, active = carry["step"], carry["active"]
            logits, recent = self.task.policy.decode(
                carry["token"], state["length"], step, cache, carry["recent"]
            )
            place = state["length"] + step + 1
            token, logps = sample(
                logits, state["keys"], place, state["temperature"], **cuts
            )
            # XLA would draw the token anew for each stop id it is
            # compared with.
            token = jax.lax.optimization_barrier(token)
            taken = carry["taken"] + active
            stop = jnp.any(token[:, None] == state["stop"], axis=1) & active
            write = jax.lax.dynamic_update_slice_in_dim
            return {
                "step": step + 1,
                "token": token,
                "active": active & ~stop & (taken < state["remaining"]),
                "stopped": carry["stopped"] | stop,
                "taken": taken,
                "tokens": write(carry["tokens"], token[None], step, 0),
                "logps": write(carry["logps"], logps[None], step, 0),
                "recent": self.placement.cache(recent),
            }

        with using(self.task, adapted, weights):
            carry = jax.lax.while_loop(go_on, body, carry)
        cache = [
            self.placement.cache(old.append(state["length"], new))
            for old, new in zip(cache, carry["recent"])
        ]
        names = ("tokens", "logps", "taken", "active", "stopped")
        return cache, self.placement.whole({n: carry[n] for n in names})
