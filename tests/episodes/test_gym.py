"""Episodes from environments of every shape, in a thread of their own."""

import asyncio
import dataclasses
import threading
import time

import numpy as np
import pytest

from keras_posttrain.episodes import gym
from keras_posttrain.episodes.chat import Ended
from keras_posttrain.episodes.errors import EpisodeError
from keras_posttrain.episodes.gym import Gym

ACTIONS = ["low", "right", "late"]


@dataclasses.dataclass
class Reply:
    text: str
    ended: str | None


class Chat:
    """Notes what it is given, and replies with given texts."""

    def __init__(self, texts=ACTIONS, messages=()):
        self.texts = list(texts)
        self.messages = list(messages)
        self.said, self.rewards = [], []

    async def __call__(self, said=None):
        self.said.append(said)
        self.rewards.append([])
        await asyncio.sleep(0)
        if not self.texts:
            raise Ended("turns")
        text = self.texts.pop(0)
        return Reply(text, None if self.texts else "turns")

    def reward(self, value):
        self.rewards[-1].append(value)


def play(episode, chat=None, **columns):
    chat = chat or Chat()
    return asyncio.run(episode(chat, **columns)), chat


class Plain:
    """Three values a step; the second action is right."""

    def reset(self, secret):
        return f"guess {secret[0]}..."

    def step(self, text):
        done = text == "right"
        return f"not {text}", 1.0 if done else -0.5, done


class Tunix(Plain):
    def reset(self, **columns):
        assert columns == {"secret": "abc", "other": 3}
        return f"guess {columns['secret'][0]}..."

    def step(self, text):
        return *super().step(text), {"more": 1}


class Async(Plain):
    async def reset(self, secret):
        await asyncio.sleep(0)
        return super().reset(secret)

    async def step(self, text):
        await asyncio.sleep(0)
        return super().step(text)


class Gymnasium:
    def __init__(self, secret):
        self.secret = secret

    def reset(self, *, seed=None, options=None):
        assert seed is None and options is None
        return f"guess {self.secret[0]}...", {"info": 1}

    def step(self, text):
        observation, reward, done = Plain().step(text)
        return observation, np.float32(reward), done, False, {}


class Truncated(Gymnasium):
    def step(self, text):
        observation, reward, done, _, info = super().step(text)
        return observation, reward, False, done, info


class OpenEnv:
    @dataclasses.dataclass
    class Result:
        observation: str
        reward: float | None = None
        done: bool = False

    def reset(self, secret):
        return self.Result(f"guess {secret[0]}...")

    def step(self, text):
        return self.Result(*Plain().step(text))


@pytest.mark.parametrize(
    "make", [Plain, Tunix, Async, Gymnasium, Truncated, OpenEnv]
)
def test_shapes(make):
    reward, chat = play(Gym(make), secret="abc", other=3)
    assert reward == 0.0
    assert chat.said == ["guess a...", "not low"]
    assert chat.rewards == [[-0.5], [1.0]]
    assert {type(r) for turn in chat.rewards for r in turn} == {float}


@pytest.mark.parametrize("known", [False, True])
def test_skyrl_gym(known):
    """Messages; those of the prompt are not said twice."""

    class Env:
        def init(self, prompt):
            return [*prompt, {"role": "user", "content": "go"}], {}

        def step(self, action):
            said = [{"role": "user", "content": f"not {action}"}]
            return {
                "observations": said,
                "reward": 0.5,
                "done": action == "right",
                "metadata": {},
            }

    prompt = [{"role": "system", "content": "play"}]
    chat = Chat(messages=prompt if known else ())
    play(Gym(Env), chat, prompt=prompt)
    go = {"role": "user", "content": "go"}
    assert chat.said == [
        [go] if known else [*prompt, go],
        [{"role": "user", "content": "not low"}],
    ]
    assert chat.rewards == [[0.5], [0.5]]


def test_nothing_to_say():
    """The prompt of the row is all that there is."""

    class Env:
        def init(self, prompt):
            return prompt, {}

        def step(self, action):
            return {"observations": [], "reward": 1, "done": True}

    prompt = [{"role": "user", "content": "1 + 1?"}]
    _, chat = play(Gym(Env), Chat(messages=prompt), prompt=prompt)
    assert chat.said == [None] and chat.rewards == [[1.0]]


class TextArena:
    """What the player said is repeated; rewards come from `close`."""

    rewards = {0: 0.75}

    def reset(self, num_players, seed=None):
        assert num_players == 1
        self.seen, self.player = [(-1, "rules", "PROMPT"), (-1, "go", 1)], 0

    def get_observation(self):
        seen, self.seen = self.seen, []
        return self.player, seen

    def step(self, action):
        self.seen += [(0, action, "ACTION"), (-1, f"not {action}", "GAME")]
        return action == "right", {}

    def close(self):
        return self.rewards, {0: {"turns": 2}}


def test_textarena():
    reward, chat = play(Gym(TextArena), seed=1, other=2)
    assert chat.said == ["rules\ngo", "not low"]
    assert chat.rewards == [[], []] and reward == 0.75

    class Older(TextArena):
        def close(self):
            return self.rewards

    assert play(Gym(Older))[0] == 0.75

    class Unfinished(TextArena):
        rewards = None

    assert play(Gym(Unfinished))[0] == 0.0

    class Broken(TextArena):
        def close(self):
            raise KeyError("lost")

    with pytest.raises(EpisodeError, match="failed: KeyError: 'lost'"):
        play(Gym(Broken))

    class Two(TextArena):
        def step(self, action):
            self.player = 1
            return super().step(action)

    with pytest.raises(ValueError, match="games of one player.*player 1"):
        play(Gym(Two))


def test_observe_and_act():
    class Grid:
        def reset(self):
            return np.zeros(2, int)

        def step(self, action):
            assert type(action) is int
            return np.full(2, action), float(action), action == 2

    episode = Gym(Grid, observe=lambda grid: f"at {grid.tolist()}", act=len)
    _, chat = play(episode, Chat(["", "a", "ab", "abc"]))
    assert chat.said == ["at [0, 0]", "at [0, 0]", "at [1, 1]"]
    assert chat.rewards == [[0.0], [1.0], [2.0]]
    with pytest.raises(ValueError, match="Received: array.*`observe=`"):
        play(Gym(Grid, act=len))


def test_the_last_turn_is_judged_though_nothing_follows():
    chat = Chat(["low"])
    with pytest.raises(Ended, match="turns"):
        play(Gym(Plain), chat, secret="abc")
    assert chat.said[0] == "guess a..." and chat.rewards[0] == [-0.5]


def test_its_name_is_that_of_the_environment():
    assert Gym(Plain).__name__ == "Plain"
    assert Gym(Plain) == Gym(Plain) and "Plain" in repr(Gym(Plain))


# Threads and ends


class Watched(Plain):
    """Notes the threads of its calls, and how often two are at once."""

    log = []

    def __init__(self):
        self.threads, self.busy, self.closed = [], False, 0
        self.log.append(self)
        self.note()

    def note(self):
        assert not self.busy
        self.busy = True
        self.threads.append(threading.get_ident())
        time.sleep(0.002)
        self.busy = False

    def reset(self):
        self.note()
        return "go"

    def step(self, text):
        self.note()
        if text == "fail":
            raise RuntimeError("broken")
        if text == "hang":
            time.sleep(0.5)
        return super().step(text)

    def close(self):
        self.note()
        self.closed += 1


@pytest.fixture
def watched():
    Watched.log = []
    return Watched.log


def test_one_thread_each_all_at_once(watched):
    before = threading.active_count()

    async def main():
        chats = [Chat(["a", "b", "right", "c"]) for _ in range(32)]
        await asyncio.gather(*map(Gym(Watched), chats))
        return chats

    chats = asyncio.run(main())
    assert all(len(chat.said) == 3 for chat in chats)
    assert len(watched) == 32
    for environment in watched:
        assert len(environment.threads) == 6 and environment.closed == 1
        assert len(set(environment.threads)) == 1
        assert environment.threads[0] != threading.get_ident()
    assert len({e.threads[0] for e in watched}) > 1
    # The threads have ended.
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_it_is_closed_whatever_happens(watched):
    with pytest.raises(RuntimeError, match="broken"):
        play(Gym(Watched), Chat(["a", "fail", "b"]))
    assert watched[-1].closed == 1

    class Failing(Chat):
        async def __call__(self, said=None):
            raise EpisodeError("the engine is gone")

    with pytest.raises(EpisodeError, match="the engine is gone"):
        play(Gym(Watched), Failing())
    assert watched[-1].closed == 1

    class Waiting(Chat):
        async def __call__(self, said=None):
            await asyncio.sleep(60)

    async def cancelled():
        task = asyncio.create_task(Gym(Watched)(Waiting()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert watched[-1].closed == 1


def test_a_slow_environment_is_an_episode_error(watched):
    """It is closed when its step has ended, not while another thread uses
    it."""
    with pytest.raises(EpisodeError, match="'step' of Watched took.* 0.2 s"):
        play(Gym(Watched, seconds=0.2), Chat(["hang", "b"]))
    assert watched[-1].closed == 1
    assert len(set(watched[-1].threads)) == 1


def test_errors_of_close_are_counted(monkeypatch):
    class Bad(Plain):
        def close(self):
            raise OSError("no such file")

    episode = Gym(Bad)
    for _ in range(2):
        play(episode, secret="abc")
    assert episode.close_errors == {"OSError": 2}

    monkeypatch.setattr(gym, "CLOSE_SECONDS", 0.1)

    class Hanging(Plain):
        def close(self):
            time.sleep(1)

    episode = Gym(Hanging)
    start = time.monotonic()
    play(episode, secret="abc")
    assert time.monotonic() - start < 0.9
    assert episode.close_errors == {"EpisodeError": 1}


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Gym(3), "`make` must be a class or a function.*make=3"),
        (lambda: Gym(Plain, observe="x"), "observe='x'"),
        (lambda: play(Gym(object)), "the methods `reset` and `step`"),
        (
            lambda: play(Gym(lambda: Odd(3))),
            "`step` must return.*Received: 3",
        ),
    ],
)
def test_what_makes_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()


class Odd:
    def __init__(self, result):
        self.result = result

    def reset(self):
        return "go"

    def step(self, text):
        return self.result
