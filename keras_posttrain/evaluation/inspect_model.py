"""A task as a model of Inspect AI."""

import asyncio
import dataclasses
import functools

import keras

from keras_posttrain.data.chat.bridge import Bridges
from keras_posttrain.episodes import chat_api
from keras_posttrain.episodes.turn_reader import TurnReader
from keras_posttrain.evaluation import inspect_messages
from keras_posttrain.evaluation.engine import (
    FIRST_TOKENS,
    EndOfText,
    EvaluationEngine,
    rest_of,
)
from keras_posttrain.evaluation.idle_session import IdleSession
from keras_posttrain.rollout import Request
from keras_posttrain.training import checks

# Tokens of the first request for an answer: each further one is twice as
# long. So the memory of an answer hangs on its length, not on the context's.
FIRST_REQUEST = 256
# Calls at once, where the engine does not say how many it samples together.
CONNECTIONS = 128


def inspect(task, *, engine=None, name=None):
    """Makes a model for [Inspect AI](https://inspect.aisi.org.uk).

    Evaluations, agents and tools of Inspect run on it. Concurrent calls are
    sampled together by an engine, from the task's weights at that time, an
    adapter included. Messages and the schemas of tools are rendered by the
    task's chat template; calls are read in the format that the template
    writes them in, as in `kpt.episodes.Tools`. A call that cannot be read is
    answered by Inspect with what is wrong. Thoughts become reasoning content.

    Of `GenerateConfig` are followed: `max_tokens` (by default what the
    context has room for), `temperature` (1 by default, 0 is greedy), `top_p`,
    `top_k`, `stop_seqs`, `seed`, `num_choices`, `logprobs` and
    `top_logprobs`. With a `seed` equal requests have equal answers, those of
    other epochs too. Penalties, biases, response schemas and `prompt_logprobs`
    raise a `ValueError`; for settings without a meaning here, such as
    `reasoning_effort`, there is a warning. No call is forced: a `tool_choice`
    that names a tool only hides the others. Messages are text, and the last
    one is not the model's.

    The stop reason is `"max_tokens"` for an answer cut by `max_tokens`, and
    `"model_length"` for one cut by the context, or for a conversation without
    room for an answer. Log-probabilities are those at the temperature, before
    `top_k` and `top_p`.

    Make the model once and use it for all evaluations of a run: it keeps its
    compiled programs. Its memory for conversations is released two seconds
    after the last call.

    Args:
        task: a `kpt.Task` with a tokenizer that has a chat template. It need
            not be compiled.
        engine: `kpt.rollout.Rollout` or `None` for the built-in engine. It is
            started if it does not run, and runs until its `stop()`.
        name: string, the model's name in Inspect's logs, where it is
            `"keras_posttrain/name"`. Defaults to the name of the directory
            that the tokenizer was read from.

    Returns:
        An `inspect_ai.model.Model`, for `inspect_ai.eval(model=...)`.

    Raises:
        ImportError: Inspect is not installed; it comes with the extra
            `inspect`.
        ValueError: the task has no tokenizer or no chat template, or an
            argument is invalid.

    Example:

    ```python
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match

    sums = inspect_ai.Task([Sample("2 + 2 =", target="4")], scorer=match())
    model = kpt.evaluation.inspect(task)
    [log] = inspect_ai.eval(
        sums, model=model, temperature=0, max_tokens=8, display="none"
    )
    list(log.results.scores[0].metrics)  # ["accuracy", "stderr"]
    ```
    """
    # Inspect is an extra, and imports much.
    try:
        from inspect_ai.model import GenerateConfig, Model, ModelAPI, modelapi
    except ImportError as error:
        raise ImportError(
            "`kpt.evaluation.inspect` needs Inspect AI. Install it with "
            "`pip install keras_posttrain[inspect]`, or `pip install "
            "inspect_ai`."
        ) from error
    checks.task(task)
    tokenizer = task.tokenizer
    checks.need_tokenizer(tokenizer, "kpt.evaluation.inspect")
    if tokenizer.chat_template is None:
        raise ValueError(
            "Inspect's messages need a chat template. Received: a tokenizer "
            "with chat_template=None. Pass `chat_template=` to the task."
        )
    if not (name is None or (isinstance(name, str) and name)):
        raise ValueError(
            f"`name` must be a string or None. Received: name={name!r}"
        )
    source = EvaluationEngine(task, engine)
    if name is None:
        path = tokenizer.source
        name = "policy" if path is None else path.name
    cls = type("KerasPosttrainAPI", (_Answers, ModelAPI), {})
    api = modelapi(name="keras_posttrain")(cls)(source, name)
    # Otherwise Inspect begins with 20 calls at once and never has over 100.
    config = GenerateConfig(max_connections=api.max_connections())
    return Model(api, config)


class _Answers:
    """What Inspect asks of a model; its base class is Inspect's."""

    def __init__(self, source, name):
        super().__init__(name)
        task = source.task
        self._source, self._tokenizer = source, task.tokenizer
        kwargs = task.chat_template_kwargs
        self._bridges = Bridges(task.tokenizer, kwargs)
        self._reader = TurnReader(task.tokenizer, kwargs)
        self._session = IdleSession(source)
        self._notes = inspect_messages.Notes()
        known = source.engine.context_length
        self._context = task.sequence_length if known is None else known

    def max_connections(self):
        return getattr(self._source.engine, "num_slots", CONNECTIONS)

    def connection_key(self):
        return str(id(self))

    def collapse_user_messages(self):
        # Templates may want roles to alternate.
        return True

    def collapse_assistant_messages(self):
        return True

    async def count_text_tokens(self, text):
        return len(self._tokenizer.encode(text, False))

    def close(self):
        self._session.close()

    async def generate(self, input, tools, tool_choice, config):
        settings = inspect_messages.sampling(config)
        self._notes(config, tool_choice)
        call = inspect_messages.conversation(input, tools)
        ids = self._bridges.opening(call.messages, call.tools)
        room = self._context - len(ids)
        if room < 1:
            return self._too_long(len(ids))
        request = Request(
            ids,
            max_tokens=min(config.max_tokens or room, room),
            stop_token_ids=self._tokenizer.stop_token_ids,
            **settings,
        )
        until = [text for text in config.stop_seqs or () if text]
        choices = [
            dataclasses.replace(request, first_sample=i)
            for i in range(config.num_choices or 1)
        ]
        with self._session.use() as session:
            samples = await asyncio.gather(
                *(self._sample(session, choice, until) for choice in choices)
            )
            replies = [
                self._reader.read(s.token_ids, call.tools, until)
                for s in samples
            ]
            for sample, reply in zip(samples, replies):
                if not reply.tool_calls:
                    session.release([*ids, *sample.token_ids])
        is_cut = config.max_tokens is not None and config.max_tokens <= room
        cut = "max_tokens" if is_cut else "model_length"
        logprobs = [None] * len(samples)
        if config.logprobs or config.top_logprobs:
            logprobs = await self._logprobs(request, samples, config)
        return self._output(call, request, samples, replies, logprobs, cut)

    async def _sample(self, session, request, until):
        """Returns a `_Sample` of a request for one."""
        ends = EndOfText(self._tokenizer, until) if until else None
        count = FIRST_TOKENS if until else FIRST_REQUEST
        sample = _Sample()
        while sample.finish_reason is None:
            part = rest_of(request, sample.token_ids, count)
            future = session.submit(part)
            [completion] = await asyncio.wrap_future(future)
            sample.add(completion)
            kept = ends(sample.token_ids) if ends else None
            is_full = len(sample.token_ids) >= request.max_tokens
            if kept is not None:
                sample.cut(kept)
            elif completion.finish_reason == "stop" or is_full:
                sample.finish_reason = completion.finish_reason
            count *= 2
        return sample

    # Answers as Inspect has them

    def _output(self, call, request, samples, replies, logprobs, cut):
        # Part of the extra.
        from inspect_ai.model import (
            ChatCompletionChoice,
            ModelOutput,
            ModelUsage,
        )

        reasons = {"stop": "stop", "length": cut}
        choices = [
            ChatCompletionChoice(
                message=self._message(call, reply),
                stop_reason="tool_calls"
                if reply.tool_calls
                else reasons[sample.finish_reason],
                logprobs=found,
            )
            for sample, reply, found in zip(samples, replies, logprobs)
        ]
        given = len(request.token_ids)
        sampled = sum(len(sample.token_ids) for sample in samples)
        usage = ModelUsage(
            input_tokens=given,
            output_tokens=sampled,
            total_tokens=given + sampled,
        )
        return ModelOutput(model=self.model_name, choices=choices, usage=usage)

    def _message(self, call, reply):
        # Part of the extra.
        from inspect_ai.model import (
            ChatMessageAssistant,
            ContentReasoning,
            ContentText,
        )
        from inspect_ai.tool import ToolCall

        thoughts, written, content = inspect_messages.split_thoughts(
            reply.text
        )
        if written:
            # What was written is what the model reads in its next turn.
            content = [
                ContentReasoning(reasoning=thoughts, internal=written),
                ContentText(text=content),
            ]
        said = chat_api.message_of(reply, call).get("tool_calls", ())
        tool_calls = [
            ToolCall(own["id"], own["function"]["name"], found["arguments"])
            for own, found in zip(said, reply.tool_calls)
        ]
        first = f"{call.words()[1]:08x}"[:7]
        tool_calls += [
            ToolCall(f"{first}{i:02d}", "unreadable", {}, parse_error=reason)
            for i, reason in enumerate(reply.unreadable)
        ]
        return ChatMessageAssistant(
            content=content,
            tool_calls=tool_calls or None,
            model=self.model_name,
            source="generate",
        )

    def _too_long(self, count):
        # Part of the extra.
        from inspect_ai.model import ModelOutput, ModelUsage

        what = (
            f"The conversation has {count} tokens, and with an answer the "
            f"model takes at most {self._context}."
        )
        output = ModelOutput.from_content(
            self.model_name, what, stop_reason="model_length"
        )
        output.usage = ModelUsage(input_tokens=count, total_tokens=count)
        return output

    async def _logprobs(self, request, samples, config):
        """Returns Inspect's `Logprobs` of each sample."""
        # Part of the extra.
        from inspect_ai.model import Logprob, Logprobs, TopLogprob

        tops = [None] * len(samples)
        if config.top_logprobs:
            score = functools.partial(
                _score,
                keras.distribution.distribution(),
                self._source.engine,
                [[*request.token_ids, *s.token_ids] for s in samples],
                config.top_logprobs,
                request.temperature,
            )
            tops = await asyncio.to_thread(score)
        found = []
        for sample, scores in zip(samples, tops):
            content = [
                Logprob(token=self._token(i), logprob=float(logp))
                for i, logp in zip(sample.token_ids, sample.logps)
            ]
            count = len(content)
            for j, own in enumerate(content if scores is not None else ()):
                ids = scores.top_ids[j - count]
                logps = scores.top_logps[j - count]
                own.top_logprobs = [
                    TopLogprob(token=self._token(int(i)), logprob=float(x))
                    for i, x in zip(ids, logps)
                ]
            found.append(Logprobs(content=content))
        return found

    def _token(self, token_id):
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


@dataclasses.dataclass
class _Sample:
    """An answer that grows."""

    token_ids: list = dataclasses.field(default_factory=list)
    logps: list = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def add(self, completion):
        self.token_ids += completion.token_ids
        self.logps += completion.per_token_logps.tolist()

    def cut(self, count):
        """Keeps some tokens, with which a text has ended it."""
        del self.token_ids[count:], self.logps[count:]
        self.finish_reason = "stop"


def _score(distribution, engine, sequences, top_k, temperature):
    # Keras keeps the distribution for each thread.
    keras.distribution.set_distribution(distribution)
    return engine.score(sequences, top_k=top_k, temperature=temperature)
