"""`task.generate`: prompts to requests, and completions to text."""

import itertools

import numpy as np

from keras_posttrain.data.chat import chat
from keras_posttrain.distribution import processes
from keras_posttrain.rollout import NativeRollout, Request


class Generator:
    """Completes prompts by the built-in engine.

    Args:
        task: `Task`.
    """

    def __init__(self, task):
        self.task = task
        self.engine = NativeRollout()
        self.engine.set_model(task)

    def __call__(
        self, prompts, *, num_generations=1, stop_token_ids="auto", seed=None,
        return_token_ids=False, on_text=None, verbose=0, **sampling,
    ):  # fmt: skip
        prompts, one = _as_list(prompts)
        ids = [self._prompt_ids(i, p) for i, p in enumerate(prompts)]
        if not return_token_ids or on_text is not None:
            self.task._need_tokenizer("generate")
        # One seed for all: equal prompts still differ in their samples.
        if seed is None:
            seed = processes.from_first(np.random.randint(2**31))
        requests = [
            Request(
                x,
                num_generations=num_generations,
                stop_token_ids=self._stop(stop_token_ids),
                seed=seed,
                **sampling,
            )
            for x in ids
        ]
        stream = None
        if on_text is not None:
            stream = _TextStream(self.task.tokenizer, num_generations, on_text)
        shown = bool(verbose) and processes.is_first()
        out = self.engine.generate(requests, on_tokens=stream, progress=shown)
        if stream is not None:
            stream.end()
        answers = [[self._answer(c, return_token_ids) for c in x] for x in out]
        if num_generations == 1:
            answers = [x[0] for x in answers]
        return answers[0] if one else answers

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

    def _answer(self, completion, return_token_ids):
        if return_token_ids:
            return completion.token_ids
        return self.task.tokenizer.decode(completion.token_ids)

    def _stop(self, stop_token_ids):
        if not isinstance(stop_token_ids, str):
            return tuple(stop_token_ids or ())
        if stop_token_ids != "auto":
            raise ValueError(
                "`stop_token_ids` must be 'auto', None or ints. "
                f"Received: stop_token_ids={stop_token_ids!r}"
            )
        self.task._need_tokenizer("stop_token_ids='auto'")
        return tuple(self.task.tokenizer.stop_token_ids)

    def _prompt_ids(self, row, prompt):
        if isinstance(prompt, dict):
            if set(prompt) != {"prompt_ids"}:
                raise ValueError(
                    "A tokenised prompt is {'prompt_ids': [...]}. "
                    f"Received: prompt {row} with keys {sorted(prompt)}"
                )
            return prompt["prompt_ids"]
        if isinstance(prompt, str):
            self.task._need_tokenizer("a text prompt")
            return self.task.tokenizer.encode(prompt, add_special_tokens=True)
        self.task._need_tokenizer("messages")
        return chat.render_ids(
            self.task.tokenizer,
            prompt,
            add_generation_prompt=True,
            **self.task.chat_template_kwargs,
        )


class _TextStream:
    """Turns new tokens into new text.

    Args:
        tokenizer: `Tokenizer`.
        num_generations: int, the samples of a prompt.
        on_text: `f(index, text)`.
    """

    def __init__(self, tokenizer, num_generations, on_text):
        self.tokenizer, self.on_text = tokenizer, on_text
        self.num_generations = num_generations
        self.ids, self.told = {}, {}

    def __call__(self, request, generation, token_ids):
        index = request * self.num_generations + generation
        self.ids.setdefault(index, []).extend(token_ids)
        text = self.tokenizer.decode(self.ids[index])
        # What ends in the middle of a character waits for its rest.
        self._tell(index, text.rstrip("\ufffd"))

    def end(self):
        for index, ids in self.ids.items():
            self._tell(index, self.tokenizer.decode(ids))

    def _tell(self, index, text):
        new = text[len(self.told.get(index, "")) :]
        if new:
            self.told[index] = text
            self.on_text(index, new)


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
