import contextlib
import itertools

import keras_hub
import numpy as np

from keras_posttrain.data import chat
from keras_posttrain.models import guards

# Prompts and completions share a cache whose length is rounded up to this
# many tokens, so that a few lengths serve all calls.
LENGTH_MULTIPLE = 64


class Generator:
    """`task.generate` by KerasHub's engine.

    Args:
        task: `Task`.
    """

    def __init__(self, task):
        self.task = task
        self._sampler_key = None

    def __call__(self, prompts, *, max_tokens, stop_token_ids, seed,
                 return_token_ids, **sampling):  # fmt: skip
        task = self.task
        guards.check_generate(task.causal_lm)
        _check(max_tokens, **sampling)
        prompts, one = _as_list(prompts)
        ids = [self._prompt_ids(i, p) for i, p in enumerate(prompts)]
        if not return_token_ids:
            task._need_tokenizer("generate")
        if isinstance(stop_token_ids, str):
            if stop_token_ids != "auto":
                raise ValueError(
                    "`stop_token_ids` must be 'auto', None or ints. "
                    f"Received: stop_token_ids={stop_token_ids!r}"
                )
            task._need_tokenizer("stop_token_ids='auto'")
            stop_token_ids = task.tokenizer.stop_token_ids
        stop = tuple(int(x) for x in stop_token_ids or ())
        if ids:
            self._check_length(max(map(len, ids)) + max_tokens)
        self._set_sampler(seed=seed, **sampling)
        completions = self._complete(ids, max_tokens, stop) if ids else []
        if not return_token_ids:
            completions = [task.tokenizer.decode(c) for c in completions]
        return completions[0] if one else completions

    def samples(self, examples, count, max_tokens):
        """Completes the first rows and lays their own ends beside it."""
        tokenizer = self.task.tokenizer
        self.task._need_tokenizer("num_samples")
        cut = []
        for example in itertools.islice(iter(examples), count):
            trained = example.completion_mask != 0
            first = int(np.argmax(trained))
            # The first answer alone: a chat may go on behind it.
            answer = np.cumprod(trained[first:]).sum()
            ids = example.token_ids
            cut.append((ids[:first], ids[first : first + answer]))
        completions = self(
            [{"prompt_ids": prompt.tolist()} for prompt, _ in cut],
            max_tokens=max_tokens,
            temperature=0,
            top_k=None,
            top_p=None,
            stop_token_ids="auto",
            seed=0,
            return_token_ids=False,
        )
        return [
            {
                "prompt": tokenizer.decode(
                    prompt.tolist(), skip_special_tokens=False
                ),
                "completion": completion,
                "reference": tokenizer.decode(rest.tolist()),
            }
            for (prompt, rest), completion in zip(cut, completions)
        ]

    def _prompt_ids(self, row, prompt):
        if isinstance(prompt, dict):
            if set(prompt) != {"prompt_ids"}:
                raise ValueError(
                    "A tokenised prompt is {'prompt_ids': [...]}. "
                    f"Received: prompt {row} with keys {sorted(prompt)}"
                )
            ids = [int(x) for x in prompt["prompt_ids"]]
        elif isinstance(prompt, str):
            self.task._need_tokenizer("a text prompt")
            ids = self.task.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            self.task._need_tokenizer("messages")
            ids = chat.render_ids(
                self.task.tokenizer,
                prompt,
                add_generation_prompt=True,
                **self.task.chat_template_kwargs,
            )
        size = self.task.causal_lm.backbone.vocabulary_size
        if not ids or min(ids) < 0 or max(ids) >= size:
            raise ValueError(
                f"A prompt must have at least one token, with ids in "
                f"[0, {size}). Received: prompt {row} with ids {ids[:20]}"
            )
        return ids

    def _check_length(self, length):
        longest = guards.max_length(self.task.causal_lm)
        if longest is not None and length > longest:
            raise ValueError(
                f"The longest prompt and `max_tokens` together are {length} "
                f"tokens; the model was made for {longest}."
            )

    def _set_sampler(self, temperature, top_k, top_p, seed):
        seed = np.random.randint(2**31) if seed is None else seed
        key = (temperature, top_k, top_p)
        lm = self.task.causal_lm
        if key != self._sampler_key:
            lm.compile(optimizer=None, loss=None, weighted_metrics=None,
                       sampler=_sampler(*key))  # fmt: skip
            self._sampler_key = key
        for variable in lm.sampler.variables:
            variable.assign(np.array([seed, 0], variable.dtype))

    def _complete(self, ids, max_tokens, stop):
        lm, adapter = self.task.causal_lm, self.task.adapter
        lengths = [len(x) for x in ids]
        width = max(lengths) + max_tokens
        width = -(-width // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        tokens = np.zeros((len(ids), width), "int32")
        for row, prompt in zip(tokens, ids):
            row[: len(prompt)] = prompt
        mask = np.arange(width) < np.array(lengths)[:, None]
        inputs = {"token_ids": tokens, "padding_mask": mask.astype("int32")}
        inputs.update(_unused_inputs(lm, len(ids)))
        # KerasHub's compiled function takes the model's own variables: the
        # adapter has to be in them while it runs.
        with adapter.merged() if adapter else contextlib.nullcontext():
            out = lm.generate(inputs, stop_token_ids=stop or None)
        out = np.asarray(out["token_ids"])
        return [
            _until_stop(row[n : n + max_tokens].tolist(), stop)
            for row, n in zip(out, lengths)
        ]


def _unused_inputs(causal_lm, rows):
    """Empty image inputs that Gemma 3's `generate` reads even for text."""
    if not isinstance(causal_lm, keras_hub.models.Gemma3CausalLM):
        return {}
    return {
        "images": np.zeros((rows, 0, 1, 1, 3), "float32"),
        "vision_mask": np.zeros((rows, 0), "int32"),
        "vision_indices": np.zeros((rows, 0), "int32"),
    }


def _until_stop(ids, stop):
    for i, token in enumerate(ids):
        if token in stop:
            return ids[: i + 1]
    return ids


def _sampler(temperature, top_k, top_p):
    if temperature == 0:
        return keras_hub.samplers.GreedySampler()
    if top_p is not None:
        return keras_hub.samplers.TopPSampler(
            p=top_p, k=top_k, temperature=temperature, seed=0
        )
    if top_k is not None:
        return keras_hub.samplers.TopKSampler(
            k=top_k, temperature=temperature, seed=0
        )
    return keras_hub.samplers.RandomSampler(temperature=temperature, seed=0)


def _check(max_tokens, temperature, top_k, top_p):
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(
            "`max_tokens` must be a positive int. "
            f"Received: max_tokens={max_tokens!r}"
        )
    if temperature < 0:
        raise ValueError(
            "`temperature` must be 0 (greedy) or positive. "
            f"Received: temperature={temperature!r}"
        )
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(
            f"`top_k` must be a positive int. Received: top_k={top_k!r}"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(
            f"`top_p` must be in (0, 1]. Received: top_p={top_p!r}"
        )


def _as_list(prompts):
    """`(list of prompts, whether it was one)`."""
    if isinstance(prompts, (str, dict)):
        return [prompts], True
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(
            "`prompts` must be a str, a list of messages, "
            "{'prompt_ids': [...]}, or a list of these. "
            f"Received: {type(prompts).__name__}"
        )
    if prompts and isinstance(prompts[0], dict) and "role" in prompts[0]:
        return [prompts], True
    return list(prompts), False
