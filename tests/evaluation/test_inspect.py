"""A task under Inspect AI: answers, agents with tools, settings, endings."""

import asyncio
import re
import sys
import time

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.evaluation import inspect_messages

inspect_ai = pytest.importorskip("inspect_ai")

from inspect_ai.agent import AgentPrompt, react  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import (  # noqa: E402
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelOutput,
    modelapi,
)
from inspect_ai.scorer import exact, includes  # noqa: E402
from inspect_ai.solver import generate, use_tools  # noqa: E402
from inspect_ai.tool import (  # noqa: E402
    ToolCall,
    ToolCallError,
    ToolFunction,
    tool,
)  # noqa: E402

# Inspect leaves streams open, and calls tenacity by an old name.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:The 'initial' parameter:DeprecationWarning",
)

AGENT = {"What is 3 * 4?": "12"}
WORDS = {f"Say {word}": f"{word}!" for word in ("one", "two", "three")}
THINK = "Think", "<think>\nOne, two.\n</think>\n\nThree."
FAULT = 'a call must have a "name", a string'
BROKEN = (
    "Break",
    '<tool_call>\n{"name": 3}\n</tool_call>',
    f"error: {FAULT}",
    "Sorry.",
)


@tool
def calculator():
    async def execute(expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: such as "3 * 4".
        """
        return str(kpt.episodes.arithmetic(expression))

    return execute


class Script(ModelAPI):
    """Plays the right turns, so that Inspect writes what an agent reads."""

    async def generate(self, input, tools, tool_choice, config):
        last, name = input[-1], self.model_name
        if isinstance(last, ChatMessageTool):
            arguments = {"answer": last.text}
            called = "submit"
        else:
            arguments = {"expression": "3 * 4"}
            called = "calculator"
        found = ModelOutput.for_tool_call(name, called, arguments, content="")
        self.seen = [*input, found.message], tools
        return found

    async def count_text_tokens(self, text):
        return len(text)


def chat(*turns):
    roles = ["user", "assistant"] * 2
    return {
        "messages": [
            {"role": role, "content": text} for role, text in zip(roles, turns)
        ]
    }


def evaluate(directory, model, samples, solver, scorer, **settings):
    samples = [Sample(input=q, target=a) for q, a in samples.items()]
    task = inspect_ai.Task(dataset=samples, solver=solver, scorer=scorer)
    [log] = inspect_ai.eval(
        task,
        model=model,
        log_dir=str(directory),
        display="none",
        fail_on_error=True,
        **settings,
    )
    assert log.status == "success", log.error
    return log


def score(log):
    [score] = log.results.scores
    return next(iter(score.metrics.values())).value


def agent():
    prompt = AgentPrompt(
        instructions=None,
        assistant_prompt="Compute.",
        submit_prompt="Call {submit}() with the answer.",
    )
    return react(prompt=prompt, tools=[calculator()])


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A task that knows by heart what the agent should do."""
    directory = tmp_path_factory.mktemp("inspect")
    api = modelapi(name="script")(Script)("script")
    script = Model(api, GenerateConfig())
    log = evaluate(directory, script, AGENT, agent(), includes())
    assert score(log) == 1
    call = inspect_messages.conversation(
        [*api.seen[0], ChatMessageUser(content="")], api.seen[1]
    )
    rows = [{"messages": call.messages[:-1], "tools": call.tools}]
    rows += [chat(*turns) for turns in WORDS.items()]
    rows += [chat(*THINK), chat(*BROKEN) | {"tools": call.tools[:1]}]
    preset = kpt.examples.tiny_preset(directory / "tiny", rows, num_layers=1)
    task = kpt.SFTTask.from_preset(preset, sequence_length=1024)
    task.compile(keras.optimizers.AdamW(1e-2))
    task.fit(rows, batch_size=1, epochs=40, packing=True, verbose=0)
    return task


@pytest.fixture(scope="module")
def model(task):
    engine = kpt.rollout.NativeRollout(8)
    return kpt.evaluation.inspect(task, engine=engine)


def test_answers_are_those_of_generate(task, model, tmp_path):
    log = evaluate(
        tmp_path, model, WORDS, generate(), exact(), temperature=0, epochs=2
    )
    assert log.eval.model == "keras_posttrain/tiny"
    answers = task.generate(
        [[{"role": "user", "content": q}] for q in WORDS], temperature=0.0
    )
    assert [s.output.completion for s in log.samples] == answers * 2
    assert answers == [*WORDS.values()]


def test_an_agent_with_a_tool_runs(model, tmp_path):
    log = evaluate(tmp_path, model, AGENT, agent(), includes(), temperature=0)
    assert score(log) == 1
    [sample] = log.samples
    _, _, call, result, _ = sample.messages
    [found] = call.tool_calls
    assert (found.function, found.arguments) == (
        "calculator",
        {"expression": "3 * 4"},
    )
    assert result.text == "12" and result.tool_call_id == found.id
    reasons = [
        e.output.stop_reason for e in sample.events if e.event == "model"
    ]
    assert reasons == ["tool_calls", "tool_calls"]


def test_a_call_that_cannot_be_read_is_answered(model, tmp_path):
    question, _, _, answer = BROKEN
    log = evaluate(
        tmp_path,
        model,
        {question: answer},
        [use_tools(calculator()), generate()],
        exact(),
        temperature=0,
    )
    [sample] = log.samples
    assert sample.messages[2].error.message == FAULT
    assert sample.output.completion == answer and score(log) == 1


def test_thoughts_are_no_part_of_the_answer(model):
    question, turn = THINK
    output = ask(model, question, temperature=0)
    assert output.completion == "Three."
    thoughts, _ = output.message.content
    assert thoughts.reasoning == "One, two."
    # The model reads them again as it wrote them.
    said = [ChatMessageUser(content=question), output.message]
    said.append(ChatMessageUser(content="Go on."))
    call = inspect_messages.conversation(said, [])
    assert call.messages[1]["content"] == turn


def ask(model, *questions, **settings):
    """The outputs of concurrent calls."""
    config = GenerateConfig(**settings)

    async def run():
        calls = [model.generate(q, config=config) for q in questions]
        return await asyncio.gather(*calls)

    outputs = asyncio.run(run())
    return outputs if len(outputs) > 1 else outputs[0]


def prompt(text):
    return [{"role": "user", "content": text}]


def test_samples_are_those_of_generate(task, model):
    """Choices are the samples of a prompt, with the same seed."""
    for seed in range(3, 50):
        settings = dict(
            max_tokens=80, temperature=8.0, top_k=500, top_p=0.999, seed=seed
        )
        wanted = task.generate(
            prompt("Say one"), num_generations=3, **settings
        )
        # Thoughts and calls are no text of an answer.
        if not re.search("</?(think|tool_call)>", "".join(wanted)):
            break
    output = ask(model, "Say one", num_choices=3, **settings)
    found = [choice.message.text for choice in output.choices]
    assert found == wanted and len(set(found)) == 3
    ids = task.generate(
        prompt("Say one"),
        num_generations=3,
        return_token_ids=True,
        **settings,
    )
    assert max(map(len, ids)) > 40
    usage = output.usage
    assert usage.output_tokens == sum(map(len, ids))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    # A text ends the same samples, also one in later tokens.
    longest = max(wanted, key=len)
    end = re.findall("[a-z]{2}", longest)[-1]
    output = ask(model, "Say one", num_choices=3, stop_seqs=[end], **settings)
    assert [choice.message.text for choice in output.choices] == [
        text.split(end)[0] for text in wanted
    ]
    assert output.choices[wanted.index(longest)].stop_reason == "stop"


@pytest.mark.full
def test_log_probabilities(task, model):
    output = ask(
        model, "Say two", temperature=0, logprobs=True, top_logprobs=3
    )
    content = output.choices[0].logprobs.content
    ids = task.generate(
        prompt("Say two"), temperature=0.0, return_token_ids=True
    )
    assert len(content) == len(ids) == output.usage.output_tokens
    # The engine scores by another program than it samples with.
    for own in content:
        assert [x.token for x in own.top_logprobs][0] == own.token
        best, *rest = [x.logprob for x in own.top_logprobs]
        assert best == pytest.approx(own.logprob, abs=1e-4)
        assert len(rest) == 2 and best >= rest[0] >= rest[1]


def test_endings(model, monkeypatch):
    assert ask(model, "Say one", temperature=0).stop_reason == "stop"
    output = ask(model, "Say one", temperature=0, max_tokens=1)
    assert output.stop_reason == "max_tokens"
    given = output.usage.input_tokens
    # Nothing is said of the tokens: what the context has room for.
    monkeypatch.setattr(model.api, "_context", given + 2)
    for settings in ({}, {"max_tokens": 3}):
        output = ask(model, "Say one", temperature=0, **settings)
        assert output.stop_reason == "model_length"
        assert output.usage.output_tokens == 2
    monkeypatch.setattr(model.api, "_context", given)
    output = ask(model, "Say one", temperature=0)
    assert output.stop_reason == "model_length"
    assert f"has {given} tokens" in output.completion


def test_calls_share_a_session_that_ends_when_idle(task):
    class Counted(kpt.rollout.NativeRollout):
        opened = 0

        def session(self):
            self.opened += 1
            return super().session()

    engine = Counted()
    model = kpt.evaluation.inspect(task, engine=engine, name="mine")
    assert str(model) == "keras_posttrain/mine"
    own = model.api._session
    own._seconds = 0.3
    outputs = ask(model, *WORDS, *WORDS, temperature=0)
    assert [o.completion for o in outputs] == [*WORDS.values()] * 2
    assert engine.opened == 1 and engine.weight_version == 1
    ask(model, "Say one", temperature=0)
    assert engine.opened == 1 and own.is_open
    until = time.monotonic() + 60
    while own.is_open and time.monotonic() < until:
        time.sleep(0.05)
    assert not own.is_open
    # Other weights are sent, and answer otherwise.
    kernel = task.trainable_variables[0]
    before = np.array(kernel.value)
    kernel.assign(0 * kernel.value)
    changed = ask(model, "Say one", temperature=0, max_tokens=4)
    kernel.assign(before)
    assert changed.completion != outputs[0].completion
    assert ask(model, "Say one", temperature=0).completion == "one!"
    assert engine.opened == 2 and engine.weight_version == 3
    model.api.close()
    assert not own.is_open


def test_a_failed_engine_fails_its_calls_alone(task, monkeypatch):
    engine = kpt.rollout.NativeRollout()
    model = kpt.evaluation.inspect(task, engine=engine)

    def fail():
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_session_schedule", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            ask(model, "Say one", temperature=0)
    assert ask(model, "Say one", temperature=0).completion == "one!"
    model.api.close()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"frequency_penalty": 0.5}, "'frequency_penalty': 0.5"),
        ({"prompt_logprobs": 1}, "'prompt_logprobs': 1"),
        ({"top_logprobs": 30}, "from 0 to 20"),
        ({"max_tokens": 0}, "`max_tokens` must be a positive int"),
        ({"temperature": -1.0}, "`temperature` must be 0"),
    ],
)
def test_settings_that_cannot_be_followed(model, settings, words):
    with pytest.raises(ValueError, match=words):
        ask(model, "Say one", **settings)


def test_settings_without_effect_are_said_once(model, monkeypatch):
    monkeypatch.setattr(model.api, "_notes", inspect_messages.Notes())
    settings = {"temperature": 0, "reasoning_effort": "low", "max_tokens": 1}
    with pytest.warns(UserWarning, match="`reasoning_effort` has no effect"):
        ask(model, "Say one", frequency_penalty=0, **settings)
    ask(model, "Say one", **settings)

    note = inspect_messages.Notes()
    with pytest.warns(UserWarning, match="`tool_choice` has no effect"):
        note(GenerateConfig(), ToolFunction("calculator"))
    note(GenerateConfig(), ToolFunction("calculator"))


def test_what_cannot_be_said():
    image = ContentImage(image="data:image/png;base64,AAAA")
    with pytest.raises(ValueError, match="takes no images.*message 1"):
        inspect_messages.conversation(
            [ChatMessageUser(content="a"), ChatMessageUser(content=[image])],
            [],
        )
    with pytest.raises(ValueError, match="last message must be"):
        inspect_messages.conversation([ChatMessageAssistant(content="a")], [])


def test_faults_join_the_answers_of_other_calls():
    calls = [
        ToolCall("a", "calculator", {"expression": "1"}),
        ToolCall("b", "unreadable", {}, parse_error=FAULT),
    ]
    call = inspect_messages.conversation(
        [
            ChatMessageUser(content="Hi"),
            ChatMessageAssistant(content="", tool_calls=calls),
            ChatMessageTool(
                content="1", tool_call_id="a", function="calculator"
            ),
            ChatMessageTool(
                content="",
                tool_call_id="b",
                function="unreadable",
                error=ToolCallError("parsing", FAULT),
            ),
        ],
        [],
    )
    _, assistant, answer = call.messages
    assert [c["id"] for c in assistant["tool_calls"]] == ["a"]
    assert answer == {
        "role": "tool",
        "content": f"1\nerror: {FAULT}",
        "tool_call_id": "a",
        "name": "calculator",
    }


def test_bad_arguments(task, monkeypatch):
    for settings in ({"engine": "vllm"}, {"name": ""}):
        with pytest.raises(ValueError, match="Received"):
            kpt.evaluation.inspect(task, **settings)
    plain = kpt.SFTTask(task.causal_lm)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        kpt.evaluation.inspect(plain)
    monkeypatch.setattr(task.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="need a chat template"):
        kpt.evaluation.inspect(task)
    monkeypatch.setitem(sys.modules, "inspect_ai.model", None)
    with pytest.raises(ImportError, match="keras_posttrain.inspect"):
        kpt.evaluation.inspect(task)
