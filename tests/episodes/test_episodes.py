"""Episodes: what is trained is what was sampled, and nothing else counts."""

import asyncio
import dataclasses
import functools
import random
import re

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.episodes import EpisodeError, Limits
from keras_posttrain.episodes.chat import Draft
from tests.episodes.support import Batches, compiled
from tests.support import read_log, weights

WORDS = ("higher", "lower", "Guess.", "1", "2", "3", "4", "5", "the number is")


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    rng = random.Random(0)
    rows = [
        {
            "messages": [
                {"role": role, "content": rng.choice(WORDS)}
                for _ in range(rng.randint(1, 3))
                for role in ("user", "assistant")
            ]
        }
        for _ in range(200)
    ]
    directory = tmp_path_factory.mktemp("preset")
    return kpt.examples.tiny_preset(directory, rows, epochs=1, num_layers=1)


def last_int(text):
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


async def guess(chat, secret):
    hint = "Guess."
    for _ in range(3):
        number = last_int((await chat(hint)).text)
        if number == secret:
            return 1.0
        chat.reward(-0.05)
        hint = "higher" if number is None or number < secret else "lower"
    return 0.0


ROWS = [{"secret": n} for n in range(1, 5)]


def make(preset, episode=guess, kind=kpt.GRPOTask, sequence_length=128, **kw):
    settings = {"num_generations": 3, "max_completion_length": 6, **kw}
    return compiled(
        kind,
        preset,
        sequence_length,
        keras.optimizers.SGD(0.05),
        episode=episode,
        **settings,
    )


def fit(task, rows=ROWS, **kw):
    settings = {"batch_size": 2, "verbose": 0, **kw}
    return task.fit(rows, **settings)


def test_the_tokens_trained_are_those_sampled(preset, monkeypatch):
    """Concatenated, with what was said between; only what is said is
    encoded."""
    task = make(preset)
    tokenizer, given, said = task.tokenizer, {}, []
    session, encode = task.rollout.session, tokenizer.encode_mixed

    def recording():
        opened = session()
        submit = opened.submit

        def keep(request):
            future = submit(request)
            future.add_done_callback(
                lambda f: given.setdefault(
                    (*request.token_ids, *f.result()[0].token_ids),
                    len(request.token_ids),
                )
            )
            return future

        opened.submit = keep
        return opened

    def counted(text, plain):
        said.append(text)
        return encode(text, plain)

    monkeypatch.setattr(task.rollout, "session", recording)
    monkeypatch.setattr(tokenizer, "encode_mixed", counted)
    batches = Batches(task)
    fit(task)
    [first, *_] = batches.found
    assert len(batches.found) == 2
    for row in range(len(first["token_ids"])):
        used = first["segment_ids"][row] > 0
        ids = tuple(first["token_ids"][row][used].tolist())
        mask = first["completion_mask"][row][used]
        # The last turn is the longest that the engine gave.
        assert ids in given
        turns = {n: len(k) for k, n in given.items() if ids[: len(k)] == k}
        want = np.zeros(len(ids))
        for start, stop in turns.items():
            want[start:stop] = 1
        np.testing.assert_array_equal(mask, want)
    said = {x for text in said for x in re.findall(r"user\n(.*?)<", text)}
    # What a dummy says shows what the template writes.
    said = {text for text in said if not text.startswith("What is said")}
    assert said == {"Guess.", "higher", "lower"}


def test_engine_log_probs_are_the_trainers(preset):
    for packed in ({}, {"packing": True}, {"share_prefix": True}):
        task = make(preset, num_iterations=2)
        batches = Batches(task)
        fit(task, **packed)
        first = batches.found[0]
        mask = first["completion_mask"]
        gap = first["rollout_per_token_logps"] - first["old_per_token_logps"]
        assert mask.sum() > 10
        assert np.abs(gap * mask).max() < 1e-5


@functools.cache
def _trained(preset, **settings):
    task = make(preset)
    fit(task, **settings)
    return weights(task)


@pytest.mark.parametrize(
    "settings", [{"packing": True}, {"share_prefix": True}], ids=str
)
def test_layouts_make_the_same_update(preset, settings):
    want, found = _trained(preset), _trained(preset, **settings)
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6)


def test_delays_and_concurrency_change_nothing(preset):
    async def slow(chat, secret, generation):
        rng = random.Random(secret * 10 + generation)
        hint = "Guess."
        for _ in range(3):
            number = last_int((await chat(hint)).text)
            await asyncio.sleep(0.05 * rng.random())
            if number == secret:
                return 1.0
            chat.reward(-0.05)
            hint = "higher" if number is None or number < secret else "lower"
        return 0.0

    want = _trained(preset)
    for concurrency in (1, 8, 64):
        limits = Limits(concurrency=concurrency)
        episode = kpt.episodes.Episode(slow, limits=limits)
        task = make(preset, episode)
        fit(task)
        for name, value in weights(task).items():
            np.testing.assert_array_equal(value, want[name], name)


def test_a_run_resumes_bit_for_bit(preset, tmp_path):
    want = _trained(preset)
    task = make(preset)
    checkpoint = kpt.callbacks.Checkpoint(tmp_path, every=1)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    fit(task, callbacks=[checkpoint, Stop()])
    task = make(preset)
    fit(task, callbacks=[kpt.callbacks.Checkpoint(tmp_path, every=1)])
    assert task.step == 2
    for name, value in weights(task).items():
        np.testing.assert_array_equal(value, want[name], name)


def test_a_failed_episode_counts_nowhere(preset):
    """The others have the advantages and the update that they have without
    it."""

    def failing(fails):
        async def guess(chat, secret, generation):
            reply = await chat("Guess.")
            if generation == 1 and fails:
                raise EpisodeError("the server is down")
            # Rewards that differ.
            return float(generation) + len(reply.text)

        return guess

    task = make(preset, failing(True))
    batches = Batches(task)
    history = fit(task, rows=ROWS[:2]).history
    assert history["episodes/failed"] == [2.0]
    # Each was run twice.
    assert history["episodes/faults"] == [4.0 / 6]
    [batch] = batches.found
    assert batch["sequence_mask"].sum() == 4
    advantages = np.unique(batch["advantages"][batch["sequence_mask"] > 0])
    np.testing.assert_allclose(advantages.sum(), 0, atol=1e-6)
    # Of two members, the others' mean is not that of three.
    np.testing.assert_allclose(np.abs(advantages), 0.70706, atol=1e-3)


def test_without_an_episode_nothing_is_trained(preset, capsys):
    async def guess(chat):
        await chat("Guess.")
        raise EpisodeError("down")

    task = make(preset, guess)
    before = weights(task)
    history = fit(task, verbose=1).history
    assert history["skipped"] == [1.0]
    assert "every episode failed" in capsys.readouterr().out
    for name, value in weights(task).items():
        np.testing.assert_array_equal(value, before[name])


def test_an_error_of_ones_own_stops_the_run(preset):
    async def guess(chat, secret):
        await chat("Guess.")
        return 1.0 / (secret - 2)

    task = make(preset, guess)
    with pytest.raises(ZeroDivisionError) as caught:
        fit(task, shuffle=False)
    assert "row 1" in caught.value.__notes__[0]
    assert "'chat': 1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "result", [None, "1", float("nan"), {"chat": 1.0, "x": 2.0}, [1.0]]
)
def test_a_reward_that_is_none(preset, result):
    async def guess(chat):
        await chat("Guess.")
        return result

    with pytest.raises(ValueError, match="must return its reward"):
        fit(make(preset, guess))


def test_limits_end_an_episode(preset):
    endings = {}

    async def endless(chat):
        while True:
            reply = await chat("Guess.")
            chat.reward(0.25)
            endings[reply.ended] = endings.get(reply.ended, 0) + 1

    for limits, ended in (
        ({"turns": 2}, "turns"),
        ({"tokens": 9, "after_cut": "continue"}, "tokens"),
        ({"context": 40, "after_cut": "continue"}, "context"),
    ):
        endings.clear()
        episode = kpt.episodes.Episode(endless, limits=Limits(**limits))
        task = make(preset, episode)
        fit(task, rows=[{"a": 1}] * 2)
        assert set(task.last_rollout["finish_reason"]) == {ended}
        assert min(task.last_rollout["reward"]) > 0
        # What a context has room for is known when more is said.
        assert endings.get(ended) == 6 or ended == "context"


def test_what_has_no_room_for_an_answer_is_left_out(preset):
    """A long text after a turn is in no segment: it may fit into no row."""

    async def long(chat):
        reply = await chat("Guess.")
        chat.reward(float(len(reply.text)))
        await chat("higher " * 200)

    limits = Limits(after_cut="continue")
    task = make(preset, kpt.episodes.Episode(long, limits=limits))
    batches = Batches(task)
    fit(task, rows=[{"a": 1}] * 2, share_prefix=True)
    assert set(task.last_rollout["finish_reason"]) == {"context"}
    assert batches.found[0]["completion_mask"].sum() > 0


def test_a_slow_episode_is_run_again_and_left_out(preset):
    async def slow(chat, generation):
        reply = await chat("Guess.")
        if generation == 0:
            await asyncio.sleep(60)
        return float(len(reply.text) + generation)

    # Its programs are there before the time is counted.
    make(preset).evaluate(ROWS[:2], num_generations=3, verbose=0)
    limits = Limits(seconds=4.0, retries=0)
    task = make(preset, kpt.episodes.Episode(slow, limits=limits))
    history = fit(task, rows=[{"a": 1}] * 2).history
    assert history["episodes/failed"] == [2.0]


def test_contexts_begun_anew_and_branches(preset):
    """All that was sampled is trained, once; a trajectory weighs 1."""

    async def summary(chat, secret):
        await chat("Guess.")
        other = chat.fork()
        await asyncio.gather(chat("higher"), other("lower"))
        chat.restart("the number is")
        reply = await chat()
        return float(len(reply.text) + secret)

    for settings in ({}, {"packing": True}, {"share_prefix": True}):
        task = make(preset, summary)
        batches = Batches(task)
        fit(task, rows=ROWS[:2], **settings)
        [batch] = batches.found
        np.testing.assert_allclose(batch["sequence_mask"].sum(), 6, rtol=1e-6)
        sampled = sum(task.last_rollout["tokens"])
        assert batch["completion_mask"].sum() == sampled


def test_two_players_are_two_groups(preset):
    async def duel(x, o, secret):
        a = last_int((await x("Guess.")).text)
        b = last_int((await o("Guess.")).text)
        won = float((a or 0) > (b or 0)) - float((a or 0) < (b or 0))
        return {x: won, o: -won}

    task = make(preset, duel)
    batches = Batches(task)
    fit(task, rows=ROWS[:2])
    assert batches.found[0]["sequence_mask"].sum() == 12
    rewards = np.array(task.last_rollout["reward"]).reshape(2, 2, 3)
    np.testing.assert_array_equal(rewards[:, 0], -rewards[:, 1])


async def higher(x, o, secret):
    a = last_int((await x("Guess.")).text)
    b = last_int((await o("Guess.")).text)
    return float((a or 0) > (b or 0)) + secret / 10


def frozen_run(preset, lora, tmp_path=None, stop=False):
    """Returns the weights at the end, and a copy's after each step."""
    episode = kpt.episodes.Episode(
        higher, opponents={"o": kpt.episodes.Frozen(every=2, share=0.75)}
    )
    task = compiled(
        kpt.GRPOTask,
        preset,
        128,
        keras.optimizers.SGD(0.5),
        lora=lora,
        episode=episode,
        num_generations=3,
        max_completion_length=6,
    )
    said = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            run = self.model.run
            [opponent] = run.opponents.values()
            said.append([np.array(x) for x in opponent.copy.values])
            self.model.stop_training = stop and run.rollouts == 3

    callbacks = [Stop()]
    if tmp_path is not None:
        callbacks.append(kpt.callbacks.Checkpoint(tmp_path, every=1))
    fit(task, epochs=2, callbacks=callbacks)
    return weights(task), said


@pytest.mark.parametrize(
    "lora", [None, kpt.LoRA(rank=4)], ids=["full", "lora"]
)
def test_a_frozen_copy_plays(preset, tmp_path, lora):
    """It is renewed every two rollouts, and is part of a checkpoint."""
    want, copies = frozen_run(preset, lora)
    assert len(copies) == 4
    same = [
        all(np.array_equal(*pair) for pair in zip(a, b))
        for a, b in zip(copies, copies[1:])
    ]
    assert same == [False, True, False]
    assert len(copies[0]) == len(want)
    frozen_run(preset, lora, tmp_path, stop=True)
    found, _ = frozen_run(preset, lora, tmp_path)
    for name, value in found.items():
        np.testing.assert_array_equal(value, want[name], name)


def test_an_opponent_is_not_trained(preset):
    async def duel(x, o, secret):
        a = last_int((await x("Guess.")).text)
        b = last_int((await o("Guess.")).text)
        return float((a or 0) > (b or 0))

    episode = kpt.episodes.Episode(duel, opponents={"o": lambda messages: "3"})
    task = make(preset, episode)
    batches = Batches(task)
    fit(task, rows=ROWS[:2])
    assert batches.found[0]["sequence_mask"].sum() == 6


def test_an_opponent_moves_at_random_by_its_seed(preset):
    async def duel(x, o, secret):
        a = last_int((await x("Guess.")).text)
        said = [(await o("Guess.")).text, (await o("Again.")).text]
        return float((a or 0) > last_int(said[0]) + last_int(said[1]))

    def run(concurrency):
        def at_random(messages, seed):
            seeds.append(seed)
            return str(random.Random(seed).randint(0, 4))

        seeds = []
        episode = kpt.episodes.Episode(
            duel,
            opponents={"o": at_random},
            limits=Limits(concurrency=concurrency),
        )
        task = make(preset, episode)
        fit(task, rows=ROWS[:2])
        return sorted(seeds), weights(task)

    seeds, want = run(concurrency=1)
    assert len(set(seeds)) == len(seeds) > 2
    again, found = run(concurrency=64)
    assert again == seeds
    for name, value in found.items():
        np.testing.assert_array_equal(value, want[name], name)


@pytest.mark.parametrize("kind", [kpt.GRPOTask, kpt.PPOTask])
def test_rewards_score_the_messages(preset, kind):
    def polite(completions, trajectories, secret):
        assert [t.row for t in trajectories]
        return [float(m[-1]["content"] == "5") for m in completions]

    settings = {} if kind is kpt.GRPOTask else {"num_generations": 1}
    task = make(
        preset, kind=kind, rewards=[polite], reward_weights=[2.0], **settings
    )
    history = fit(task).history
    assert {"rewards/guess/mean", "rewards/polite/mean"} <= set(history)


@pytest.mark.parametrize("kind", [kpt.GRPOTask, kpt.PPOTask])
def test_an_episode_needs_no_other_rewards(preset, kind):
    task = kind.from_preset(preset, sequence_length=128)
    with pytest.raises(ValueError, match="`rewards`"):
        task.compile(num_generations=2, max_completion_length=4)
    task.compile(episode=guess, num_generations=2, max_completion_length=4)
    names = {name for name in fit(task).history if "rewards/" in name}
    assert names and all("/guess/" in name for name in names)


def test_turn_advantages_in_the_batch(preset, tmp_path):
    task = make(preset, advantages=kpt.losses.TurnAdvantages())
    batches = Batches(task)
    fit(task, callbacks=[kpt.callbacks.MetricsLog(tmp_path)])
    batch = batches.found[0]
    assert batch["advantages"].shape == batch["token_ids"].shape
    assert (batch["advantages"][batch["completion_mask"] == 0] == 0).all()
    log = read_log(tmp_path)
    assert all(line["episodes/turns"] >= 1 for line in log)
    assert all(line["rollout/recomputed_tokens"] == 0 for line in log)


def test_evaluate_runs_episodes(preset):
    task = make(preset)
    metrics = task.evaluate(ROWS, num_generations=4, verbose=0)
    assert 0 <= metrics["pass@4"] <= 1
    assert "rewards/guess/mean" in metrics


@pytest.mark.parametrize("kind", [kpt.GRPOTask, kpt.PPOTask])
def test_a_first_turn_without_room_is_refused(preset, kind, capfd):
    rows = [{"secret": 1}, {"secret": 2}]

    async def opening(chat, secret):
        await chat("Guess a number. " * (50 if secret == 2 else 1))
        await chat("Guess a number. " * 50)
        return 1.0

    settings = {"num_generations": 1} if kind is kpt.PPOTask else {}
    task = make(preset, opening, kind, **settings)
    with pytest.raises(ValueError) as caught:
        fit(task, rows, shuffle=False)
    for part in ("row 1 that", "of 128 in all", "`sequence_length`"):
        assert part in str(caught.value), str(caught.value)
    # A later turn without room ends its episode.
    fit(task, rows[:1])
    task.truncation = "drop"
    fit(task, rows)
    fit(task, rows[1:], verbose=2)
    assert "no episode had room for a turn" in capfd.readouterr().out


@pytest.mark.parametrize(
    "loss, served, staleness",
    [
        ("auto", False, 0),
        ("auto", False, 1),
        ("auto", True, 0),
        (kpt.losses.ReinforceLoss(), True, 1),
    ],
)
def test_distillation_makes_a_step_a_rollout(
    preset, tmp_path, loss, served, staleness
):
    """Whatever segments its episodes have, and where they have none."""

    async def episode(x, o, secret):
        if secret == 2:
            raise kpt.episodes.EpisodeError("The server is down.")
        for chat in (x, o):
            await chat("Guess.")
            chat.restart("So far nothing was guessed.")
            await chat()

    teacher, top_k = preset, None
    if served:
        model = kpt.SFTTask.from_preset(preset, sequence_length=128)
        teacher, top_k = kpt.rollout.NativeRollout(), 8
        teacher.set_model(model)
    task = kpt.DistillTask.from_preset(
        preset, teacher=teacher, sequence_length=128
    )
    task.compile(
        keras.optimizers.SGD(0.05),
        loss,
        top_k=top_k,
        on_policy=True,
        episode=kpt.episodes.Episode(
            episode, limits=kpt.episodes.Limits(after_cut="continue")
        ),
        num_generations=2,
        max_completion_length=4,
    )
    fit(
        task,
        [{"secret": n} for n in (1, 2, 3)],
        batch_size=1,
        epochs=2,
        shuffle=False,
        max_staleness=staleness,
        callbacks=[kpt.callbacks.MetricsLog(tmp_path)],
    )
    log = read_log(tmp_path)
    assert [line["step"] for line in log] == list(range(1, 7))
    assert [line["skipped"] for line in log] == [0, 1, 0, 0, 1, 0]
    assert [line["episodes/turns"] for line in log] == [2, 0, 2, 2, 0, 2]
    assert task.step == 6


def test_a_students_advantages_are_the_trainers(preset, monkeypatch):
    """Time decides how an engine rounds the log-probabilities of turns."""
    add = Draft.add_sampled

    def shifted(self, completion, turn):
        logps = completion.per_token_logps + 1
        completion = dataclasses.replace(completion, per_token_logps=logps)
        add(self, completion, turn)

    class Keep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.batches = self.model.run.collection.batches

    def advantages():
        task = kpt.DistillTask.from_preset(
            preset, teacher=preset, sequence_length=128
        )
        task.compile(
            loss=kpt.losses.ReinforceLoss(),
            on_policy=True,
            episode=guess,
            max_completion_length=4,
        )
        fit(task, ROWS[:2], callbacks=[keep := Keep()])
        return [batch["advantages"] for batch in keep.batches]

    ours = advantages()
    monkeypatch.setattr(Draft, "add_sampled", shifted)
    np.testing.assert_array_equal(advantages(), ours)


def test_a_student_is_taught_on_its_own_episodes(preset):
    async def two(chat, secret):
        await chat("Guess.")
        await chat(["higher", "lower"][secret % 2])

    task = kpt.DistillTask.from_preset(
        preset, teacher=preset, sequence_length=128
    )
    task.compile(
        keras.optimizers.SGD(0.05),
        on_policy=True,
        episode=two,
        num_generations=2,
        max_completion_length=6,
    )
    history = fit(task, packing=True).history
    assert history["episodes/turns"] == [2.0]
    # The teacher is the student as it was.
    assert history["divergence"][0] < 1e-3


def test_an_episode_is_shown(preset, capsys):
    task = make(preset)
    trajectory = task.play(secret=3)
    out = capsys.readouterr().out
    assert "user: Guess." in out
    assert f"reward={trajectory.reward}" in out
    assert trajectory.messages[1]["role"] == "assistant"


def test_a_person_takes_a_seat(preset, capsys, monkeypatch):
    async def duel(x, o):
        a = await x("Guess.")
        b = await o(a.text)
        return {x: 1.0, o: float(b.text == "5")}

    monkeypatch.setattr("builtins.input", lambda prompt: "5")
    task = make(preset, duel)
    trajectory = task.play(human="o")
    assert trajectory.player == "x"
    assert "user: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="one of several players"):
        task.play(guess, human="chat", secret=1)


def test_what_the_template_shows(preset):
    """A segment ends where the template leaves something out."""
    segments = {}

    async def two(chat, secret):
        await chat("Guess.")
        reply = await chat("higher")
        return float(len(reply.text) + secret)

    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and drops %}...{% else %}"
        "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for drops in (False, True):
        task = kpt.GRPOTask.from_preset(
            preset,
            sequence_length=128,
            chat_template=template,
            chat_template_kwargs={"drops": drops},
        )
        task.compile(
            keras.optimizers.SGD(0.05),
            episode=kpt.episodes.Episode(two, history="template"),
            num_generations=2,
            max_completion_length=6,
        )
        batches = Batches(task)
        fit(task, rows=ROWS[:2])
        [batch] = batches.found
        segments[drops] = int((batch["sequence_mask"] > 0).sum())
        np.testing.assert_allclose(batch["sequence_mask"].sum(), 4, rtol=1e-6)
        assert batch["completion_mask"].sum() == sum(
            task.last_rollout["tokens"]
        )
    assert segments == {False: 4, True: 8}


class Guessing:
    """An environment; the columns of a row are the arguments of `reset`."""

    def reset(self, secret):
        self.secret = secret
        return "Guess."

    def step(self, text):
        right = last_int(text) == self.secret
        return "higher", float(right), right


def test_an_environment_is_an_episode(preset):
    gym = kpt.episodes.Gym(Guessing)
    task = make(preset, kpt.episodes.Episode(gym, limits=Limits(turns=2)))
    history = fit(task).history
    assert "rewards/Guessing/mean" in history
    assert 1 <= history["episodes/turns"][0] <= 2
    assert (
        {"turns"}
        <= set(task.last_rollout["finish_reason"])
        <= {
            "turns",
            "done",
        }
    )


def test_an_environment_names_the_column_that_it_lacks(preset):
    task = make(preset, kpt.episodes.Gym(Guessing))
    with pytest.raises(TypeError, match="secret"):
        fit(task, rows=[{"number": 1}] * 2)


def test_branches_share_the_limit_of_turns(preset):
    async def talk(chat):
        others = [chat.fork() for _ in range(3)]
        await asyncio.gather(*(other("Guess.") for other in others))
        return 1.0

    episode = kpt.episodes.Episode(talk, limits=Limits(turns=2))
    task = make(preset, episode)
    trajectory = task.play()
    assert trajectory.ended == "turns"
    assert len(trajectory.turn_rewards) <= 2


def test_a_chat_samples_one_turn_at_a_time(preset):
    async def talk(chat):
        await asyncio.gather(chat("Guess."), chat("higher"))
        return 1.0

    task = make(preset, talk)
    with pytest.raises(ValueError, match="one turn at a time"):
        task.play()


def test_a_misspelt_column_is_no_player(preset):
    async def episode(chat, secrte):
        raise AssertionError("It must not be run.")

    with pytest.raises(ValueError, match="Did you mean 'secret'"):
        fit(make(preset, episode))

    async def duel(chat: kpt.episodes.Chat, secret_chat: kpt.episodes.Chat):
        return {chat: 0.0, secret_chat: 0.0}

    kept = kpt.episodes.Episode(duel)
    assert kept.players(["secret_chats"]) == ["chat", "secret_chat"]


def test_the_report_of_rows_without_prompts(preset):
    _, report = make(preset).prepare_prompts(ROWS)
    assert str(report) == "dataset: 4 prompts, 4 kept, 0 dropped, 0 cut"
