"""Agents that know only an address: OpenAI's chat completions."""

import asyncio
import concurrent.futures
import json
import threading
import urllib.error
import urllib.request

import keras
import numpy as np
import openai
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.chat import chat
from keras_posttrain.data.chat.bridge import Bridges
from keras_posttrain.episodes import Endpoint, Limits, chat_api
from keras_posttrain.episodes.http_server import ChatServer
from tests.episodes.support import (
    CALL,
    CHAT,
    QUESTIONS,
    TOOLS,
    Batches,
    compiled,
)
from tests.support import starts_again, weights


@pytest.fixture
def preset(knows_a_call):
    return knows_a_call


def user(text):
    return {"role": "user", "content": text}


def post(base_url, api_key, messages, **settings):
    """Makes a request without a library; returns status and answer."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"messages": messages, **settings}).encode(),
        {"Authorization": f"Bearer {api_key}"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def message(answer):
    status, body = answer
    assert status == 200, body
    return body["choices"][0]["message"]


def talk(base_url, api_key, question):
    """Two turns: the second continues the first."""
    messages = [user(question)]
    for text in ("Why?", None):
        found = message(post(base_url, api_key, messages))
        messages += [found, user(text)]
    return float(len(messages[1]["content"]) % 5)


def make(
    preset, agent, num_generations=3, max_completion_length=16,
    temperature=1.0, num_iterations=1, **settings,
):  # fmt: skip
    return compiled(
        kpt.GRPOTask,
        preset,
        512,
        keras.optimizers.SGD(0.05),
        episode=Endpoint(agent, **settings),
        num_generations=num_generations,
        num_iterations=num_iterations,
        max_completion_length=max_completion_length,
        temperature=temperature,
    )


def fit(task, rows=QUESTIONS):
    found = Batches(task).found
    history = task.fit(rows, batch_size=4, verbose=0).history
    return found, history


def play(preset, agent, rows=QUESTIONS[:1], **settings):
    """Runs episodes once, and returns the metrics."""
    return make(preset, agent, **settings).evaluate(
        rows, num_generations=1, temperature=1.0, verbose=0
    )


def segments(batch):
    """The tokens of each sequence, and how many of them were sampled."""
    return sorted(
        (ids[used].tolist(), int((mask[used] > 0).sum()))
        for ids, mask, used in zip(
            batch["token_ids"],
            batch["completion_mask"],
            batch["segment_ids"] > 0,
        )
    )


@pytest.fixture(scope="module")
def runs(knows_a_call):
    """Two equal runs: the task, and its batches, history and weights."""
    first = starts_again(
        lambda: make(knows_a_call, talk, temperature=2.0, num_iterations=2)
    )
    found = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        task = first()
        task.collector = kpt.GRPOTask.collector
        before = weights(task)
        found.append((*fit(task), weights(task)))
    return task, before, found


def test_an_agent_is_trained_as_an_episode_is(runs):
    """A request that continues a conversation has the tokens of a chat."""
    task, _, [([batch], history, _), _] = runs
    assert history["endpoint/requests"] == [2.0]
    assert history["endpoint/forks"] == history["endpoint/overridden"] == [0.0]
    mask = batch["completion_mask"]
    gap = batch["rollout_per_token_logps"] - batch["old_per_token_logps"]
    assert np.abs(gap * mask).max() < 1e-5
    # One segment for each episode, which opens and goes on as a chat does.
    bridges = Bridges(task.tokenizer)
    why = bridges.between([user("Why?")])
    assert len(mask) == 12
    for ids, count in segments(batch):
        openings = [bridges.opening([user(q["question"])]) for q in QUESTIONS]
        [opening] = [x for x in openings if ids[: len(x)] == x]
        assert 2 <= count <= 32
        assert len(ids) == len(opening) + count + len(why)


def test_the_same_seed_is_the_same_run(runs):
    _, before, [(*_, first), (*_, second)] = runs
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
        assert (value != before[name]).any()


def test_openais_client_calls_tools(preset):
    """The agent has the calls, and answers them; both turns are trained.

    Half of the agents stream.
    """
    seen = []

    def create(client, messages, stream):
        kwargs = {"model": "mine", "messages": messages}
        kwargs["tools"] = TOOLS.schemas
        if not stream:
            done = client.chat.completions.create(**kwargs)
            assert done.usage.completion_tokens > 0
            assert done.model == "mine"
            return done.choices[0].message, done.choices[0].finish_reason
        with client.chat.completions.stream(**kwargs) as events:
            for event in events:
                assert event.type != "error"
            done = events.get_final_completion()
        return done.choices[0].message, done.choices[0].finish_reason

    def agent(base_url, api_key, question, stream):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            assert [m.id for m in client.models.list()] == ["policy"]
            messages = [user(question)]
            turn, reason = create(client, messages, stream)
            if not turn.tool_calls:
                return 0.0
            assert reason == "tool_calls"
            [call] = turn.tool_calls
            given = json.loads(call.function.arguments)
            assert {"name": call.function.name, "arguments": given} == CALL
            result = kpt.episodes.arithmetic(given["expression"])
            messages += [
                turn.model_dump(exclude_unset=True),
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": str(result),
                },
            ]
            turn, reason = create(client, messages, stream)
            seen.append((stream, turn.content, reason))
            return float("12" in (turn.content or ""))

    task = make(
        preset,
        agent,
        num_generations=4,
        max_completion_length=96,
        temperature=0.5,
    )
    rows = [
        {"question": CHAT[0]["content"], "stream": stream}
        for stream in (False, True)
    ]
    batches, history = fit(task, rows)
    for stream in (False, True):
        assert (stream, "It is 12.", "stop") in seen
    assert history["tools/calls"][0] > 0
    assert history["endpoint/forks"] == [0.0]
    # The whole conversation is one segment, as its chat template writes it.
    whole = chat.render_ids(task.tokenizer, CHAT, tools=TOOLS.schemas)
    found = [ids for ids, _ in segments(batches[0])]
    # The template's newline behind the end is not sampled.
    assert whole[:-1] in found


def test_an_async_agent_with_a_blocking_client(preset):
    """In the loop of the episodes it would wait for itself."""

    async def agent(base_url, api_key, question):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(2):
                client.chat.completions.create(
                    model="policy", messages=[user(question)]
                )
                await asyncio.sleep(0)
            return 1.0

    assert play(preset, agent)["endpoint/requests"] == 2


def conversations(preset, agent, **settings):
    """The messages of all conversations of one episode of an agent."""
    task = make(preset, agent, **settings)
    return task.play(question="one")


def test_an_earlier_turn_is_continued_by_a_fork(preset):
    def agent(base_url, api_key, question):
        first = message(post(base_url, api_key, [user(question)]))
        begun = [user(question), first]
        for text in ("Why?", "Really?", "Sure?"):
            post(base_url, api_key, [*begun, user(text)])
        # The agent changes what was sampled: another conversation.
        changed = {"role": "assistant", "content": "Changed"}
        post(base_url, api_key, [user(question), changed, user("Why?")])
        return 1.0

    found = conversations(preset, agent)
    assert len(found.segments) == 4
    # Each sampled token is trained in one segment alone.
    trained = [int(s.mask.sum()) for s in found.segments]
    assert sum(trained) == len(found.sampled_ids)
    beginning = found.segments[0].token_ids.tolist()
    first = int((found.segments[0].turns == 0).nonzero()[0][-1]) + 1
    shared = [s.token_ids[:first].tolist() for s in found.segments]
    assert shared.count(beginning[:first]) == 3
    assert len(found.turn_rewards) == 5


def test_other_tools_are_another_conversation(preset):
    def agent(base_url, api_key, question):
        first = message(post(base_url, api_key, [user(question)]))
        messages = [user(question), first, user("Why?")]
        post(base_url, api_key, messages, tools=TOOLS.schemas)
        return 1.0

    assert len(conversations(preset, agent).segments) == 2


def test_requests_at_once_hang_on_no_order(preset):
    """Samples belong to their conversation, whatever comes first."""
    texts = [f"{i}?" for i in range(6)]

    def sampled(order, pause):
        def agent(base_url, api_key, question):
            begun = [user(question)]
            begun.append(message(post(base_url, api_key, begun)))

            def ask(i):
                if pause:
                    threading.Event().wait(0.02 * order.index(i))
                found = [*begun, user(texts[i])]
                return message(post(base_url, api_key, found))["content"]

            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(ask, order))
            found.append(dict(sorted(zip(order, answers))))
            return 1.0

        found = []
        conversations(preset, agent)
        return found[0]

    keras.utils.set_random_seed(0)
    want = sampled(list(range(6)), True)
    for order, pause in (
        ([5, 4, 3, 2, 1, 0], True),
        ([3, 1, 5, 0, 2, 4], False),
    ):
        keras.utils.set_random_seed(0)
        assert sampled(order, pause) == want


def test_equal_requests_have_samples_of_their_own(preset):
    def agent(base_url, api_key, question):
        for _ in range(8):
            message(post(base_url, api_key, [user("7" * 5)]))
        return 1.0

    found = conversations(preset, agent, temperature=1.5)
    texts = [m["content"] for m in found.messages if m["role"] == "assistant"]
    assert len(texts) == 8 and len(set(texts)) > 1


def test_a_limit_is_said_to_the_agent(preset):
    seen = []

    def agent(base_url, api_key, question):
        for _ in range(3):
            seen.append(post(base_url, api_key, [user(question)]))
        return 0.5

    limits = Limits(turns=2)
    found = conversations(preset, agent, limits=limits)
    assert [status for status, _ in seen] == [200, 200, 400]
    assert seen[-1][1]["error"]["code"] == "episode_ended"
    assert "turns" in seen[-1][1]["error"]["message"]
    # What the agent makes of it counts.
    assert found.reward == 0.5 and len(found.turn_rewards) == 2


def test_an_agent_that_fails_at_a_limit_has_ended(preset):
    def agent(base_url, api_key, question):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            while True:
                client.chat.completions.create(
                    model="policy", messages=[user(question)]
                )

    found = conversations(preset, agent, limits=Limits(turns=3))
    assert found.ended == "turns" and found.error is None
    assert len(found.turn_rewards) == 3


def test_an_agents_exception_stops_the_run(preset):
    def agent(base_url, api_key, question):
        post(base_url, api_key, [user(question)])
        raise KeyError("no such city")

    with pytest.raises(KeyError, match="no such city") as error:
        play(preset, agent)
    assert "of row 0" in error.value.__notes__[0]


def test_a_template_that_refuses_is_the_runs_error(preset, monkeypatch):
    """A client would hide it behind an error of its own."""

    def agent(base_url, api_key, question):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(
                model="policy", messages=[user(question), {"role": "tool"}]
            )

    task = make(preset, agent)
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ raise_exception('no tools here') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    monkeypatch.setattr(task.tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="no tools here"):
        task.evaluate(QUESTIONS[:1], verbose=0)


def test_an_agent_that_hangs_is_left_behind(preset):
    """It is counted as a fault, and its key is refused from then on."""
    late, done = [], threading.Event()

    def agent(base_url, api_key, question):
        if question == "two":
            threading.Event().wait(2)
            late.append(post(base_url, api_key, [user(question)])[0])
            done.set()
        return 1.0

    limits = Limits(seconds=0.5, retries=0)
    metrics = play(preset, agent, QUESTIONS[:2], limits=limits)
    assert metrics["episodes/failed"] == 1
    assert done.wait(10) and late == [401]


def test_settings_of_the_run_are_kept_and_counted(preset):
    def agent(base_url, api_key, question):
        asked = {"temperature": 0.0, "top_p": 0.5, "seed": 3}
        assert post(base_url, api_key, [user(question)], **asked)[0] == 200
        same = {"temperature": 1.0, "top_p": 1, "tool_choice": "auto"}
        assert post(base_url, api_key, [user(question)], **same)[0] == 200
        return 1.0

    assert play(preset, agent)["endpoint/overridden"] == 1


def test_strict_refuses_other_settings(preset):
    def agent(base_url, api_key, question):
        found.append(post(base_url, api_key, [user("?")], temperature=0.5))
        return 1.0

    found = []
    play(preset, agent, strict=True)
    [(status, body)] = found
    assert status == 400 and "temperature" in body["error"]["message"]


def test_max_tokens_bounds_a_turn(preset):
    def agent(base_url, api_key, question):
        for name in ("max_tokens", "max_completion_tokens"):
            _, body = post(base_url, api_key, [user("?")], **{name: 2})
            found.append(body)
        return 1.0

    found = []
    play(preset, agent)
    for body in found:
        assert body["usage"]["completion_tokens"] <= 2
        assert body["choices"][0]["finish_reason"] == "length"
        assert sum(body["usage"].values()) == 2 * body["usage"]["total_tokens"]


BAD = {
    "no messages": {},
    "messages": {"messages": "hello"},
    "a message": {"messages": ["hello"]},
    "role": {"messages": [{"role": "robot", "content": ""}]},
    "an image": {"messages": [user([{"type": "image_url"}])]},
    "content": {"messages": [user(7)]},
    "last": {"messages": [{"role": "assistant", "content": "Well,"}]},
    "calls": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
            user("?"),
        ]
    },
    "arguments": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
            },
            user("?"),
        ]
    },
    "tools": {"messages": [user("?")], "tools": [{"type": "web_search"}]},
    "n": {"messages": [user("?")], "n": 2},
    "stop": {"messages": [user("?")], "stop": ["\n"]},
    "format": {
        "messages": [user("?")],
        "response_format": {"type": "json_object"},
    },
    "logprobs": {"messages": [user("?")], "logprobs": True},
    "max_tokens": {"messages": [user("?")], "max_tokens": 0},
    "max_tokens float": {"messages": [user("?")], "max_tokens": 2.5},
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_a_request_that_cannot_be_answered(body):
    with pytest.raises(chat_api.Refused) as error:
        chat_api.read(body, 1.0)
    assert error.value.status == 400 and len(str(error.value)) > 20


def test_messages_are_read_as_templates_take_them():
    body = {
        "messages": [
            {"role": "developer", "content": "Be kind."},
            user(
                [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            ),
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [
                    {
                        "id": "x1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"y": 1}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "x1", "content": "2"},
        ]
    }
    assert chat_api.read(body, 1.0).messages == [
        {"role": "system", "content": "Be kind."},
        user("ab"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "x1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"y": 1}},
                }
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "x1", "name": "f"},
    ]


@pytest.fixture
def server():
    return ChatServer()


def answered(server, method="POST", path="/chat/completions", **settings):
    """The status of a request to a session that answers nothing."""
    data = settings.pop("data", b"{}")
    request = urllib.request.Request(
        f"{server.url}{path}", data if method == "POST" else None, **settings
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        assert json.loads(error.read())["error"]["message"]
        return error.code


def test_the_server_listens_on_loopback_and_wants_a_key(server):
    assert server.url.startswith("http://127.0.0.1:")
    key = server.open(lambda body: None)
    for headers in ({}, {"Authorization": "Bearer kpt-"}):
        assert answered(server, headers=headers) == 401
        assert answered(server, "GET", "/models", headers=headers) == 401
    known = {"Authorization": f"Bearer {key}"}
    assert answered(server, "GET", "/models", headers=known) == 200
    assert answered(server, "GET", "/files", headers=known) == 404
    assert answered(server, path="/responses", headers=known) == 404
    assert answered(server, data=b"{", headers=known) == 400
    assert answered(server, data=b"\xff", headers=known) == 400
    server.close(key)
    assert answered(server, "GET", "/models", headers=known) == 401


def test_a_request_after_the_episode_is_told_so(server):
    def of_a_closed_loop(body):
        raise RuntimeError("Event loop is closed")

    cancelled = concurrent.futures.Future()
    cancelled.cancel()
    for answer in (of_a_closed_loop, lambda body: cancelled):
        headers = {"Authorization": f"Bearer {server.open(answer)}"}
        assert answered(server, headers=headers) == 410


def test_a_server_ends_with_its_object():
    server = ChatServer()
    url, before = server.url, threading.active_count()
    del server
    with pytest.raises(OSError):
        for _ in range(100):
            urllib.request.urlopen(f"{url}/models", timeout=1)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    "agent, words",
    [
        (7, "agent=7"),
        (openai.OpenAI, "agent="),
        (lambda question: 1.0, "`base_url` and `api_key`"),
    ],
)
def test_what_is_no_agent(agent, words):
    with pytest.raises(ValueError, match="must be a function") as error:
        Endpoint(agent)
    assert words in str(error.value)


def test_strict_is_a_bool():
    with pytest.raises(ValueError, match="strict='no'"):
        Endpoint(lambda base_url, api_key: 1.0, strict="no")


def test_a_missing_column_is_named_before_anything_is_sampled(preset):
    def agent(base_url, api_key, qestion):
        raise AssertionError("It must not be run.")

    with pytest.raises(ValueError, match="Did you mean 'question'"):
        make(preset, agent).fit(QUESTIONS, verbose=0)
