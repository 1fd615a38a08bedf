"""The engine that an evaluation scores and samples with."""

import dataclasses
import weakref

from keras_posttrain.distribution import processes
from keras_posttrain.rollout import NativeRollout
from keras_posttrain.rollout.rollout import Rollout
from keras_posttrain.training import checks

# Tokens of the first call for an answer that a text may end. Each further
# call samples twice as many.
FIRST_TOKENS = 32


class EvaluationEngine:
    """An engine that has the current weights of a task.

    Weights are sent when they have changed since they were sent last. The
    engine is started where it does not run, and not stopped.

    Args:
        task: `Task`.
        engine: `Rollout`, or `None` for the built-in engine.
    """

    def __init__(self, task, engine=None):
        if engine is not None and not isinstance(engine, Rollout):
            raise ValueError(
                "`engine` must be an engine such as "
                "`kpt.rollout.NativeRollout()`, or None. "
                f"Received: engine={engine!r}"
            )
        if processes.count() > 1:
            raise ValueError(
                "Harnesses run in one process. Received: "
                f"{processes.count()} processes. `export` the model and "
                "evaluate it in one."
            )
        self.task, self.engine = task, engine or NativeRollout()
        if self.engine.model is not task:
            self.engine.set_model(task)
        self._sent = None

    def sync(self):
        """Gives the engine the task's weights; returns the engine."""
        task, engine = self.task, self.engine
        checks.placed(task.causal_lm)
        checks.own_adapter(task.policy)
        run = getattr(task, "run", None)
        running = getattr(run, "is_running", False)
        if running and engine.overlaps:
            raise ValueError(
                "The engine samples ahead of training (`max_staleness`), so "
                "that its weights are not the current ones. Leave `engine` "
                "out, or pass another one."
            )
        arrays = [v.value for v in task.variables]
        sent = self._sent
        same = sent is not None and len(sent) == len(arrays)
        if same and all(s() is x for s, x in zip(sent, arrays)):
            return engine
        engine.start()
        engine.sync_weights()
        self._sent = [weakref.ref(x) for x in arrays]
        return engine

    def sample(self, requests, ends, progress=None):
        """Samples completions that a text may end.

        Args:
            requests: list of `Request`s of one sample each, with seeds.
            ends: list of functions, one a request, from the new tokens, a
                list of ints, to how many of them are kept, or `None` if
                nothing has ended them.
            progress: function called with 1 for each that has ended.

        Returns:
            A list of pairs: a list of ints, and `"stop"` or `"length"`.
        """
        engine = self.sync()
        found, tokens = [None] * len(requests), [[] for _ in requests]
        pending, count = range(len(requests)), FIRST_TOKENS
        while pending:
            part = [rest_of(requests[i], tokens[i], count) for i in pending]
            for i, [completion] in zip(pending, engine.generate(part)):
                tokens[i] += completion.token_ids
                kept = ends[i](tokens[i])
                is_full = len(tokens[i]) >= requests[i].max_tokens
                if kept is not None:
                    found[i] = tokens[i][:kept], "stop"
                elif completion.finish_reason == "stop" or is_full:
                    found[i] = tokens[i], completion.finish_reason
                if found[i] is not None and progress is not None:
                    progress(1)
            pending = [i for i in pending if found[i] is None]
            count *= 2
        return found


def rest_of(request, tokens, count):
    """Returns a request for the next `count` tokens of a sample."""
    return dataclasses.replace(
        request,
        token_ids=(*request.token_ids, *tokens),
        max_tokens=min(count, request.max_tokens - len(tokens)),
        drawn=len(tokens),
        first_sample=request.first_sample or 0,
    )


class EndOfText:
    """Finds the first token with which a text has one of some words.

    Args:
        tokenizer: `Tokenizer`.
        texts: list of strings.
    """

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts = tokenizer, texts
        # Tokens that are known not to end it.
        self.seen = 0

    def __call__(self, token_ids):
        start, self.seen = self.seen, len(token_ids)
        if not self._has_ended(token_ids):
            return None
        return next(
            count
            for count in range(start + 1, len(token_ids) + 1)
            if self._has_ended(token_ids[:count])
        )

    def _has_ended(self, token_ids):
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return any(end in text for end in self.texts)
