"""Drafts of samples: tokens that are likely to follow, from known sequences.

A draft is what followed the last tokens of a sample where they occurred
before: in its own sequence, in the other samples of its prompt, or in those
of earlier calls. A pass of the model computes the last token and a draft of
it, and samples the token after each of them with the random key of its
position. Those up to the first one that the draft does not have are the
tokens that would have been sampled one by one.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from keras_posttrain.distribution import processes

# The tokens of a pass with drafts, a width: the last token and its draft. The
# first with which a pass has at most `MOST_TOKENS` tokens is taken: wide ones
# for few slots, and none for many.
WIDTHS = (8, 4)
MOST_TOKENS, MOST_TOKENS_ELSEWHERE = {"cpu": 32}, 512
# A draft follows the longest match of at most so many last tokens.
LONGEST_MATCH = 6
# The known sequences of a slot have room for so many times its tokens.
SOURCES = 4
# Samples of earlier calls that are kept: of a prompt, and tokens in all.
SAMPLES_KEPT, TOKENS_KEPT = 16, 2**24
# A pass over a number of tokens costs `1 + tokens / FREE_TOKENS` of one, until
# it has been measured: so many tokens take as long to compute as the weights
# take to read.
FREE_TOKENS, FREE_TOKENS_ELSEWHERE = {"cpu": 16}, 128
# A pass counts as measured after so many calls; the last ones count.
CALLS_MEASURED = 4
# The least gain for which drafts are used.
LEAST_GAIN = 1.1
# What is known of drafts that are accepted fades by this factor in a call.
FADES = 0.75
# Where measured times speak against drafts they are measured again, in one of
# so many calls.
MEASURED_AGAIN = 16
# Without drafts, those of so many slots are compared with what was sampled,
# at first in each call, then in fewer, down to one in `RAREST`.
COMPARED, RAREST = 8, 8

NOTHING, NO_TOKEN = -1, -2


def no_sources(slots, tokens):
    """Returns the arrays of `find` of slots of so many tokens, empty."""
    return {
        "sources": np.full((slots, SOURCES * tokens), NOTHING, "int32"),
        "suffix": np.full((slots, LONGEST_MATCH), NO_TOKEN, "int32"),
    }


def find(sources, suffix, count, xp=jnp):
    """Finds drafts.

    Args:
        sources: int32 array of shape `(slots, tokens)`, sequences, each with
            a -1 behind it. Of equal matches the last one is taken.
        suffix: int32 array of shape `(slots, n)`, the last tokens; those
            that do not exist are -2.
        count: int, the tokens of a draft.
        xp: `numpy` or `jax.numpy`.

    Returns:
        An int32 array of shape `(slots, count)`, -1 behind a draft.
    """
    width, longest = sources.shape[1], suffix.shape[1]

    def moved(by):
        before, after = max(by, 0), max(-by, 0)
        x = xp.pad(sources, ((0, 0), (before, after)), constant_values=NOTHING)
        return x[:, after : after + width]

    same = moved(-1) != NOTHING
    # A match whose draft is complete is better than an equal one.
    score = (moved(-count) != NOTHING).astype("int32")
    for i in range(longest):
        same = same & (moved(i) == suffix[:, longest - 1 - i, None])
        score = score + 2 * same
    columns = xp.arange(width, dtype="int32")
    best = xp.max(score, axis=1, keepdims=True)
    place = xp.max(xp.where(score == best, columns, -1), axis=1)
    index = place[:, None] + 1 + xp.arange(count, dtype="int32")
    found = xp.take_along_axis(sources, xp.minimum(index, width - 1), axis=1)
    usable = (index < width) & (found != NOTHING) & (best > 1)
    usable = xp.cumsum(~usable, axis=1) == 0
    return xp.where(usable, found, NOTHING)


def accept(drafts, sampled, stop, active, room):
    """Compares drafts with what was sampled after them.

    Args:
        drafts: int32 array of shape `(slots, width - 1)`.
        sampled: int32 array of shape `(slots, width)`, the tokens after the
            last one and after each of the draft.
        stop: int32 array, as of `samples.py:sampling_arrays`.
        active: bool array of shape `(slots,)`.
        room: int32 array of that shape, the most tokens to take.

    Returns:
        Tuple of arrays of that shape: how many of the sampled tokens are
        taken, whether the last of them is a stop token, and how many tokens
        of the draft are those sampled.
    """
    width = sampled.shape[1]
    agree = jnp.cumprod(drafts == sampled[:, :-1], axis=1, dtype="int32")
    agree = agree.sum(1, dtype="int32")
    is_stop = jnp.any(sampled[..., None] == stop[:, None], axis=2)
    places = jnp.arange(width, dtype="int32")
    first_stop = jnp.min(jnp.where(is_stop, places, width), axis=1)
    count = jnp.minimum(agree + 1, room)
    stopped = active & (first_stop < count)
    count = jnp.where(active, jnp.minimum(count, first_stop + 1), 0)
    return count, stopped, jnp.where(active, agree, 0)


@dataclasses.dataclass
class DraftCounts:
    """What became of drafts.

    Attributes:
        tokens, passes: ints, tokens sampled, and passes summed over slots.
        drafted, accepted: ints, tokens of drafts, and those that were sampled.
    """

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclasses.dataclass
class Plan:
    """How a call of the decoder drafts.

    Attributes:
        width: int, the tokens of a pass; 1 without drafts.
        arrays: dict of `sources` and `suffix`, as of `find`; empty without
            drafts.
        slots: list of ints, those whose drafts are compared with what is
            sampled without them.
        expected: int32 array, their drafts.
    """

    width: int = 1
    arrays: dict = dataclasses.field(default_factory=dict)
    slots: list = dataclasses.field(default_factory=list)
    expected: np.ndarray | None = None


class Drafts:
    """What an engine knows for drafts, and whether they pay.

    A call of the decoder drafts where that promises more tokens a second:
    from the drafts accepted lately, and from the seconds of a pass.
    """

    def __init__(self):
        platform = jax.default_backend()
        self.free_tokens = FREE_TOKENS.get(platform, FREE_TOKENS_ELSEWHERE)
        self.most_tokens = MOST_TOKENS.get(platform, MOST_TOKENS_ELSEWHERE)
        self.counts, self._is_read = DraftCounts(), False
        # The samples of each prompt, the prompts used last at the end.
        self._known, self._size = collections.OrderedDict(), 0
        # Tokens of drafts that were reached, and those accepted.
        self._reached = self._accepted = 0.0
        # Programs that were called, and seconds of a pass by its slots and
        # its width: all of them, and those by which widths are chosen.
        self._programs = set()
        self._seconds = collections.defaultdict(list)
        self._measured = {}
        # Calls of the decoder, and in one of how many drafts are compared.
        self._calls, self._every = 0, 1

    def begin(self):
        """Begins a call of the engine, at the same time in all processes."""
        if self._is_read:
            self.counts, self._is_read = DraftCounts(), False
        if processes.count() > 1:
            # All choose by the times of the first, as of now.
            times = processes.from_first([*map(list, self._times().items())])
            self._measured = {tuple(key): seconds for key, seconds in times}
        self._every = 1

    def _times(self):
        return {
            key: min(seconds)
            for key, seconds in self._seconds.items()
            if len(seconds) >= CALLS_MEASURED
        }

    def width(self, slots):
        """Returns the width of passes of so many slots, 1 without drafts."""
        fits = (x for x in WIDTHS if slots * x <= self.most_tokens)
        return next(fits, 1)

    # What is known

    def remember(self, sample):
        """Keeps a sample that has ended."""
        ids = _completion(sample)
        of_prompt = self._known.setdefault(sample.prompt_key, {})
        self._known.move_to_end(sample.prompt_key)
        # An equal one becomes the newest.
        old = of_prompt.pop(ids.tobytes(), None)
        of_prompt[ids.tobytes()] = ids
        self._size += len(ids) if old is None else 0
        while len(of_prompt) > SAMPLES_KEPT:
            self._size -= len(of_prompt.pop(next(iter(of_prompt))))
        while self._size > TOKENS_KEPT:
            _, lost = self._known.popitem(last=False)
            self._size -= sum(map(len, lost.values()))

    def _sources(self, slots, occupants, tokens):
        """Returns a dict of `sources` and `suffix` of all slots."""
        found = no_sources(len(occupants), tokens)
        sources, suffix = found["sources"], found["suffix"]
        groups = collections.defaultdict(list)
        for s in occupants:
            if s is not None:
                groups[s.prompt_key].append(s)
        for slot in slots:
            sample = occupants[slot]
            own = sample.context
            tail = own[-LONGEST_MATCH:]
            suffix[slot, LONGEST_MATCH - len(tail) :] = tail
            # The others of the group are hardly further than this one: what
            # has ended says more of what follows.
            others = [
                _completion(s)
                for s in groups[sample.prompt_key]
                if s is not sample and s.token_ids
            ]
            others += self._known.get(sample.prompt_key, {}).values()
            texts = [own]
            room = sources.shape[1] - len(own) - 1
            # The last ones are taken first, and stay last.
            while others and room > 1:
                texts.insert(1, others.pop()[: room - 1])
                room -= len(texts[1]) + 1
            at = 0
            for ids in texts:
                sources[slot, at : at + len(ids)] = ids
                at += len(ids) + 1
        return found

    # What pays

    def plan(self, occupants, tokens):
        """Plans a call of the decoder.

        Args:
            occupants: list of the `Sample` in each slot, or `None`.
            tokens: int, the tokens of a slot.

        Returns:
            `Plan`.
        """
        active = [i for i, s in enumerate(occupants) if s is not None]
        slots = len(occupants)
        width = self.width(slots)
        self._calls += 1
        if self._pays(slots, width, self._rate):
            return Plan(width, self._sources(active, occupants, tokens))
        if self._calls % self._every or not self._pays(slots, width, 1.0):
            return Plan()
        chosen = active[:COMPARED]
        found = self._sources(
            range(len(chosen)), [occupants[i] for i in chosen], tokens
        )
        expected = find(**found, count=WIDTHS[0] - 1, xp=np)
        return Plan(1, {}, chosen, expected)

    @property
    def _rate(self):
        """Float, the share of drafted tokens that are accepted."""
        return self._accepted / max(self._reached, 1.0)

    def _pays(self, slots, width, rate):
        """Returns whether drafts pay where this share of them is right."""
        if width == 1:
            return False
        taken = sum(rate**i for i in range(width)) / LEAST_GAIN
        # Times of passes, as expected and as measured.
        wide, plain = (1 + slots * w / self.free_tokens for w in (width, 1))
        if taken < wide / plain:
            return False
        wide, plain = (self._measured.get((slots, w)) for w in (width, 1))
        if wide is None or plain is None or taken >= wide / plain:
            return True
        return self._calls % MEASURED_AGAIN == 0

    def learn(self, plan, sizes, out, seconds, steps):
        """Takes what a call of the decoder returned.

        Args:
            plan: `Plan` of the call.
            sizes: tuple of the slots and the tokens of each.
            out: dict of arrays, as of `SlotDecoder.decode`.
            seconds: float, those of the call.
            steps: int, as of `SlotDecoder.decode`.
        """
        taken = int(out["taken"].sum())
        self.counts.tokens += taken
        if plan.width > 1:
            drafted, reached, accepted = out["drafts"].sum(1).tolist()
            self.counts.passes += int(out["passes"].sum())
            self.counts.drafted += drafted
            self.counts.accepted += accepted
            self._count(reached, accepted)
            passes = int(out["passes"].max())
        else:
            self.counts.passes += taken
            self._compare(plan, out)
            passes = int(out["taken"].max())
        if passes * plan.width == steps:
            self._time(*sizes, plan.width, seconds / passes)

    def _time(self, slots, tokens, width, seconds):
        program = slots, tokens, width
        if program not in self._programs:
            # This call has compiled it.
            self._programs.add(program)
            return
        known = self._seconds[slots, width]
        known.append(seconds)
        del known[: -2 * CALLS_MEASURED]
        if processes.count() == 1:
            self._measured = self._times()

    def _count(self, reached, accepted):
        self._reached = FADES * self._reached + reached
        self._accepted = FADES * self._accepted + accepted

    def _compare(self, plan, out):
        """Counts the drafts that would have been accepted."""
        if not plan.slots:
            return
        reached = accepted = 0
        for slot, draft in zip(plan.slots, plan.expected):
            new = out["tokens"][: out["taken"][slot], slot][: len(draft)]
            agree = int(np.cumprod(new == draft[: len(new)]).sum())
            reached += min(agree + 1, len(new))
            accepted += agree
        self._count(reached, accepted)
        self._every = min(2 * self._every, RAREST)

    def metrics(self):
        """Returns metrics since they were read before, a dict of floats."""
        counts, self._is_read = self.counts, True
        return {
            "rollout/draft_acceptance": counts.accepted
            / max(counts.drafted, 1),
            "rollout/tokens_per_pass": counts.tokens / max(counts.passes, 1),
        }


def _completion(sample):
    """Returns what was sampled, behind the end of the prompt."""
    first = len(sample.prompt) - sample.settings.drawn
    return sample.context[max(first - LONGEST_MATCH, 0) :]
