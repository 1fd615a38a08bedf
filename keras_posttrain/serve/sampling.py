"""Requests for samples, from the weights of any adapter."""

import dataclasses
import secrets

import numpy as np

from keras_posttrain.rollout import Request
from keras_posttrain.serve.jobs import Reply
from keras_posttrain.serve.refused import Refused, field
from keras_posttrain.serve.wire import PROTO, read_prompt, sample_response

MAX_TOP = 100
# What the client reads as no log-probability in a table of them.
NO_LOGP = -99999.0


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """A prompt with everything that is asked for.

    Attributes:
        request: `kpt.rollout.Request`.
        stop_texts: tuple of strings; samples end with the first of them.
        has_prompt_logps: bool.
        last_n: int or `None`, tokens of the prompt to score, `None` for all.
        prompt_top, sample_top: ints, numbers of most probable tokens to
            return for each token.
    """

    request: Request
    stop_texts: tuple
    has_prompt_logps: bool
    last_n: int | None
    prompt_top: int
    sample_top: int


def read_request(body, tokenizer, context_length, vocabulary_size):
    """Reads a `SampleRequest` of the JSON of a request."""
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
        if body.get(name):
            raise Refused(f"This server does not support `{name}`.")
    prompt = read_prompt(body)
    params = field(body, "sampling_params", dict)
    room = context_length - len(prompt)
    max_tokens = field(params, "max_tokens", int, room)
    if not prompt or max_tokens < 1 or max_tokens > room:
        raise Refused(
            f"A prompt and its samples have up to {context_length} tokens "
            f"together, each at least one. Received: {len(prompt)} tokens "
            f"and max_tokens={max_tokens}. Lower `max_tokens`, or start the "
            "server with a larger --sequence-length."
        )
    wrong = [x for x in prompt if not 0 <= x < vocabulary_size]
    if wrong:
        raise Refused(
            f"Token ids must be in [0, {vocabulary_size}), the model's "
            f"vocabulary. Received: {wrong[0]}"
        )
    stop_ids, stop_texts = _stops(params.get("stop"), tokenizer)
    top_k = field(params, "top_k", int, -1)
    top_p = field(params, "top_p", float, 1.0)
    last_n = field(body, "prompt_logprobs_last_n", int, None)
    if last_n is not None and not 1 <= last_n < len(prompt):
        raise Refused(
            "`prompt_logprobs_last_n` must be from 1 to the prompt's tokens "
            f"less one. Received: {last_n}"
        )
    seed = field(params, "seed", int, secrets.randbits(31))
    request = Request(
        prompt,
        num_generations=field(body, "num_samples", int, 1),
        max_tokens=max_tokens,
        temperature=field(params, "temperature", float, 1.0),
        top_k=top_k if top_k > 0 else None,
        top_p=top_p if top_p < 1 else None,
        stop_token_ids=stop_ids,
        seed=seed % 2**31,
    )
    return SampleRequest(
        request,
        stop_texts,
        bool(body.get("prompt_logprobs")),
        last_n,
        _top(body, "topk_prompt_logprobs", vocabulary_size),
        _top(body, "topk_sample_logprobs", vocabulary_size),
    )


def _top(body, name, vocabulary_size):
    value, most = field(body, name, int, 0), min(MAX_TOP, vocabulary_size)
    if not 0 <= value <= most:
        raise Refused(
            f"`{name}` must be from 0 to {most}. Received: {name}={value}"
        )
    return value


def _stops(stop, tokenizer):
    """Returns the token ids and the texts that end samples."""
    if stop is None:
        return tuple(tokenizer.stop_token_ids), ()
    stop = [stop] if isinstance(stop, str) else stop
    if isinstance(stop, list):
        if all(type(x) is int for x in stop):
            return tuple(stop), ()
        if all(isinstance(x, str) and x for x in stop):
            return (), tuple(stop)
    raise Refused(
        "`stop` must be a string, a list of strings or a list of token ids. "
        f"Received: stop={stop!r:.200}",
        422,
    )


class Sampler:
    """Samples from the weights of one adapter after the other.

    Args:
        engine: `kpt.rollout.NativeRollout` with a task.
        tokenizer: `kpt.Tokenizer`.
    """

    def __init__(self, engine, tokenizer):
        self.engine, self.tokenizer = engine, tokenizer

    def run(self, first, queue):
        """Samples for a job, and for those of the same weights that come.

        They join the running batch. Returns when another job waits.

        Args:
            first: `SampleJob`.
            queue: `jobs.Queue`.
        """
        try:
            self.engine.set_weights(first.weights.load())
        except BaseException as error:  # noqa: BLE001 - the client is told
            first.future.set_exception(error)
            return
        prompts = {}
        with self.engine.session() as session:
            waiting, new = 0, [first]
            while True:
                try:
                    prompts |= self._score_prompts(new)
                except Exception as error:  # noqa: BLE001 - clients are told
                    for job in new:
                        job.future.set_exception(error)
                    new = []
                waiting += sum(
                    self._submit(job, session, queue) for job in new
                )
                done, new = queue.next_of(first.weights, bool(waiting))
                waiting -= len(done)
                finished = [
                    self._finish(job, future, prompts.pop(job, None))
                    for job, future in done
                ]
                # A session that has failed takes no more requests.
                is_over = not all(finished) or not (done or new)
                if is_over and not waiting and not new:
                    return

    def _submit(self, job, session, queue):
        """Returns whether the request of a job is being sampled."""
        try:
            future = session.submit(job.request.request)
        except Exception as error:  # noqa: BLE001 - the client is told
            job.future.set_exception(error)
            return False
        future.add_done_callback(lambda found: queue.sampled(job, found))
        return True

    def _score_prompts(self, jobs):
        """Returns the scores of prompts by their job, a dict."""
        found = {}
        for top in {job.request.prompt_top for job in jobs}:
            asking = [
                job
                for job in jobs
                if job.request.prompt_top == top
                and (job.request.has_prompt_logps or top)
            ]
            if asking:
                prompts = [list(x.request.request.token_ids) for x in asking]
                scores = self.engine.score(prompts, top_k=top or None)
                found |= dict(zip(asking, scores))
        return found

    def _finish(self, job, future, scores):
        """Returns whether the job could be answered."""
        try:
            data = self._reply(job.request, future.result(), scores)
        except BaseException as error:  # noqa: BLE001 - the client is told
            job.future.set_exception(error)
            return False
        job.future.set_result(Reply(data, PROTO))
        return True

    def _reply(self, asked, completions, scores):
        found = []
        for completion in completions:
            ids, logps = completion.token_ids, completion.per_token_logps
            is_stopped = completion.finish_reason == "stop"
            end = self._end(ids, asked.stop_texts)
            if end is not None:
                ids, logps, is_stopped = ids[:end], logps[:end], True
            found.append([ids, logps, is_stopped, None])
        if asked.sample_top:
            prompt = list(asked.request.token_ids)
            scored = self.engine.score(
                [prompt + list(x[0]) for x in found], top_k=asked.sample_top
            )
            for sequence, each in zip(found, scored):
                first = len(prompt)
                sequence[3] = each.top_ids[first:], each.top_logps[first:]
        if scores is None:
            return sample_response(found)
        known = np.arange(len(scores.per_token_logps))
        first = 1 if asked.last_n is None else len(known) - asked.last_n
        logps = np.where(known >= first, scores.per_token_logps, np.nan)
        top = None
        if asked.prompt_top:
            is_known = known[:, None] >= first
            top = (
                np.where(is_known, scores.top_ids, 0),
                np.where(is_known, scores.top_logps, NO_LOGP),
            )
        if not asked.has_prompt_logps:
            logps = None
        return sample_response(found, logps, top)

    def _end(self, token_ids, texts):
        """Returns the tokens up to the first of some texts, or `None`."""

        def has(count):
            text = self.tokenizer.decode(
                token_ids[:count], skip_special_tokens=False
            )
            return any(stop in text for stop in texts)

        if not texts or not has(len(token_ids)):
            return None
        low, high = 0, len(token_ids)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if has(middle) else (middle, high)
        return high
