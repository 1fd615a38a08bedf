"""Samples that are interrupted by updates of the weights and resumed."""

import collections
import dataclasses

import numpy as np

from keras_posttrain.rollout.request import Completion, content_of


def generate_whole(engine, requests, wait):
    """Samples complete completions, resuming them after interruptions.

    An interrupted sample resumes from its tokens, whose keys and values are
    recomputed with the new weights. The log-probability of a token is that
    under the weights that sampled it.

    The requests must have seeds. `wait` is called after each interruption and
    returns when the engine may sample again.
    """
    parts = [[[] for _ in range(r.num_generations)] for r in requests]
    # Requests that are still to be sampled, each with the places of its
    # samples.
    pending = [
        (request, [(i, g) for g in range(request.num_generations)])
        for i, request in enumerate(_numbered(requests))
    ]
    while pending:
        found = engine.generate([request for request, _ in pending])
        rest = []
        for (request, places), samples in zip(pending, found):
            for (i, g), completion in zip(places, samples):
                parts[i][g].append(completion)
            rest += unfinished(request, places, samples)
        pending = rest
        if pending:
            wait()
    return [[joined(pieces) for pieces in samples] for samples in parts]


def _numbered(requests):
    """Yields requests with `first_sample` set."""
    seen = collections.Counter()
    for r in requests:
        key = r.seed, r.token_ids, content_of(r.images)
        yield dataclasses.replace(r, first_sample=seen[key])
        seen[key] += r.num_generations


def unfinished(request, places, samples):
    """Returns requests for the rest of the interrupted samples."""
    cut = [c.finish_reason == "interrupted" for c in samples]
    if all(cut) and not any(c.token_ids for c in samples):
        return [(request, places)]
    return [
        (
            dataclasses.replace(
                request,
                token_ids=(*request.token_ids, *c.token_ids),
                num_generations=1,
                max_tokens=request.max_tokens - len(c.token_ids),
                drawn=request.drawn + len(c.token_ids),
                first_sample=request.first_sample + n,
            ),
            [place],
        )
        for n, (place, c) in enumerate(zip(places, samples))
        if cut[n]
    ]


def joined(pieces):
    """Concatenates the pieces of a sample."""
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    return Completion(
        [x for piece in pieces for x in piece.token_ids],
        np.concatenate([piece.per_token_logps for piece in pieces]),
        last.finish_reason,
        last.weight_version,
        np.concatenate([piece.token_versions for piece in pieces]),
    )
