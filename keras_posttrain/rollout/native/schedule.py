"""Continuous batching: assigns samples to the slots of a decoder."""

import bisect
import collections
import dataclasses
import math
import time

import numpy as np

from keras_posttrain.rollout.native import decoding
from keras_posttrain.rollout.native.prefix_groups import (
    MOST_READ,
    GroupSizes,
    can_group,
    find,
)
from keras_posttrain.rollout.native.samples import (
    check_finite,
    power_of_two,
    sampling_arrays,
)

# While samples are waiting, a call of the decoder ends when this share of the
# slots is free.
REFILL = 1 / 8
# Without waiting samples, the slots are reduced once this many times fewer
# would hold the active ones, down to `LEAST_SLOTS`: each number of slots needs
# another program.
SHRINK = 2
LEAST_SLOTS = 8
# Steps of a call whose tokens are streamed.
STREAMED_STEPS = 8
# In a call of `generate`, a prompt that begins like another one is computed
# with others, unless they share this many tokens.
LEAST_SHARED = 64


class Prefixes:
    """Sequences of token ids, searched by how they begin.

    They are sorted, as bytes: the one that shares most with another sequence
    is next to the place where that one belongs.
    """

    def __init__(self):
        self._sorted = []

    def __len__(self):
        return len(self._sorted)

    def add(self, tokens):
        """Adds a sequence, an int array of one axis."""
        bisect.insort(self._sorted, _bytes(tokens))

    def longest(self, tokens):
        """Counts the first tokens shared with one of the sequences."""
        place = bisect.bisect_left(self._sorted, _bytes(tokens))
        found = 0
        for other in self._sorted[max(place - 1, 0) : place + 1]:
            other = np.frombuffer(other, ">i4")
            width = min(len(other), len(tokens))
            same = other[:width] == tokens[:width]
            found = max(found, width if same.all() else int(same.argmin()))
        return found


def least_slots(decoder, drafts=False):
    """Returns the slots below which a `SlotDecoder` is not shrunk.

    With drafts each slot has several tokens of a pass, so that fewer matter.
    Decoders that run at the same time have so few together.
    """
    least = 1 if drafts else max(LEAST_SLOTS // decoder.num_parts, 1)
    return max(decoder.placement.shards, least)


def decoder_state(samples, num_stop_ids, truncated):
    """Returns the state of a `SlotDecoder` in which no slot is active.

    The arguments are those of `sampling_arrays`.
    """
    slots = len(samples)
    return {
        "token": np.zeros(slots, "int32"),
        "length": np.zeros(slots, "int32"),
        "remaining": np.zeros(slots, "int32"),
        "active": np.zeros(slots, bool),
        **sampling_arrays(samples, num_stop_ids, truncated),
    }


def _bytes(tokens):
    return np.asarray(tokens, ">i4").tobytes()


@dataclasses.dataclass
class Counts:
    """The tokens whose keys and values were computed.

    Attributes:
        computed: int, all of them. The last token of a conversation is never
            computed, since nothing follows it. That of a prompt is computed
            for each of its samples.
        recomputed: int, those among them that had been computed before: for
            a slot that another conversation then took, or that cannot go back
            to them.
    """

    computed: int = 0
    recomputed: int = 0


@dataclasses.dataclass(eq=False)
class Admission:
    """A sample that gets a slot.

    Attributes:
        slot: int.
        tokens: int32 array, those whose keys and values it needs.
        images: `Images` among them, or `None`.
        start: int, how many of them exist already.
        source: int, the slot that has these, or `None` for its own.
        stops: set of ints, numbers of its tokens after which others copy
            them, where they cannot be copied later.
        stage: int: sources of earlier stages must be complete.
    """

    slot: int
    tokens: np.ndarray
    images: object
    start: int
    source: int | None
    stops: set = dataclasses.field(default_factory=set)
    stage: int = 0

    @property
    def least_stop(self):
        """Int, the least of its tokens that it can stop after."""
        if self.images is None:
            return self.start + 1
        # They are computed with all that is before them.
        return max(self.start, int(self.images.places.max())) + 1


def in_stages(admissions):
    """Divides admissions at their stops, and orders all parts by stages.

    In a stage slots are copied before tokens are computed: a slot is copied
    after one part and before the next.

    Args:
        admissions: iterable of `Admission`s; what one copies from another
            comes later.

    Returns:
        A list of `Admission`s without stops.
    """
    parts, done = [], {}
    for a in admissions:
        # The stages after which the source has so many tokens.
        stages = done.get(a.source, {})
        stage = stages.get(a.start, max(stages.values(), default=-1)) + 1
        start, source, done[a.slot] = a.start, a.source, {}
        for stop in sorted(a.stops | {len(a.tokens)}):
            tokens = a.tokens[:stop]
            parts.append(
                Admission(a.slot, tokens, a.images, start, source, stage=stage)
            )
            done[a.slot][stop] = stage
            start, source, stage = stop, None, stage + 1
    return parts


class Schedule:
    """The samples of a call of `generate` or of a session, and their slots.

    Args:
        decoder: `SlotDecoder`.
        most_slots: function of the tokens of a slot to the most slots.
        sizes: `Sizes` that programs were compiled for, or `None`.
        least_shared: int, the tokens from which on the beginning of a prompt
            is copied from another slot.
        drafts: `Drafts` or `None`.
        on_tokens, progress: as of `Rollout.generate`; `progress` is called
            with 1 when a sample has ended.
    """

    def __init__(
        self, decoder, most_slots, *, sizes=None, least_shared=1,
        drafts=None, on_tokens=None, progress=None,
    ):  # fmt: skip
        self.decoder, self.most_slots = decoder, most_slots
        self.sizes = sizes
        self.least_shared = least_shared
        self.on_tokens, self.progress = on_tokens, progress
        self.queue = collections.deque()
        self.counts = Counts()
        self.drafts = drafts
        self.least_slots = least_slots(decoder, drafts is not None)
        # Fixed once they have grown, so that few programs are compiled.
        self.most_tokens = sizes.tokens[-1] if sizes else 0
        self.num_stop_ids = sizes.num_stop_ids if sizes else 1
        self.truncated = sizes.truncated if sizes else False
        # Whether the experts of tokens are recorded.
        self.records_routes = sizes.routes if sizes else False
        # The contents of slots that were overwritten, where they are counted.
        self._lost = Prefixes() if least_shared == 1 else None
        # Those of samples with the same prompt.
        self.groups = sizes.groups if sizes else GroupSizes()
        self._clock = 0
        self._begin()

    def _begin(self):
        # The sample in each slot, or `None`.
        self.occupants = []
        # The tokens in the cache (images by their content), -1 behind them,
        # and their number. Those sampled are added when the sample ends.
        self.held = np.zeros((0, 0), np.int32)
        self.lengths = np.zeros(0, np.int64)
        # The experts of the tokens in each slot, where they are recorded.
        self.routes = []
        # Whether a conversation may continue, and when a slot was last used.
        self.kept = np.zeros(0, bool)
        self.used = np.zeros(0, np.int64)

    def add(self, samples):
        """Adds samples that wait for a slot, a `Samples`."""
        self.queue += samples
        if not self.sizes:
            # Conversations are added one by one.
            active = [s for s in self.occupants if s is not None]
            more = GroupSizes.of_samples([*self.queue, *active])
            self.groups = self.groups.joined(more)
        longest = max((s.end for s in samples), default=0)
        tokens = decoding.bucket(longest + decoding.STEPS)
        self.most_tokens = max(self.most_tokens, tokens)
        self.num_stop_ids = max(self.num_stop_ids, samples.num_stop_ids)
        self.truncated |= samples.truncated
        wanted = any(s.settings.return_routed_experts for s in samples)
        if wanted and not self.records_routes and self.occupants:
            # Nothing is known of the tokens that are here.
            self.clear()
        self.records_routes |= wanted

    @property
    def active(self):
        return [i for i, s in enumerate(self.occupants) if s is not None]

    @property
    def is_busy(self):
        """Bool, whether samples are waiting or being sampled."""
        return bool(self.queue) or any(s is not None for s in self.occupants)

    def advance(self, weights, version, keep=False):
        """Samples some tokens and returns the samples that have ended.

        Args:
            weights: `Weights` to sample from.
            version: int, theirs.
            keep: bool, whether conversations may continue.
        """
        admitted = self._admit()
        # Resizing may move samples to other slots.
        moved = self._resize()
        self._compute(weights, admitted, moved)
        return self._step(weights, version, keep)

    def release(self, token_ids):
        """Lets other conversations take the slots of one."""
        length = len(token_ids)
        overlap = self._overlap(np.asarray(token_ids, np.int32), {})
        ours = overlap == self.lengths
        self.kept[ours & (self.lengths <= length)] = False

    def clear(self):
        """Empties the cache; samples in progress wait for a slot again."""
        self.queue.extendleft(
            reversed([s for s in self.occupants if s is not None])
        )
        self.decoder.free()
        if self._lost is not None:
            # What other weights compute anew counts as new.
            self._lost = Prefixes()
        self._begin()

    # Slots

    def _shared(self, tokens):
        """Counts the tokens with which each slot's begin as `tokens` do."""
        width = min(len(tokens), self.held.shape[1])
        same = self.held[:, :width] == tokens[:width]
        if not width:
            return np.zeros(len(self.held), np.int64)
        return np.where(same.all(1), width, same.argmin(1))

    def _overlap(self, tokens, admitted):
        """Counts the tokens that each slot has of the first of `tokens`.

        `admitted` is a dict of the `Admission`s of the slots that are not
        computed yet. They can stop where others copy them.

        The state of a recurrent layer is that after all tokens of its slot,
        and a layer with a sliding window has the last ones of a long slot: if
        `tokens` continue differently, none of them are counted.
        """
        found = self._shared(tokens)
        usable = (found == self.lengths) | (
            self.lengths <= self.decoder.rewindable
        )
        for slot in np.flatnonzero(~usable):
            if (a := admitted.get(slot)) is not None:
                usable[slot] = found[slot] >= max(LEAST_SHARED, a.least_stop)
        return np.where(usable, found, 0)

    @property
    def _is_rewindable(self):
        """Bool, whether each slot can go back to earlier tokens."""
        return self.decoder.tokens <= self.decoder.rewindable

    def _admit(self):
        """Gives waiting samples slots: returns a list of `Admission`s."""
        free = {i for i, s in enumerate(self.occupants) if s is None}
        admitted = {}
        while self.queue:
            content, images = self.queue[0].content[:-1], self.queue[0].images
            slot, source, start = self._choose(free, content, images, admitted)
            if slot is None or self._loses(slot, source, start):
                if more := self._grow():
                    free |= more
                    continue
            if slot is None:
                break
            sample = self.queue.popleft()
            free.remove(slot)
            other = admitted.get(source)
            if other is not None and start < len(other.tokens):
                if len(other.tokens) > self.decoder.rewindable:
                    other.stops.add(start)
            self.occupants[slot] = sample
            self._count(slot, content, start, source)
            self._hold(slot, content)
            self.kept[slot] = False
            tokens = content if images is None else sample.context[:-1]
            admitted[slot] = Admission(slot, tokens, images, start, source)
        return in_stages(admitted.values())

    def _choose(self, free, tokens, images, admitted):
        """Chooses a slot for tokens.

        Args:
            free: set of ints, slots without a sample.
            tokens: int32 array, as of `Sample.content`.
            images: `Images` among them, or `None`.
            admitted: as of `_overlap`.

        Returns:
            Tuple `(slot, source, start)` as of `Admission`; the slot is
            `None` where none is free.
        """
        if not free:
            return None, None, 0
        overlap = self._overlap(tokens, admitted)
        if images is not None:
            # Behind other tokens only text is computed.
            overlap[overlap <= images.places.max()] = 0
        free = np.array(sorted(free))
        lengths, shared = self.lengths[free], overlap[free]
        # A slot all of whose tokens these continue, such as those of the same
        # conversation.
        whole = free[(shared == lengths) & self._is_worth(shared, tokens)]
        source = int(overlap.argmax())
        if len(whole):
            slot = int(whole[overlap[whole].argmax()])
            if overlap[source] == overlap[slot]:
                return slot, None, int(overlap[slot])
        # Empty ones first, then those used longest ago.
        order = self.used[free], self.kept[free], lengths > 0
        slot = int(free[np.lexsort(order)[0]])
        if not self._is_worth(overlap[source], tokens):
            return slot, None, 0
        own = overlap == overlap[source]
        reusable = free[own[free] & ~self.kept[free]]
        if own[slot] or len(reusable):
            slot = slot if own[slot] else int(reusable[0])
            return slot, None, int(overlap[slot])
        return slot, source, int(overlap[source])

    def _is_worth(self, shared, tokens):
        """Returns whether so many tokens, an int or an array, are reused."""
        return (shared > 0) & (
            (shared >= self.least_shared) | (shared == len(tokens))
        )

    def _count(self, slot, tokens, start, source):
        """Counts what is computed, and what a slot loses."""
        kept = start if source is None else 0
        self.counts.computed += len(tokens) - start
        if self._lost is None:
            return
        if self.lengths[slot] > kept:
            self._lost.add(self.held[slot, : self.lengths[slot]])
        before = self._shared(tokens).max(initial=0)
        before = max(int(before), self._lost.longest(tokens))
        self.counts.recomputed += max(before - start, 0)

    def _hold(self, slot, tokens):
        """Records the tokens of a slot."""
        more = len(tokens) - self.held.shape[1]
        if more > 0:
            columns = ((0, 0), (0, max(more, self.held.shape[1])))
            self.held = np.pad(self.held, columns, constant_values=-1)
        self.held[slot] = -1
        self.held[slot, : len(tokens)] = tokens
        self.lengths[slot] = len(tokens)
        self._clock += 1
        self.used[slot] = self._clock

    def _loses(self, slot, source, start):
        """Returns whether a conversation that may continue loses a slot."""
        begins = start if source is None else 0
        return self.kept[slot] and self.lengths[slot] > begins

    def _grow(self):
        """Adds slots for what is waiting; returns a set of their numbers."""
        count, shards = len(self.occupants), self.decoder.placement.shards
        wanted = len(self.queue) + len(self.active) + int(self.kept.sum())
        wanted = power_of_two(-(-wanted // shards)) * shards
        if self.sizes:
            wanted = max(wanted, self.sizes.slots[-1])
        more = min(wanted, self.most_slots(self.most_tokens)) - count
        if more <= 0:
            return set()
        self.occupants += [None] * more
        self.routes += [None] * more
        pad = (0, more)
        self.held = np.pad(self.held, (pad, (0, 0)), constant_values=-1)
        self.lengths, self.kept, self.used = (
            np.pad(x, pad) for x in (self.lengths, self.kept, self.used)
        )
        return set(range(count, count + more))

    def _resize(self):
        """Resizes the cache for the next steps of the active samples.

        Returns:
            A list of the slots' numbers before, or `None` if all stay.
        """
        decoder, active = self.decoder, self.active
        used = set(active) | set(np.flatnonzero(self.kept).tolist())
        need = decoding.STEPS + max(self._length(i) for i in used)
        slots, tokens = len(self.occupants), decoder.tokens
        if decoder.cache is None:
            decoder.allocate(slots, self._tokens(need, 0))
            return None
        if need > tokens:
            tokens = self._tokens(need, tokens)
        index = list(range(slots))
        fewer = max(power_of_two(len(used)), self.least_slots)
        shrinks = fewer < slots and len(used) * SHRINK <= slots
        if shrinks and not self.queue:
            first = sorted(used)
            index = (first + [i for i in index if i not in used])[:fewer]
        if tokens == decoder.tokens and index == list(range(decoder.slots)):
            return None
        # A new slot has anything in it.
        kept = [i if i < decoder.slots else 0 for i in index]
        if self.sizes and len(kept) != decoder.slots:
            # Each program sets one of the two sizes, so that there are few.
            decoder.resize(kept, decoder.tokens)
            kept = list(range(len(kept)))
        if tokens != decoder.tokens or kept != list(range(decoder.slots)):
            decoder.resize(kept, tokens)
        self.occupants = [self.occupants[i] for i in index]
        self.routes = [self.routes[i] for i in index]
        self.held, self.lengths = self.held[index], self.lengths[index]
        self.kept, self.used = self.kept[index], self.used[index]
        return index

    def _tokens(self, need, now):
        """Returns the tokens that a slot of `now` gets for those it needs."""
        if self.sizes and need <= self.sizes.tokens[-1]:
            return min(x for x in self.sizes.tokens if x >= need)
        most = max(self.most_tokens, decoding.bucket(need))
        return min(decoding.bucket(max(need, 2 * now)), most)

    def _length(self, slot):
        """Returns the tokens in the cache: all but an active slot's last."""
        s = self.occupants[slot]
        return int(self.lengths[slot]) if s is None else s.length - 1

    # Prompts

    def _compute(self, weights, admitted, moved):
        """Copies and computes what the admitted samples' slots lack."""
        place = {old: new for new, old in enumerate(moved or ())}
        first = {a.slot: a for a in admitted if not a.start}
        # Equal prompts are computed once and written to several slots.
        twins = collections.defaultdict(list)
        for a in admitted:
            # In the first stage the source's tokens are those of before.
            if a.stage and a.source in first and a.start == len(a.tokens):
                if len(first[a.source].tokens) == a.start:
                    twins[a.source].append(a)
        rest = set(admitted).difference(*twins.values())
        for stage in range(1 + max((a.stage for a in rest), default=-1)):
            part = [a for a in admitted if a in rest and a.stage == stage]
            copied = [a for a in part if a.source is not None]
            if copied:
                sources = [place.get(a.source, a.source) for a in copied]
                slots = [place.get(a.slot, a.slot) for a in copied]
                longest = max(a.start for a in copied)
                self.decoder.copy(sources, slots, longest)
                for source, slot in zip(sources, slots):
                    self.routes[slot] = self.routes[source]
            part = [a for a in part if a.start < len(a.tokens)]
            whole = [a for a in part if not a.start]
            if whole:
                slots = [
                    [place.get(b.slot, b.slot) for b in (a, *twins[a.slot])]
                    for a in whole
                ]
                found = self.decoder.prefill(
                    weights,
                    [tuple(a.tokens.tolist()) for a in whole],
                    slots,
                    self.records_routes,
                    [a.images for a in whole],
                )
                for many, routes in zip(slots, found):
                    for slot in many:
                        self.routes[slot] = routes
            longer = [a for a in part if a.start]
            if longer:
                slots = [place.get(a.slot, a.slot) for a in longer]
                found = self.decoder.extend(
                    weights,
                    slots,
                    [a.start for a in longer],
                    [a.tokens[a.start :] for a in longer],
                    self.records_routes,
                )
                for a, slot, routes in zip(longer, slots, found):
                    self._add_routes(slot, a.start, routes)

    def _add_routes(self, slot, start, routes):
        """Records the experts of a slot's tokens from `start` on."""
        if self.records_routes:
            # Nothing was computed for a prompt of one token.
            before = [self.routes[slot][:start]] if start else []
            self.routes[slot] = np.concatenate([*before, routes])

    # Steps

    def _state(self):
        state = decoder_state(
            self.occupants, self.num_stop_ids, self.truncated
        )
        state["length"] = self.lengths.astype("int32")
        for i in self.active:
            s = self.occupants[i]
            state["token"][i] = (s.token_ids or s.prompt)[-1]
            state["length"][i] = self._length(i)
            state["remaining"][i] = s.settings.max_tokens - len(s.token_ids)
            state["active"][i] = True
        return state

    def _step(self, weights, version, keep):
        self._make_room()
        active, slots = self.active, len(self.occupants)
        if self.queue:
            floor = max(len(active) - max(int(slots * REFILL), 1), 0)
        else:
            floor = slots // SHRINK if slots > self.least_slots else 0
            floor = floor if floor < len(active) else 0
        steps = STREAMED_STEPS if self.on_tokens else decoding.STEPS
        out = self._decode(weights, floor, steps)
        samples = [self.occupants[i] for i in active]
        return [
            s
            for i, s in zip(active, samples)
            if self._take(i, out, version, keep)
        ]

    def _decode(self, weights, floor, steps):
        """Calls the decoder, with drafts where they pay."""
        settings, state = [floor, steps, self.records_routes], self._state()
        if self.drafts is None:
            grouping = self._grouping(state["length"])
            return self.decoder.decode(
                weights, state, *settings, grouping=grouping
            )
        plan = self.drafts.plan(self.occupants, self.decoder.tokens)
        start = time.perf_counter()
        out = self.decoder.decode(
            weights, state | plan.arrays, *settings, plan.width
        )
        seconds = time.perf_counter() - start
        sizes = self.decoder.slots, self.decoder.tokens
        self.drafts.learn(plan, sizes, out, seconds, steps)
        return out

    def _grouping(self, lengths):
        """Returns the `Grouping` of the next call, or `None`."""
        if not can_group(self.decoder.placement):
            return None
        tokens, slots = self.decoder.tokens, len(self.occupants)
        found = find(self.groups, self.occupants, lengths, tokens)
        if found is None:
            return None
        # What is read exists twice.
        fits = self.most_slots(tokens + math.ceil(MOST_READ * tokens))
        return found if fits >= slots else None

    def _make_room(self):
        """Gives up what the decoder overwrites: it writes to idle slots too,
        behind their tokens."""
        room = self.decoder.tokens - decoding.STEPS
        idle = np.array([s is None for s in self.occupants])
        short = idle & (self.lengths > room)
        rest = room if self._is_rewindable else 0
        self.lengths[short] = rest
        self.held[short, rest:] = -1

    def _take(self, slot, out, version, keep):
        """Adds a call's tokens to a slot's sample; returns if it has ended."""
        sample, count = self.occupants[slot], out["taken"][slot]
        ids = out["tokens"][:count, slot].tolist()
        logps = out["logps"][:count, slot]
        check_finite(sample.request, logps)
        if self.records_routes:
            routes = out["routes"][:count, slot]
            self._add_routes(slot, sample.length - 1, routes)
            sample.routes = self.routes[slot]
        sample.token_ids += ids
        sample.logps += logps.tolist()
        sample.versions += [version] * len(ids)
        self.counts.computed += len(ids)
        if self.on_tokens is not None and ids:
            self.on_tokens(sample.request, sample.generation, ids)
        if out["active"][slot]:
            if not self._is_rewindable:
                # It may no longer go back to the end of its prompt.
                self._hold(slot, sample.content[:-1])
            return False
        sample.finish(out["stopped"][slot])
        if self.drafts is not None:
            self.drafts.remember(sample)
        self.occupants[slot] = None
        self._hold(slot, sample.content[:-1])
        self.kept[slot] = keep
        if self.progress is not None:
            self.progress(1)
        return True
