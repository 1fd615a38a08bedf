"""The compiled programs of the built-in engine, over a cache of slots.

A slot holds one sequence. Prompts are written to slots; then all slots decode
together, each at its own length, many steps in a call. `schedule.py` decides
which sample is in which slot.
"""

import contextlib
import copy
import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from keras_posttrain.data.batches.assembly import (
    IMAGE_ARRAYS,
    Segment,
    assemble,
)
from keras_posttrain.data.batches.packing import pack
from keras_posttrain.models import experts, sharding
from keras_posttrain.models.key_values import KeyValues
from keras_posttrain.models.prefix_key_values import PrefixKeyValues
from keras_posttrain.models.recurrence import RecurrentState
from keras_posttrain.models.window_key_values import with_window
from keras_posttrain.rollout.native.drafts import accept, find
from keras_posttrain.rollout.native.samples import power_of_two
from keras_posttrain.rollout.native.sampling import (
    INT_MAX,
    sample,
    token_noise,
)

# Steps of one call. The tokens of a call are stored in a separate small cache
# until it ends. Slots whose sequence has ended are idle until then.
STEPS = 32
# Tokens of prompts that each device computes at once. Longer prompts are
# computed in pieces of so many tokens, over the cache of those before.
CHUNK = 1024
# Prompts are written to at least this share of the slots at once.
FEWEST_FILLED = 1 / 8
# The compiled programs of a `SlotDecoder`, and those that return two results.
PROGRAMS = (
    "_prefill", "_fill", "_copy", "_extend", "_decode", "_decode_groups",
    "_verify", "_resize", "_divide", "_append", "_zeros",
)  # fmt: skip
PAIRS = {"_prefill", "_extend", "_decode", "_decode_groups", "_verify"}
# Those of one layer.
OF_LAYERS = {"_resize", "_divide", "_append"}
# What a call with drafts returns of what its last pass has left.
STATE_AFTER = ("taken", "active", "stopped", "passes", "drafts")


class Weights(typing.NamedTuple):
    """The values of the task's trainable variables and of the others.

    `adapted` is false if the adapter is in the kernels already.
    """

    trainable: list
    frozen: list
    adapted: bool


@contextlib.contextmanager
def using(policy, using_weights, adapted, weights):
    """Gives a policy's variables values, and turns its adapter on or off.

    `using_weights` is a function from the weights, `(trainable, frozen)`, to
    a scope in which the variables have them, such as `Task.using_weights`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(using_weights(*weights))
        if policy.adapter is not None and not adapted:
            stack.enter_context(policy.adapter.disabled())
        yield


def model_inputs(rows, length, num_rows):
    """Builds the arrays of a forward pass, as of `Policy.hidden_states`.

    `rows` is a list of lists of `Segment`s; `length` is the tokens of a row.
    """
    batch, _ = assemble(
        rows,
        length=length,
        num_rows=num_rows,
        max_sequences=max(map(len, rows)),
        pad_id=0,
    )
    names = ("token_ids", "segment_ids", "positions", *IMAGE_ARRAYS)
    return {name: batch[name] for name in names if name in batch}


def bucket(tokens, at_least=128):
    """Rounds a number of tokens up to one of few lengths.

    A program is compiled for each length: powers of two and 3/4 of them.
    """
    size = power_of_two(tokens, at_least)
    less = size * 3 // 4
    return less if at_least < size and tokens <= less else size


def fill_sizes(slots):
    """Returns the numbers of slots that prompts are written to at once."""
    sizes = [power_of_two(int(slots * FEWEST_FILLED), 8)]
    while sizes[-1] < slots:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], slots]


class Placement:
    """The layout of arrays: slots over the data axis, heads over the other.

    It follows Keras's distribution; without one there is a single device.

    Args:
        kv_heads: int, the greatest common divisor of the layers' numbers of
            heads of keys and values, or of states.
    """

    def __init__(self, kv_heads):
        self.head_shards = 1
        self.mesh, self.data, self.shards, heads, size = sharding.axes()
        self.heads = heads if heads and kv_heads % size == 0 else None
        if self.heads:
            self.head_shards = size

    def key(self):
        """Returns a value that changes with the mesh."""
        return None if self.mesh is None else (self.mesh, self.heads)

    def cache(self, tree):
        """Splits arrays of shape `(slots, kv_heads, ...)` in a program."""
        if self.mesh is None:
            return tree
        return self._constrain(tree, self.data, self.heads)

    def layer(self, layer):
        """Splits the cache of a layer in a program."""
        if isinstance(layer, RecurrentState):
            tail = self.rows(layer.tail)
            return RecurrentState(self.cache(layer.state), tail)
        return self.cache(layer)

    def shapes(self, layer):
        """Returns the shapes of a layer's cache, laid out as by `layer`."""

        def described(tree, *axes):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=self._sharding(*axes)
                ),
                tree,
            )

        if isinstance(layer, RecurrentState):
            state = described(layer.state, self.data, self.heads)
            return RecurrentState(state, described(layer.tail, self.data))
        return described(layer, self.data, self.heads)

    def rows(self, tree):
        """Splits arrays with a leading axis of slots or rows in a program."""
        if self.mesh is None:
            return tree
        return self._constrain(tree, self.data)

    def replicated(self, tree):
        """Replicates arrays that every process reads, in a program."""
        return tree if self.mesh is None else self._constrain(tree)

    def _constrain(self, tree, *axes):
        return jax.lax.with_sharding_constraint(tree, self._sharding(*axes))

    def _sharding(self, *axes):
        if self.mesh is None:
            return None
        spec = jax.sharding.PartitionSpec(*axes)
        return jax.sharding.NamedSharding(self.mesh, spec)


def empty_layers(policy, using_weights, weights):
    """Returns the shapes of each layer's cache, of a slot of one token.

    The arguments are those of `using`.
    """

    def run(weights, batch):
        windows = []
        with using_weights(*weights):
            kept = policy.prefill(batch, 1, windows)
        windows = iter(windows)
        return [
            # Keys have the axes of tokens, heads and features.
            with_window(
                KeyValues.zeros(1, 1, *x.shape[1:], x.dtype), next(windows)
            )
            if x.ndim == 3
            else RecurrentState(x, y)
            for x, y in kept
        ]

    token = jax.ShapeDtypeStruct((1, 1), "int32")
    names = ("token_ids", "segment_ids", "positions")
    return jax.eval_shape(run, weights, dict.fromkeys(names, token))


class SlotDecoder:
    """A cache of slots with the programs that fill it and decode from it.

    There is a cache in `empty` for each layer, the shapes of one with one
    slot of one token, from `empty_layers`. `note(text)` is called with a
    description of every program used.

    Methods with an argument `routes` also return the experts of the tokens
    that they compute if it is true, int16 arrays of shape
    `(tokens, mixtures, top_k)`.
    """

    def __init__(self, policy, using_weights, empty, note, chunk=CHUNK):
        self.policy, self._using_weights = policy, using_weights
        self.empty, self.chunk = empty, chunk
        # Whether layers hold a state, which has no parts of fewer tokens.
        self.is_recurrent = policy.is_recurrent
        # A slot of at most so many tokens can go back to earlier ones.
        self.rewindable = min(layer.rewindable for layer in empty)
        heads = [jax.tree.leaves(layer)[0].shape[1] for layer in empty]
        self.placement = Placement(math.gcd(*heads))
        self._note = note
        self.cache, self.slots, self.tokens = None, 0, 0
        # The tokens of the longest prompt of all calls, where it is known.
        self.longest_prompt = 0
        # The decoders that run at the same time.
        self.num_parts = 1
        self._prefill = jax.jit(self._prefill, static_argnums=(0, 3, 4))
        self._fill = jax.jit(self._fill, donate_argnums=0, static_argnums=6)
        self._copy = jax.jit(self._copy, donate_argnums=0, static_argnums=3)
        self._extend = jax.jit(
            self._extend, static_argnums=0, donate_argnums=2
        )
        self._decode = jax.jit(
            self._decode, static_argnums=0, donate_argnums=2
        )
        self._decode_groups = jax.jit(self._decode_groups, static_argnums=0)
        self._divide = jax.jit(PrefixKeyValues.divided, static_argnums=(2, 3))
        self._append = jax.jit(self._appended, donate_argnums=0)
        self._verify = jax.jit(
            self._verify, static_argnums=0, donate_argnums=2
        )
        self._resize = jax.jit(self._resize, static_argnums=2)
        self._zeros = jax.jit(self._zeros, static_argnums=(0, 1))

    def divided(self, count):
        """Returns a list of decoders that run at the same time.

        They have the same programs, and caches of their own.
        """
        if count == 1:
            return [self]
        found = [copy.copy(self) for _ in range(count)]
        for part in found:
            part.num_parts = count
            part.free()
        return found

    def lowering(self, found):
        """Returns a decoder that lowers its programs and runs none of them.

        Args:
            found: list, gets the `jax.stages.Lowered` of each program that a
                method would run. The cache has shapes only.
        """
        other, known = copy.copy(self), {}

        def lowered(name, *args):
            leaves, structure = jax.tree.flatten(args)
            leaves = [
                (x.shape, str(x.dtype)) if hasattr(x, "shape") else x
                for x in leaves
            ]
            key = name, structure, tuple(leaves)
            if key not in known:
                known[key] = self._lowered(name, found, *args)
            # A cache is a list that methods change.
            return copy.copy(known[key])

        for name in PROGRAMS:
            setattr(other, name, functools.partial(lowered, name))
        return other

    def _lowered(self, name, found, *args):
        """Lowers a program; returns shapes for what it gives others."""
        lowered = getattr(self, name).lower(*args)
        found.append(lowered)
        out, rest = lowered.out_info, None
        if name in PAIRS:
            out, rest = out
            rest = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), rest)
        if name in OF_LAYERS:
            return self.placement.shapes(out)
        out = [self.placement.shapes(layer) for layer in out]
        return (out, rest) if name in PAIRS else out

    def layer_bytes(self, tokens):
        """Returns the bytes of a slot on its device, a list by layer."""
        return [
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer))
            * layer.columns(tokens)
            // self.placement.head_shards
            for layer in self.empty
        ]

    def slot_bytes(self, tokens):
        """Returns the bytes of a slot on its device, over all layers."""
        return sum(self.layer_bytes(tokens))

    # The cache

    def allocate(self, slots, tokens):
        """Creates the cache."""
        self.slots, self.tokens = slots, tokens
        self.cache = self._zeros(slots, tokens)

    def _zeros(self, slots, tokens):
        return [
            self.placement.layer(layer.empty(slots, tokens))
            for layer in self.empty
        ]

    def resize(self, index, tokens):
        """Keeps the slots of `index` and sets their number of tokens.

        Layers are resized one by one, so that at most one exists twice.
        """
        index = np.asarray(index, "int32")
        self.slots, self.tokens = len(index), tokens
        for i, layer in enumerate(self.cache):
            self.cache[i] = self._resize(layer, index, tokens)

    def _resize(self, layer, index, tokens):
        return self.placement.layer(layer.resize(index, tokens))

    def free(self):
        """Releases the cache."""
        self.cache = None

    # Prompts

    def prefill(self, weights, prompts, slots, routes=False, images=None):
        """Computes prompts and writes each to the slots of its list.

        Args:
            weights: `Weights`.
            prompts: list of lists of ints.
            slots: list of lists of ints.
            routes: as in the class.
            images: list of the `Images` of each prompt, or `None` of one
                without; `None` where no prompt has any.

        Returns:
            A list with the experts of each prompt's tokens, or with `None`s.
        """
        images = images or [None] * len(prompts)
        firsts = [self._first(*both) for both in zip(prompts, images)]
        found = self._prefill_firsts(
            weights,
            [p[:first] for p, first in zip(prompts, firsts)],
            # The others get copies of what is computed in pieces.
            [
                to[:1] if first < len(p) else to
                for p, first, to in zip(prompts, firsts, slots)
            ],
            routes,
            images,
        )
        long = [i for i, p in enumerate(prompts) if firsts[i] < len(p)]
        if not long:
            return found
        later = self.extend(
            weights,
            [slots[i][0] for i in long],
            [firsts[i] for i in long],
            [prompts[i][firsts[i] :] for i in long],
            routes,
        )
        copies = [(slots[i][0], to) for i in long for to in slots[i][1:]]
        if copies:
            self.copy(*map(list, zip(*copies)), self.tokens)
        if routes:
            for i, more in zip(long, later):
                found[i] = np.concatenate([found[i], more])
        return found

    def _first(self, prompt, images):
        """Counts the first tokens of a prompt, which are computed at once.

        What follows them is text, in whole pieces.
        """
        least = 1 if images is None else int(images.places.max()) + 1
        later = max(len(prompt) - least, 0)
        return len(prompt) - later // self.chunk * self.chunk

    def _prefill_firsts(self, weights, prompts, slots, routes, images):
        """Computes prompts in no pieces, as `prefill`."""
        longest = min(self.longest_prompt, self.chunk)
        longest = max(longest, *map(len, prompts))
        room = power_of_two(max(longest, self.chunk))
        width = min(power_of_two(longest, 64), self.tokens)
        rows, found = self.placement.shards, [None] * len(prompts)
        for part in self._parts(prompts, room, rows):
            pairs = [
                (Segment(prompts[i], images=images[i]), slots[i]) for i in part
            ]
            chosen = self._prefill_part(
                weights, pairs, rows, room, width, routes
            )
            for i, x in zip(part, chosen):
                found[i] = x
        return found

    @staticmethod
    def _parts(prompts, room, rows):
        """Yields lists of prompts that are computed together."""
        packed = pack([len(p) for p in prompts], room, max_sequences=2**30)
        for i in range(0, len(packed), rows):
            yield [p for row in packed[i : i + rows] for p in row]

    def _prefill_part(self, weights, part, num_rows, room, width, routes):
        lengths = [len(p.token_ids) for p, _ in part]
        total = -(-sum(lengths) // num_rows)
        length = power_of_two(max(total, *lengths), 64)
        rows = pack(lengths, length, max_sequences=2**30)
        while len(rows) > num_rows:
            length *= 2
            rows = pack(lengths, length, max_sequences=2**30)
        room = max(room, length)
        prompts = [[part[i][0] for i in row] for row in rows]
        batch = model_inputs(prompts, length, num_rows)
        slots = None
        if self.is_recurrent:
            slots = power_of_two(max(map(len, rows)), 4)
        starts, segments, filled, targets = [], [], [], []
        places = [None] * len(part)
        for r, row in enumerate(rows):
            at = r * length
            for s, i in enumerate(row):
                # What is kept of a row has the same length for all rows.
                start = at + r * (room - length)
                starts += [start] * len(part[i][1])
                segments += [r * (slots or 0) + s] * len(part[i][1])
                filled += [lengths[i]] * len(part[i][1])
                targets += part[i][1]
                places[i] = slice(at, at + lengths[i])
                at += lengths[i]
        of_rows = "" if slots is None else f", {slots} prompts a row"
        if "pixels" in batch:
            of_rows += f", {batch['pixels'].shape[1]} images a row"
        self._note(f"prefill of {num_rows} x {length} tokens{of_rows}")
        kept, chosen = self._prefill(
            (weights.adapted, routes), weights[:2], batch, slots, room
        )
        starts, padded = self._padded(starts, targets)
        segments, _ = self._padded(segments, targets)
        filled, _ = self._padded(filled, targets)
        self._note(f"fill of {len(starts)} of {self.slots} slots")
        self.cache = self._fill(
            self.cache, kept, starts, segments, filled, padded, width
        )
        if not routes:
            return [None] * len(part)
        chosen = np.asarray(chosen)
        return [chosen[place] for place in places]

    def _padded(self, sources, targets):
        """Pads both to one of few sizes, with a slot out of range."""
        size = min(x for x in fill_sizes(self.slots) if x >= len(targets))
        more = size - len(targets)
        sources = np.array(sources + [0] * more, "int32")
        return sources, np.array(targets + [self.slots] * more, "int32")

    def _prefill(self, mode, weights, batch, slots, room):
        adapted, routes = mode
        batch = self.placement.rows(batch)
        rows, length = batch["token_ids"].shape

        def padded(x):
            x = x.reshape(rows, length, *x.shape[1:])
            more = [(0, 0)] * x.ndim
            more[1] = (0, room - length)
            return jnp.pad(x, more).reshape(rows * room, *x.shape[2:])

        with (
            using(self.policy, self._using_weights, adapted, weights),
            experts.recorded_choices(routes) as chosen,
        ):
            kept = self.policy.prefill(batch, slots)
        kept = [
            self.placement.cache(jax.tree.map(padded, pair))
            if isinstance(layer, KeyValues)
            else pair
            for layer, pair in zip(self.empty, kept)
        ]
        return kept, self._routes(chosen)

    @property
    def _vocabulary(self):
        return self.policy.head().vocabulary_size(self.policy.kernel)

    def _routes(self, chosen):
        """Returns recorded choices as one array, `None` if there are none.

        Its shape is `(tokens, mixtures, top_k)`.
        """
        if not chosen:
            return None
        chosen = jnp.stack(chosen, axis=1).astype("int16")
        return self.placement.replicated(chosen)

    def _fill(self, cache, kept, starts, segments, lengths, slots, width):
        def filled(layer, arrays):
            index = segments
            if isinstance(layer, KeyValues):
                # After its prompt a slot gets arbitrary tokens. They are
                # never used: its length excludes them.
                index = starts[:, None] + layer.prompt_tokens(lengths, width)
                index = jnp.minimum(index, arrays[0].shape[0] - 1)
            return layer.fill(slots, *(x[index] for x in arrays))

        return [
            self.placement.layer(filled(*both)) for both in zip(cache, kept)
        ]

    def copy(self, sources, targets, longest):
        """Copies prompts of at most `longest` tokens between slots."""
        width = min(power_of_two(longest, 64), self.tokens)
        sources, targets = self._padded(sources, targets)
        self._note(f"copy of {len(sources)} of {self.slots} slots")
        self.cache = self._copy(self.cache, sources, targets, width)

    def _copy(self, cache, sources, targets, width):
        return [
            self.placement.layer(old.copy(sources, targets, width))
            for old in cache
        ]

    # Conversations that continue

    def extend(self, weights, slots, lengths, tokens, routes=False):
        """Computes tokens behind those that slots hold.

        Returns as `prefill`.

        Args:
            slots: list of ints.
            lengths: list of ints, the tokens that each of them holds.
            tokens: list of int arrays, those that follow.
        """
        found = {slot: [] for slot in slots}
        for part in self._pieces(slots, lengths, tokens):
            chosen = self._extend_part(weights, part, routes)
            for (slot, *_), x in zip(part, chosen):
                found[slot].append(x)
        if not routes:
            return [None] * len(slots)
        return [np.concatenate(found[slot]) for slot in slots]

    def _pieces(self, slots, lengths, tokens):
        """Yields lists of pieces `(slot, length, tokens)`, computed together.

        The first piece of a sequence has what others, which are all of the
        same size, leave.
        """
        rows = list(zip(slots, lengths, tokens))
        # Similar lengths need little padding.
        rows.sort(key=lambda row: (len(row[2]) - 1) % self.chunk)
        sizes = [(len(ids) - 1) % self.chunk + 1 for *_, ids in rows]
        while rows:
            count = 0
            while count < len(rows) and count < self._most_rows(sizes[count]):
                count += 1
            yield [
                (slot, length, ids[:size])
                for (slot, length, ids), size in zip(rows[:count], sizes)
            ]
            left = [
                (slot, length + size, ids[size:])
                for (slot, length, ids), size in zip(rows[:count], sizes)
                if size < len(ids)
            ]
            rows, sizes = rows[count:] + left, sizes[count:]
            sizes += [self.chunk] * len(left)

    def _most_rows(self, tokens):
        """Returns the sequences of so many tokens that are computed at once.

        They are few enough for `chunk` tokens a device.
        """
        width = power_of_two(tokens, 16)
        return max(self.chunk // width, 1) * self.placement.shards

    def _extend_part(self, weights, part, routes):
        longest = max(len(ids) for *_, ids in part)
        width = min(power_of_two(longest, 16), self.tokens)
        shards = self.placement.shards
        least = min(self._most_rows(longest) // shards, 4)
        count = power_of_two(-(-len(part) // shards), least) * shards
        token_ids = np.zeros((count, width), "int32")
        slots = np.full(count, self.slots, "int32")
        lengths, counts = np.zeros((2, count), "int32")
        for row, (slot, length, ids) in enumerate(part):
            token_ids[row, : len(ids)] = ids
            slots[row], lengths[row], counts[row] = slot, length, len(ids)
        self._note(f"extension of {count} slots by {width} tokens")
        self.cache, chosen = self._extend(
            (weights.adapted, routes), weights[:2], self.cache, token_ids,
            slots, lengths, counts,
        )  # fmt: skip
        if not routes:
            return [None] * len(part)
        chosen = np.asarray(chosen).reshape(count, width, *chosen.shape[1:])
        return [row[: len(ids)] for row, (*_, ids) in zip(chosen, part)]

    def _extend(self, mode, weights, cache, token_ids, slots, lengths, counts):
        adapted, routes = mode
        token_ids = self.placement.rows(token_ids)
        positions = lengths[:, None] + jnp.arange(token_ids.shape[1])
        with (
            using(self.policy, self._using_weights, adapted, weights),
            experts.recorded_choices(routes) as chosen,
        ):
            cache = self.policy.extend(
                token_ids, positions, cache, slots, counts,
                self.placement.layer,
            )  # fmt: skip
        return cache, self._routes(chosen)

    # Steps

    def decode(
        self, weights, state, floor, steps=STEPS, routes=False, width=1,
        grouping=None,
    ):  # fmt: skip
        """Decodes until at most `floor` slots are active, or for `steps`.

        With drafts a pass computes `width` tokens of each slot, and a call
        has passes for `steps` of them, taken or not.

        Args:
            state: dict of arrays with a leading slots axis: `token` (int32,
                the last token, which is not in the cache yet), `length`
                (int32, the tokens in the cache), `remaining` (int32, the most
                new tokens), `active` (bool), and those of
                `samples.py:sampling_arrays`. With drafts also those of
                `drafts.py:find`.
            width: int that divides `steps`; 1 is without drafts.
            grouping: `Grouping` or `None`; without drafts.

        Returns:
            A dict of numpy arrays: `tokens` and `logps` of shape
            `(STEPS, slots)`; `taken` (the number of new tokens), `active`
            and `stopped` of shape `(slots,)`. With `routes` also `routes` of
            shape `(STEPS, slots, mixtures, top_k)`, the experts of the last
            token and of all new ones but the last. With drafts also `passes`
            of shape `(slots,)` and `drafts` of shape `(3, slots)`: the tokens
            of drafts, those that were reached and those accepted.
        """
        self._note(
            f"decode of {self.slots} slots x {self.tokens} tokens"
            + (", truncated" if "top_k" in state else "")
            + (f", {state['stop'].shape[1]} stop ids")
            + (f", {width} tokens a pass" if width > 1 else "")
            + ("" if grouping is None else f", {grouping.described()}")
        )
        limits = np.array([floor, min(steps, STEPS)], "int32")
        if grouping is not None:
            return self._decode_by_groups(
                weights, state, limits, routes, grouping
            )
        program, mode = self._decode, (weights.adapted, routes)
        if width > 1:
            program, mode = self._verify, (*mode, width)
        self.cache, out = program(
            mode,
            weights[:2],
            self.cache,
            state,
            limits,
        )
        return jax.tree.map(np.asarray, out)

    def _decode_by_groups(self, weights, state, limits, routes, grouping):
        """Decodes as `decode`; prompts are read once for several slots."""
        sizes = grouping.columns, grouping.own
        past = [
            self._divide(layer, grouping.groups, *sizes)
            if isinstance(layer, KeyValues) and not layer.wraps
            else layer
            for layer in self.cache
        ]
        recent, out = self._decode_groups(
            (weights.adapted, routes), weights[:2], past, state, limits
        )
        counts = state["length"], out["taken"]
        for i, layer in enumerate(self.cache):
            self.cache[i] = self._append(layer, *counts, recent[i])
        return jax.tree.map(np.asarray, out)

    def _appended(self, layer, lengths, counts, recent):
        return self.placement.layer(layer.append(lengths, counts, recent))

    def _decode(self, mode, weights, cache, state, limits):
        recent, taken, out = self._new_tokens(
            mode, weights, cache, state, limits
        )
        cache = [
            self._appended(old, state["length"], taken, new)
            for old, new in zip(cache, recent)
        ]
        return cache, out

    def _decode_groups(self, mode, weights, past, state, limits):
        recent, _, out = self._new_tokens(mode, weights, past, state, limits)
        return recent, out

    def _new_tokens(self, mode, weights, cache, state, limits):
        """Returns the caches of new tokens, their numbers, and the result."""
        adapted, routes = mode
        state = self.placement.rows(state)
        cuts = {k: state[k] for k in ("top_k", "top_p", "min_p") if k in state}
        carry = self._begun(state, cache, routes) | {
            "step": jnp.int32(0),
            "token": state["token"],
        }

        # Of all steps at once: on a CPU the generator is a loop, which takes
        # as long for a few numbers as for many.
        places = state["length"][:, None] + 1 + jnp.arange(STEPS)
        noise = token_noise(
            state["keys"], places.astype("int32"), self._vocabulary
        )
        noise = jnp.moveaxis(noise, 1, 0)

        def is_unfinished(carry):
            active = jnp.sum(carry["active"], dtype="int32")
            return (carry["step"] < limits[1]) & (active > limits[0])

        def body(carry):
            step, active = carry["step"], carry["active"]
            with experts.recorded_choices(routes) as chosen:
                logits, recent = self.policy.decode(
                    carry["token"],
                    state["length"],
                    step,
                    cache,
                    carry["recent"],
                    active,
                )
            token, logps = sample(
                logits,
                state["keys"],
                state["length"] + step + 1,
                state["temperature"],
                noise=jax.lax.dynamic_index_in_dim(noise, step, 0, False),
                **cuts,
            )
            # XLA would sample the token again for each stop id that it is
            # compared with.
            token = jax.lax.optimization_barrier(token)
            taken = carry["taken"] + active
            stop = jnp.any(token[:, None] == state["stop"], axis=1) & active
            write = jax.lax.dynamic_update_slice_in_dim
            more = {}
            if routes:
                chosen = self._routes(chosen)[None]
                more["routes"] = write(carry["routes"], chosen, step, 0)
            return more | {
                "step": step + 1,
                "token": token,
                "active": active & ~stop & (taken < state["remaining"]),
                "stopped": carry["stopped"] | stop,
                "taken": taken,
                "tokens": write(carry["tokens"], token[None], step, 0),
                "logps": write(carry["logps"], logps[None], step, 0),
                "recent": [self.placement.layer(layer) for layer in recent],
            }

        with using(self.policy, self._using_weights, adapted, weights):
            carry = jax.lax.while_loop(is_unfinished, body, carry)
        names = ["tokens", "logps", "taken", "active", "stopped"]
        names += ["routes"] if routes else []
        out = self.placement.replicated({n: carry[n] for n in names})
        return carry["recent"], carry["taken"], out

    # Drafts

    def _verify(self, mode, weights, cache, state, limits):
        """Decodes with drafts, as `_decode`.

        A pass has the next `width` columns of the small cache. Those whose
        tokens are not taken stay empty, and the others are moved together at
        the end: the caches of slots get tokens of their sequences alone.
        """
        adapted, routes, width = mode
        state = self.placement.rows(state)
        lengths = state["length"]

        def is_unfinished(carry):
            active = jnp.sum(carry["active"], dtype="int32")
            return (carry["column"] < limits[1]) & (active > limits[0])

        def body(carry):
            return self._pass(carry, state, cache, width, routes)

        with using(self.policy, self._using_weights, adapted, weights):
            carry = jax.lax.while_loop(
                is_unfinished, body, self._before(state, cache, routes)
            )
        placed = carry["placed"]
        order = jnp.argsort(
            jnp.where(placed < 0, INT_MAX, placed), axis=1, stable=True
        )
        cache = [
            self._appended(old, lengths, carry["taken"], new.arranged(order))
            for old, new in zip(cache, carry["recent"])
        ]
        names = ["tokens", "logps"] + (["routes"] if routes else [])
        out = {n: carry[n] for n in STATE_AFTER}
        for name in names:
            found = carry[name]
            index = order.T.reshape(*order.T.shape, *[1] * (found.ndim - 2))
            out[name] = jnp.take_along_axis(found, index, axis=0)
        return cache, self.placement.replicated(out)

    def _before(self, state, cache, routes):
        """Returns what a call with drafts carries before its first pass."""
        slots = state["length"].shape[0]
        return self._begun(state, cache, routes) | {
            "column": jnp.int32(0),
            "suffix": state["suffix"],
            "passes": jnp.zeros(slots, "int32"),
            "drafts": jnp.zeros((3, slots), "int32"),
            "placed": jnp.full((slots, STEPS), -1, "int32"),
        }

    def _begun(self, state, cache, routes):
        """Returns what every call carries before its first pass."""
        lengths = state["length"]
        slots = lengths.shape[0]
        recent = [layer.begun(lengths, STEPS) for layer in cache]
        carry = {
            "active": state["active"],
            "stopped": jnp.zeros(slots, bool),
            "taken": jnp.zeros(slots, "int32"),
            "tokens": jnp.zeros((STEPS, slots), "int32"),
            "logps": jnp.zeros((STEPS, slots), "float32"),
            "recent": [self.placement.layer(layer) for layer in recent],
        }
        if routes:
            shape = (STEPS, slots, *self.policy.choices_shape)
            carry["routes"] = jnp.zeros(shape, "int16")
        return carry

    def _pass(self, carry, state, cache, width, routes):
        """Returns what is carried after a pass over last tokens and drafts."""
        column, active = carry["column"], carry["active"]
        lengths, taken, suffix = (
            state["length"],
            carry["taken"],
            carry["suffix"],
        )
        write = jax.lax.dynamic_update_slice_in_dim
        draft = find(state["sources"], suffix, width - 1)
        inputs = jnp.concatenate([suffix[:, -1:], jnp.maximum(draft, 0)], 1)
        positions = (lengths + taken)[:, None] + jnp.arange(width)
        positions = positions.astype("int32")
        placed = write(carry["placed"], positions, column, 1)
        with experts.recorded_choices(routes) as chosen:
            logits, recent = self.policy.verify(
                inputs, lengths, positions, column, placed, cache,
                carry["recent"],
            )  # fmt: skip
        tokens, logps = self._sampled(logits, state, positions + 1)
        count, stopped, agree = accept(
            draft, tokens, state["stop"], active, state["remaining"] - taken
        )
        is_taken = jnp.arange(width) < count[:, None]
        placed = write(placed, jnp.where(is_taken, positions, -1), column, 1)
        last = count[:, None] + jnp.arange(suffix.shape[1])
        drafted = jnp.where(active, jnp.sum(draft >= 0, 1, "int32"), 0)
        reached = jnp.where(active, jnp.minimum(agree + 1, width - 1), 0)
        more = {}
        if routes:
            chosen = self._routes(chosen)
            chosen = chosen.reshape(-1, width, *chosen.shape[1:])
            chosen = jnp.moveaxis(chosen, 1, 0)
            more["routes"] = write(carry["routes"], chosen, column, 0)
        taken = taken + count
        return more | {
            "column": column + width,
            "suffix": jnp.take_along_axis(
                jnp.concatenate([suffix, tokens], 1), last, axis=1
            ),
            "active": active & ~stopped & (taken < state["remaining"]),
            "stopped": carry["stopped"] | stopped,
            "taken": taken,
            "passes": carry["passes"] + active,
            "drafts": carry["drafts"] + jnp.stack([drafted, reached, agree]),
            "placed": placed,
            "tokens": write(carry["tokens"], tokens.T, column, 0),
            "logps": write(carry["logps"], logps.T, column, 0),
            "recent": [self.placement.layer(layer) for layer in recent],
        }

    def _sampled(self, logits, state, places):
        """Samples a token for each of `places`, `(slots, width)`.

        Returns tokens and their log-probabilities, of the same shape.
        """
        slots, width = places.shape
        names = ("keys", "temperature", "top_k", "top_p", "min_p")
        rows = {
            name: jnp.repeat(state[name], width, axis=0)
            for name in names
            if name in state
        }
        tokens, logps = sample(logits, positions=places.reshape(-1), **rows)
        # As in `_decode`.
        tokens = jax.lax.optimization_barrier(tokens)
        return tokens.reshape(slots, width), logps.reshape(slots, width)
