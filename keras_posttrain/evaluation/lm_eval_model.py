"""A task as a model of EleutherAI's lm-evaluation-harness."""

import collections
import warnings

import numpy as np
from tqdm import tqdm

from keras_posttrain.data.chat import chat
from keras_posttrain.evaluation.engine import EndOfText, EvaluationEngine
from keras_posttrain.rollout import Request
from keras_posttrain.training import checks

# Sequences that are scored, and answers that are sampled, by one call.
PER_CALL = 1024
MAX_GEN_TOKS = 256
# Generation arguments that are read.
KNOWN = {
    "do_sample", "temperature", "until", "max_gen_toks", "top_k", "top_p",
    "min_p",
}  # fmt: skip
# Others, with the value that asks for nothing.
WITHOUT_EFFECT = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "use_cache": True,
}


def lm_eval(task, *, engine=None, max_length=None, think_end_token=None):
    """Makes a model for [lm-evaluation-harness](
    https://github.com/EleutherAI/lm-evaluation-harness).

    Results are those of the harness's own `hf` backend on the exported
    directory: tokens, contexts that are cut on the left, log-likelihoods and
    greedy answers. All that a call of the harness asks for is computed
    together by an engine, from the task's weights at that time, an adapter
    included. Also tokens that end a turn of the chat template end an answer.

    Tasks that ask for generation arguments other than `until`, `do_sample`,
    `temperature`, `top_k`, `top_p`, `min_p` and `max_gen_toks` (and its
    aliases) are refused. The random numbers of samples are those of
    `simple_evaluate(numpy_random_seed=...)`.

    Make the model once and use it for all evaluations of a run: it keeps its
    compiled programs.

    Args:
        task: a `kpt.Task` with a tokenizer. It need not be compiled.
        engine: `kpt.rollout.Rollout` or `None` for the built-in engine. It is
            started if it does not run, and runs until its `stop()`.
        max_length: int or `None`, the most tokens of a context and its
            answer. Defaults to the context length of the model's config, or
            where there is none to the task's `sequence_length`.
        think_end_token: string or `None`. Of an answer only what follows its
            last occurrence counts, such as `"</think>"`.

    Returns:
        An `lm_eval.api.model.LM`, for `simple_evaluate(model=...)`.

    Raises:
        ImportError: the harness is not installed; it comes with the extra
            `lm-eval`.
        ValueError: the task has no tokenizer, or an argument is invalid.

    Example:

    ```python
    from lm_eval.api.instance import Instance

    model = kpt.evaluation.lm_eval(task)
    request = Instance("loglikelihood", {}, ("2 + 2 =", " 4"), 0)
    [(log_prob, is_greedy)] = model.loglikelihood([request])
    ```

    The harness downloads the rows of its own tasks:

    ```
    found = lm_eval.simple_evaluate(model=model, tasks=["gsm8k"], limit=100)
    found["results"]["gsm8k"]
    ```
    """
    # The harness is an extra, and imports much.
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ImportError(
            "`kpt.evaluation.lm_eval` needs lm-evaluation-harness. Install "
            "it with `pip install keras_posttrain[lm-eval]`, or `pip install "
            "lm_eval`."
        ) from error
    checks.task(task)
    checks.need_tokenizer(task.tokenizer, "kpt.evaluation.lm_eval")
    if max_length is not None:
        checks.positive_int("max_length", max_length)
    if not (think_end_token is None or isinstance(think_end_token, str)):
        raise ValueError(
            "`think_end_token` must be a string or None. "
            f"Received: think_end_token={think_end_token!r}"
        )
    cls = type("KerasPosttrainLM", (_Requests, TemplateLM), {})
    return cls(EvaluationEngine(task, engine), max_length, think_end_token)


class _Requests:
    """What the harness asks of a model; its base class is the harness's."""

    backend = "causal"

    def __init__(self, source, max_length, think_end_token):
        super().__init__()
        self._source, self._think_end_token = source, think_end_token
        self.tokenizer = source.task.tokenizer
        self.max_length = _max_length(source, max_length)
        self.max_gen_toks = MAX_GEN_TOKS

    # Text

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self):
        tokenizer = self.tokenizer
        for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token_id is not None:
                return token_id
        raise ValueError(
            "An empty context begins with a begin- or end-of-text token. "
            "Received: a tokenizer without either."
        )

    @property
    def tokenizer_name(self):
        source = self.tokenizer.source
        return "keras_posttrain" if source is None else source.name

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        if add_special_tokens is None:
            prefix = self.tokenizer.decode(
                [self.prefix_token_id], skip_special_tokens=False
            )
            add_special_tokens = not string.startswith(prefix)
        return self.tokenizer.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        try:
            return self._render(chat_history, add_generation_prompt)
        except ValueError:
            rest = [m for m in chat_history if m["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            text = self._render(rest, add_generation_prompt)
            # As the harness does it for other models.
            warnings.warn(
                "The chat template refuses the system role: messages of this "
                "role are left out.",
                stacklevel=2,
            )
            return text

    def _render(self, messages, add_generation_prompt):
        text = chat.render(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            **self._source.task.chat_template_kwargs,
        )
        if add_generation_prompt:
            return text
        # The model continues the last message.
        last = messages[-1]["content"]
        for part in (last, last.strip()):
            if (at := text.rfind(part)) >= 0:
                return text[: at + len(part)]
        raise ValueError(
            "The chat template must write the last message unchanged, which "
            f"the answer continues. Received: {last!r}"
        )

    # Scores

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        sequences = [
            self._sequence(words, context, continuation)
            for words, context, continuation in requests
        ]
        counts = [len(continuation) for *_, continuation in requests]
        scores = self._scores(dict.fromkeys(sequences), disable_tqdm)
        found = []
        for (words, *_), ids, count in zip(requests, sequences, counts):
            logps, is_best = scores[ids]
            answer = (
                float(logps[-count:].astype("float64").sum()),
                bool(is_best[-count:].all()),
            )
            found.append(answer)
            if words is not None:
                self.cache_hook.add_partial("loglikelihood", words, answer)
        return found

    def _sequence(self, words, context, continuation):
        """Returns the tokens to score: contexts lose their beginning."""
        if not continuation or len(continuation) > self.max_length:
            raise ValueError(
                "A continuation must have a token of its own, and at most "
                f"{self.max_length}, the context of the model. Received: "
                f"{len(continuation)} tokens for {words!r:.200}"
            )
        return tuple([*context, *continuation][-(self.max_length + 1) :])

    def _scores(self, sequences, disable_tqdm):
        """Scores each sequence once.

        Returns:
            Dict from sequences to their log-probabilities and, as bools,
            whether each token is the most probable one.
        """
        engine, found = self._source.sync(), {}
        # Long ones first, so that rows are of similar length.
        ordered = sorted(sequences, key=len, reverse=True)
        bar = tqdm(
            total=len(ordered), disable=disable_tqdm, desc="log-likelihoods"
        )
        with bar:
            for first in range(0, len(ordered), PER_CALL):
                part = ordered[first : first + PER_CALL]
                for ids, s in zip(part, engine.score(part, top_k=1)):
                    found[ids] = s.per_token_logps, s.top_ids[:, 0] == ids
                bar.update(len(part))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        # Part of the extra.
        from lm_eval import utils

        windows, counts = [], []
        for request in requests:
            [text] = request.args
            found = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *utils.make_disjoint_window(w)) for w in found]
            windows += own
            counts.append(len(own))
        values = [x for x, _ in self._loglikelihood_tokens(windows)]
        found, at = [], 0
        for request, count in zip(requests, counts):
            total = float(sum(values[at : at + count]))
            at += count
            found.append(total)
            self.cache_hook.add_partial(
                "loglikelihood_rolling", request.args, total
            )
        return found

    # Answers

    def generate_until(self, requests, disable_tqdm=False):
        seed, seen = np.random.randint(2**31), collections.Counter()
        asked, until, ends = [], [], []
        for request in requests:
            context, arguments = request.args
            own, texts = self._request(context, arguments, seed)
            # The harness repeats requests to sample several answers.
            number = seen[own]
            seen[own] += 1
            asked.append((own, number))
            until.append(texts)
            ends.append(EndOfText(self.tokenizer, texts))
        found = []
        with tqdm(
            total=len(asked), disable=disable_tqdm, desc="answers"
        ) as bar:
            for first in range(0, len(asked), PER_CALL):
                part = slice(first, first + PER_CALL)
                found += self._source.sample(
                    [_numbered(*pair) for pair in asked[part]],
                    ends[part],
                    bar.update,
                )
        answers = []
        for request, (token_ids, _), texts in zip(requests, found, until):
            text = self._text(token_ids, texts)
            answers.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return answers

    def _request(self, context, arguments, seed):
        """Returns the `Request` of a context, and the texts that end it."""
        settings = _settings(arguments, self.max_gen_toks)
        most = settings.pop("max_tokens")
        room = self.max_length - most
        if room < 1:
            raise ValueError(
                "`max_gen_toks` must leave room for the context in the "
                f"model's {self.max_length} tokens. Received: "
                f"max_gen_toks={most}"
            )
        texts, tokenizer = settings.pop("until"), self.tokenizer
        bos = tokenizer.special_tokens.get("bos_token")
        is_begun = bos is not None and context.startswith(bos)
        ids = tokenizer.encode(context, not is_begun)
        if not ids:
            ids = [self.prefix_token_id]
        eos = tokenizer.special_tokens.get("eos_token")
        if eos is not None and eos not in texts:
            texts = [*texts, eos]
        request = Request(
            ids[-room:],
            max_tokens=most,
            stop_token_ids=tokenizer.stop_token_ids,
            seed=seed,
            **settings,
        )
        return request, texts

    def _text(self, token_ids, until):
        text = self.tokenizer.decode(token_ids)
        if self._think_end_token:
            text = text.split(self._think_end_token)[-1].lstrip()
        for end in until:
            text = text.split(end)[0]
        return text


def _numbered(request, number):
    if not request.temperature:
        return request
    values = {**vars(request), "first_sample": number}
    return Request(**values)


def _max_length(source, wanted):
    """Returns the most tokens of a context and its answer."""
    engine, task = source.engine, source.task
    known = engine.context_length
    if known is None:
        return wanted or task.sequence_length
    # A scored sequence has one token more, which is not read.
    most = min(known, engine.score_length - 1)
    if wanted is not None and wanted > most:
        raise ValueError(
            "`max_length` must be at most the context of the model and the "
            f"engine, {most} tokens. Received: max_length={wanted}"
        )
    return wanted or most


def _settings(arguments, max_gen_toks):
    """Reads the harness's generation arguments.

    Returns:
        Dict of `until`, a list of strings, and of fields of `Request`.

    Raises:
        ValueError: an argument that cannot be followed.
    """
    # Part of the extra.
    from lm_eval.models.utils import normalize_gen_kwargs

    given = normalize_gen_kwargs(arguments, max_gen_toks)
    unknown = {
        name: value
        for name, value in given.items()
        if name not in KNOWN
        and not (name in WITHOUT_EFFECT and value == WITHOUT_EFFECT[name])
    }
    if unknown:
        raise ValueError(
            f"Generation arguments must be among {sorted(KNOWN)}. Received: "
            f"{unknown}. Leave them out of the task's `generation_kwargs`, or "
            "override them by `simple_evaluate(gen_kwargs=...)`."
        )
    until = [text for text in given["until"] if text]
    if not all(isinstance(text, str) for text in until):
        raise ValueError(
            f"`until` must be strings. Received: until={given['until']!r}"
        )
    temperature = float(given.get("temperature") or 0.0)
    if given["do_sample"] and temperature <= 0:
        raise ValueError(
            "`do_sample=True` needs a positive `temperature`. Received: "
            f"temperature={temperature}"
        )
    settings = {
        "until": until,
        "max_tokens": given["max_gen_toks"],
        "temperature": temperature if given["do_sample"] else 0.0,
    }
    if given["do_sample"]:
        # 0 and -1 are words for all tokens.
        top_k = given.get("top_k")
        settings["top_k"] = top_k if top_k not in (0, -1) else None
        settings["top_p"] = given.get("top_p")
        settings["min_p"] = given.get("min_p")
    return settings
