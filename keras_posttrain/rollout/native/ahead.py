"""The sizes of a run's programs, and their compilation ahead of need.

Each size of the engine's cache and of the prompts computed together has
programs of its own. Those of a run follow from what it will ask for, not from
what it has asked for so far: a run that resumes has the same.
"""

import dataclasses

import numpy as np

from keras_posttrain.rollout.native import decoding
from keras_posttrain.rollout.native.drafts import no_sources
from keras_posttrain.rollout.native.prefix_groups import (
    GroupSizes,
    can_group,
    own_columns,
)
from keras_posttrain.rollout.native.samples import power_of_two
from keras_posttrain.rollout.native.schedule import (
    decoder_state,
    least_slots,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of programs.

    Attributes:
        num_parts: int, the decoders that run at the same time.
        slots: tuple of ints, of the cache of each, decreasing.
        tokens: tuple of ints, of a slot, increasing.
        prompts: tuple of ints, the tokens of rows of prompts.
        longest_prompt: int, its tokens.
        num_stop_ids, truncated: as of `Samples`.
        routes: bool, whether experts are recorded.
        widths: tuple of ints, those of passes with drafts, of each of
            `slots`; 1 without.
        groups: `GroupSizes`.
    """

    num_parts: int
    slots: tuple
    tokens: tuple
    prompts: tuple
    longest_prompt: int
    num_stop_ids: int
    truncated: bool
    routes: bool
    widths: tuple
    groups: GroupSizes


def sizes_for(decoder, expected, samples, most_slots, overlaps, drafts=None):
    """Chooses the `Sizes` of a run.

    Args:
        expected: `Expected`, of all decoders that run at the same time.
        samples: `Samples` of one of its rollouts.
        most_slots: function of the tokens of a slot to the most slots of the
            decoder.
        overlaps: bool, whether samples continue after an interruption, as
            prompts.
        drafts: `Drafts` or `None`.
    """
    parts = decoder.num_parts
    expected = expected.part(parts)
    settings = [s.settings for s in samples]
    shortest, longest = expected.prompt_lengths
    longest = max(longest, *(len(s.prompt) for s in samples))
    completion = max(r.max_tokens for r in settings)
    most = decoding.bucket(longest + completion + decoding.STEPS)
    groups = GroupSizes()
    if drafts is None and can_group(decoder.placement):
        members = -(-expected.samples // expected.prompts)
        groups = GroupSizes.of(expected.prompts, members, longest - 1)
    if overlaps:
        longest += completion
    tokens = [decoding.bucket(shortest + decoding.STEPS)]
    while tokens[-1] < most:
        tokens.append(min(decoding.bucket(2 * tokens[-1]), most))
    shards = decoder.placement.shards
    least = least_slots(decoder, drafts is not None)
    count = max(expected.samples, -(-len(samples) // parts))
    count = power_of_two(-(-count // shards)) * shards
    slots = [min(max(count, least), most_slots(most))]
    while slots[-1] > least:
        slots.append(max(power_of_two(slots[-1]) // 2, least))
    together = min(expected.samples if overlaps else expected.prompts, count)
    # Longer prompts are computed in pieces.
    most = min(-(-together * longest // shards), decoder.chunk)
    prompts = [64]
    while prompts[-1] < most:
        prompts.append(2 * prompts[-1])
    if decoder.is_recurrent or any(r.images is not None for r in settings):
        # They have more sizes: the prompts or the images of a row.
        prompts = []
    return Sizes(
        parts,
        tuple(slots),
        tuple(tokens),
        tuple(prompts),
        longest,
        samples.num_stop_ids,
        samples.truncated,
        any(r.return_routed_experts for r in settings),
        tuple(1 if drafts is None else drafts.width(n) for n in slots),
        groups,
    )


def lower(decoder, weights, sizes):
    """Lowers the programs of all sizes.

    Args:
        decoder: `SlotDecoder`, whose cache stays as it is.
        weights: `Weights`.
        sizes: `Sizes`.

    Yields:
        The `jax.stages.Lowered` of each program.
    """
    found = []
    other = decoder.lowering(found)
    other.longest_prompt = sizes.longest_prompt
    for slots, width in zip(sizes.slots, sizes.widths):
        state = decoder_state(
            [None] * slots, sizes.num_stop_ids, sizes.truncated
        )
        for tokens in sizes.tokens:
            other.allocate(slots, tokens)
            other.decode(weights, state, 0, routes=sizes.routes)
            if width > 1:
                more = state | no_sources(slots, tokens)
                other.decode(
                    weights, more, 0, routes=sizes.routes, width=width
                )
            own = own_columns(0)
            while sizes.groups.pays(slots, tokens, own):
                other.allocate(slots, tokens)
                grouping = sizes.groups.empty(slots, own)
                other.decode(
                    weights, state, 0, routes=sizes.routes, grouping=grouping
                )
                own = own_columns(own + 1)
            for fewer in sizes.slots:
                if fewer < slots:
                    other.allocate(slots, tokens)
                    other.resize(range(fewer), tokens)
            for more in sizes.tokens:
                if more > tokens:
                    other.allocate(slots, tokens)
                    other.resize(range(slots), more)
            other.allocate(slots, tokens)
            for length in sizes.prompts:
                for prompts, places in _prompts(decoder, sizes, length, slots):
                    other.prefill(weights, prompts, places, sizes.routes)
            if sizes.longest_prompt > decoder.chunk and tokens > decoder.chunk:
                _lower_pieces(other, weights, sizes.routes)
            yield from found
            found.clear()


def _lower_pieces(decoder, weights, routes):
    """Lowers what computes whole pieces of prompts and copies them."""
    piece = np.zeros(decoder.chunk, "int32")
    shards = decoder.placement.shards
    decoder.extend(
        weights, [0] * shards, [1] * shards, [piece] * shards, routes
    )
    for filled in decoding.fill_sizes(decoder.slots):
        decoder.copy([0] * filled, [0] * filled, decoder.tokens)


def _prompts(decoder, sizes, length, slots):
    """Yields prompts that make rows of a length, and lists of their slots.

    They are written to as many slots as each of `decoding.fill_sizes`.
    """
    size = min(length, sizes.longest_prompt, decoder.chunk)
    # Rows are at least half full.
    count = (length // 2 // size + 1) * decoder.placement.shards
    if count > slots:
        return
    prompts, places = [(0,) * size] * count, [[0]] * count
    for filled in decoding.fill_sizes(slots):
        if filled >= count:
            yield prompts, [[0] * (filled - count + 1), *places[1:]]
