"""Requests to vLLM and their results, in the process or by HTTP."""

import dataclasses
import hashlib

import numpy as np

# vLLM increases lower temperatures to this value.
LEAST_TEMPERATURE = 0.01


class EngineFailure(Exception):
    """Raised if an engine cannot be reached, has failed or was changed."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One request to vLLM: token ids and vLLM's sampling parameters."""

    token_ids: tuple
    params: dict


class Result:
    """The result of a job of `n` samples, complete or partial.

    Attributes:
        token_ids: list with a list of ints for each sample.
        logps: list with a list of floats for each sample.
        finish_reasons: list of str, or `None` for unfinished samples.
        versions: set of the versions of the weights that vLLM reported.
        prompt: list of `[(token, log-probability), ...]` for each token of
            the prompt, or `None`.
    """

    def __init__(self, n):
        self.token_ids = [[] for _ in range(n)]
        self.logps = [[] for _ in range(n)]
        self.finish_reasons = [None] * n
        self.versions = set()
        self.prompt = None


def add_output(result, output, key, on_tokens):
    """Adds a `RequestOutput` of vLLM to a `Result`."""
    if output.prompt_logprobs:
        result.prompt = [
            [(token, x.logprob) for token, x in (place or {}).items()]
            for place in output.prompt_logprobs
        ]
    for sample in output.outputs:
        new = list(sample.token_ids)
        result.token_ids[sample.index] += new
        if sample.logprobs is not None:
            result.logps[sample.index] += [
                place[token].logprob
                for token, place in zip(new, sample.logprobs)
            ]
        if sample.finish_reason is not None:
            result.finish_reasons[sample.index] = sample.finish_reason
        result.versions |= {s.version for s in sample.weight_versions or ()}
        if on_tokens is not None and new:
            on_tokens(key, sample.index, new)


def check_temperature(i, request):
    """Rejects a temperature that vLLM would change."""
    if 0 < request.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"vLLM increases lower temperatures to {LEAST_TEMPERATURE}. "
            "Use 0 (greedy) or more. Received: "
            f"temperature={request.temperature} of request {i}"
        )


def sampling_job(request):
    """Converts a `Request` to a `Job`; a greedy sample is computed once."""
    greedy = request.temperature == 0
    return Job(
        request.token_ids,
        {
            "n": 1 if greedy else request.num_generations,
            "temperature": float(request.temperature),
            "top_k": request.top_k or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "min_p": 0.0 if request.min_p is None else request.min_p,
            "max_tokens": request.max_tokens,
            "stop_token_ids": list(request.stop_token_ids),
            # Only the request's stop tokens end a sample.
            "ignore_eos": True,
            "seed": None if greedy else sample_seed(request),
            "logprobs": 0,
            "detokenize": False,
        },
    )


def sample_seed(request):
    """Returns the seed of a prompt's first sample; vLLM adds the index.

    Prompts with equal seeds get different random numbers.
    """
    ids = np.array(request.token_ids, "int64").tobytes()
    digest = hashlib.sha256(f"{request.seed}/".encode() + ids).digest()
    first = request.first_sample or 0
    return (int.from_bytes(digest[:8], "little") >> 2) + first


def scoring_job(token_ids, top_k, temperature):
    """Returns the `Job` that scores a sequence."""
    return Job(
        tuple(token_ids),
        {
            "n": 1,
            "temperature": temperature,
            "max_tokens": 1,
            "ignore_eos": True,
            "prompt_logprobs": top_k or 0,
            "seed": 0,
            "detokenize": False,
        },
    )


def score_arrays(job, prompt, top_k):
    """Converts a prompt's log-probabilities to the arrays of `Scores`."""
    count = len(job.token_ids)
    logps = np.zeros(count, np.float32)
    if top_k is None:
        top_ids = top_logps = None
    else:
        top_ids = np.zeros((count, top_k), np.int32)
        top_logps = np.zeros((count, top_k), np.float32)
    for i, token in enumerate(job.token_ids):
        if not i:
            continue
        logps[i] = dict(prompt[i])[token]
        if top_k is not None:
            best = sorted(prompt[i], key=lambda pair: -pair[1])[:top_k]
            top_ids[i], top_logps[i] = zip(*best)
    return logps, top_ids, top_logps
