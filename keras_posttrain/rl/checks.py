"""Checks of what users pass to tasks that sample."""

import contextlib
import dataclasses
import inspect
import numbers

import keras
import numpy as np

from keras_posttrain.data.chat.bridge import Bridges
from keras_posttrain.distribution import processes
from keras_posttrain.episodes.episode import Episode
from keras_posttrain.episodes.seat import Table
from keras_posttrain.losses import (
    DrGRPOLoss,
    GroupAdvantages,
    ImportanceCorrection,
    LeaveOneOutAdvantages,
    PolicyLoss,
    ReinforceLoss,
    SumLoss,
)
from keras_posttrain.rewards import ModelReward, run
from keras_posttrain.rewards import reward as reward_lib
from keras_posttrain.rl.episode_sampler import Episodes
from keras_posttrain.rl.sampling import Sampling, Scoring
from keras_posttrain.rollout import Rollout
from keras_posttrain.rollout.rollout import need_routed_experts
from keras_posttrain.training import checks

OLD_LOG_PROBS = ("trainer", "rollout")


def policy_loss(loss):
    if not isinstance(loss, PolicyLoss):
        raise ValueError(
            "`loss` must be 'auto' or a policy loss such as "
            "`kpt.losses.GRPOLoss()`, or your own subclass of "
            f"`kpt.losses.PolicyLoss`. Received: loss={loss!r}"
        )


def training_temperature(temperature):
    is_number = isinstance(temperature, numbers.Real)
    if not is_number or not 0 < temperature < float("inf"):
        raise ValueError(
            "`temperature` must be a finite number above 0: with greedy "
            "decoding all completions of a prompt are equal. "
            f"Received: temperature={temperature!r}"
        )


def staleness(max_staleness, engine, rewards=()):
    is_int = isinstance(max_staleness, numbers.Integral)
    if not is_int or isinstance(max_staleness, bool) or max_staleness < 0:
        raise ValueError(
            "`max_staleness` must be an int of at least 0, how many rollouts "
            "may be begun before their turn. "
            f"Received: max_staleness={max_staleness!r}"
        )
    if max_staleness and processes.count() > 1 and not engine.is_apart:
        raise ValueError(
            "In several processes rollouts overlap with training on devices "
            "of their own: divide them by `kpt.distribution.split` and pass "
            "`compile(rollout=kpt.rollout.NativeRollout(distribution=...))`, "
            "use a server (`kpt.rollout.VLLMRollout(url=...)`), or "
            f"max_staleness=0. Received: max_staleness={max_staleness},"
            f" {processes.count()} processes, a {type(engine).__name__} "
            "without devices of its own"
        )
    for each in rewards if max_staleness else ():
        # Programs of two threads on the same several devices may wait for
        # each other forever.
        if isinstance(each, ModelReward) and each.num_devices > 1:
            raise ValueError(
                "A reward model on several devices cannot score "
                "while the policy is trained. Use max_staleness=0, or a "
                "server that scores (`kpt.rewards.JudgeReward`). Received: "
                f"max_staleness={max_staleness}, a ModelReward of "
                f"{type(each.model).__name__} on {each.num_devices} devices"
            )


def routing_replay(is_on, engine, policy, episode):
    """Raises a `ValueError` for what cannot report the experts of tokens."""
    if not is_on:
        return
    need_routed_experts(engine, policy)
    if episode is not None:
        raise ValueError(
            "`routing_replay` is for completions of prompts: the turns of an "
            "episode do not have their experts. Leave one of the two out. "
            f"Received: routing_replay=True, episode={episode.name!r}"
        )


def replay_in_turn(is_on, max_staleness):
    """Raises a `ValueError` for the replay of samples of several weights."""
    if is_on and max_staleness:
        raise ValueError(
            "`routing_replay` is for rollouts that take turns with training: "
            "a sample that continues with new weights has experts of both. "
            f"Use max_staleness=0. Received: max_staleness={max_staleness}, "
            "routing_replay=True"
        )


@contextlib.contextmanager
def loss_of_run(loss, max_staleness, old_log_probs, set_loss):
    """Sets the loss for samples of earlier weights, for the time of a run."""
    new = corrected(loss, old_log_probs) if max_staleness else loss
    if new is loss:
        yield
        return
    set_loss(new)
    try:
        yield
    finally:
        set_loss(loss)


def corrected(loss, old_log_probs):
    """Returns a policy loss that corrects for samples of earlier weights.

    If the engine's log-probabilities are the old ones, the ratio of the loss
    corrects already.
    """
    if isinstance(loss, SumLoss):
        losses = [corrected(part, old_log_probs) for part in loss.losses]
        if all(new is old for new, old in zip(losses, loss.losses)):
            return loss
        return dataclasses.replace(loss, losses=losses)
    if not isinstance(loss, PolicyLoss) or loss.correction is not None:
        return loss
    if old_log_probs == "rollout":
        return loss
    return dataclasses.replace(loss, correction=ImportanceCorrection())


def whole_distribution(top_k, top_p, min_p):
    for name, value, off in (
        ("top_k", top_k, 0),
        ("top_p", top_p, 1),
        ("min_p", min_p, 0),
    ):
        if value is not None and value != off:
            raise ValueError(
                f"`{name}` leaves tokens out of the distribution that is "
                "sampled from, which the training step does not: its "
                "log-probabilities would be those of another policy. Use a "
                f"lower `temperature` instead. Received: {name}={value!r}"
            )


def evaluation(
    training,
    num_generations,
    temperature,
    answer=None,
    names=("num_generations", "temperature"),
):
    """Checks the settings of an evaluation and returns its temperature.

    `training` is the temperature of training, `names` are those of the first
    two settings in messages.
    """
    checks.positive_int(names[0], num_generations)
    name = names[1]
    if isinstance(temperature, str) and temperature == "auto":
        temperature = 0.0 if num_generations == 1 else training
    is_number = isinstance(temperature, numbers.Real)
    if not is_number or not 0 <= temperature < float("inf"):
        raise ValueError(
            f"`{name}` must be 'auto', 0 (greedy) or a positive number. "
            f"Received: {name}={temperature!r}"
        )
    if answer is not None and not callable(answer):
        raise ValueError(
            "`answer` must be a function of a completion's text, or None. "
            f"Received: answer={answer!r}"
        )
    return temperature


def rewards(given):
    """Returns the list of rewards for what a user passed to `compile`."""
    if callable(given):
        given = [given]
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError(
            "`rewards` must be a list of at least one reward function. "
            f"Received: rewards={given!r}. Pass for example "
            "`rewards=[correct]`."
        )
    found = []
    for i, function in enumerate(given):
        reward_lib.check_callable(function, f"`rewards[{i}]`")
        if isinstance(function, keras.Model):
            # Its own signature says nothing.
            try:
                function = ModelReward(function)
            except ValueError as error:
                raise ValueError(
                    f"`rewards[{i}]` is a model that gives no scores: {error}"
                ) from error
        found.append(function)
    return found


def episode(given, tokenizer):
    """Returns the `Episode` of what a user passed to `compile`, or `None`."""
    if given is None:
        return None
    found = Episode.of(given)
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError(
            "An episode is a conversation, which needs a tokenizer with a "
            "chat template. Received: "
            + ("tokenizer=None" if tokenizer is None else "chat_template=None")
            + ". Pass `chat_template=` with a Jinja2 template."
        )
    return found


def episodes(
    given, prompts, sampling, tokenizer, lengths, template_kwargs, truncation
):
    """Makes `Episodes`, and checks that its turns can be bridged.

    Args:
        given: `Episode`.
        prompts: list or stream of `Prompt`s.
        sampling: `Sampling`.
        lengths: list of ints, limits of a segment's tokens, or `None`s.
        template_kwargs: dict of variables for the chat template.
        truncation: string, as of a task.
    """
    bridges = Bridges(tokenizer, template_kwargs)
    if given.history == "append":
        bridges.check(*getattr(given.function, "says", ()))
    lengths = [*lengths, given.limits.context]
    table = Table(
        bridges,
        tokenizer,
        given.limits,
        given.history,
        context=min(x for x in lengths if x is not None),
        max_tokens=sampling.max_completion_length,
        temperature=sampling.temperature,
        stop_token_ids=sampling.stop_token_ids,
        refuses_long=truncation == "error",
    )
    first = next(iter(prompts), None)
    columns = () if first is None else first.columns
    return Episodes(given, table, given.players(columns))


def row_columns(given, functions, columns, name):
    """Checks that rewards and the episode can be called on the columns."""
    columns = list(columns)
    if given is None:
        run.check_rewards(functions, columns, f"`{name}`")
        return
    given.players(columns)
    if functions:
        columns = [c for c in columns if c != "prompt"] + ["trajectories"]
        run.check_rewards(functions, columns, f"`{name}`")


def weights(reward_weights, names):
    """Returns weights of the reward functions as an array, or `None`."""
    if reward_weights is None:
        return None
    try:
        array = np.asarray(reward_weights, "float64")
    except (TypeError, ValueError):
        array = np.asarray(np.nan)
    if array.shape != (len(names),) or not np.isfinite(array).all():
        raise ValueError(
            "`reward_weights` must have one finite number for each reward "
            f"function, of which there are {len(names)} ({', '.join(names)}). "
            f"Received: reward_weights={reward_weights!r}"
        )
    return array


def engine(rollout, own):
    """Returns the rollout engine for what a user passed to `compile`.

    `own` is the one for `"auto"`.
    """
    if isinstance(rollout, str) and rollout == "auto":
        return own
    if not isinstance(rollout, Rollout):
        raise ValueError(
            "`rollout` must be 'auto' or an engine such as "
            f"`kpt.rollout.NativeRollout()`. Received: rollout={rollout!r}"
        )
    return rollout


def advantages(kind, loss, num_generations):
    """Returns the advantages for what a user passed to `compile`."""
    if isinstance(kind, str) and kind == "auto":
        kind = auto_advantages(loss)
    if isinstance(kind, type) or not callable(kind):
        raise ValueError(
            "`advantages` must be 'auto', an object such as "
            "`kpt.losses.GroupAdvantages()`, or a function `f(rewards, "
            f"num_generations, weights)`. Received: advantages={kind!r}"
        )
    if hasattr(kind, "check"):
        kind.check(num_generations)
    return kind


def auto_advantages(loss):
    """Returns the advantages that suit a loss."""
    if isinstance(loss, DrGRPOLoss):
        return GroupAdvantages(scale="none")
    if isinstance(loss, ReinforceLoss):
        return LeaveOneOutAdvantages()
    return GroupAdvantages()


def takes_kl(kind):
    """Returns whether advantages have `beta` and an argument `kl`."""
    if not getattr(kind, "beta", 0):
        return False
    return "kl" in inspect.signature(kind).parameters


def old_log_probs(source):
    if source not in OLD_LOG_PROBS:
        raise ValueError(
            "`old_log_probs` must be 'trainer', computed again before the "
            "first update of a rollout, or 'rollout', as the engine reports "
            f"them. Received: old_log_probs={source!r}"
        )


def stop_token_ids(ids, tokenizer, vocabulary_size):
    """Returns the ids that end a completion, as a tuple."""
    ids = checks.stop_token_ids(ids)
    if ids == "auto":
        ids = () if tokenizer is None else tuple(tokenizer.stop_token_ids)
    wrong = [x for x in ids if not 0 <= x < vocabulary_size]
    if wrong:
        raise ValueError(
            "`stop_token_ids` must be ids of the model's vocabulary, in "
            f"[0, {vocabulary_size}). Received: stop_token_ids={wrong}"
        )
    return ids


def minibatches(batch_size, num_generations, num_minibatches):
    """Returns completions of an optimizer step."""
    checks.positive_int("batch_size", batch_size)
    completions = batch_size * num_generations
    if completions % num_minibatches:
        raise ValueError(
            "The completions of a rollout must divide into `num_minibatches` "
            f"steps. Received: batch_size={batch_size}, "
            f"num_generations={num_generations}, {completions} completions, "
            f"num_minibatches={num_minibatches}"
        )
    return completions // num_minibatches


def token_budget(packing, sequence_length, longest):
    """Returns tokens of a packed row, or `None` where nothing is packed."""
    if packing is False or packing is None:
        return None
    if packing is True:
        return sequence_length
    if packing < longest:
        raise ValueError(
            "A packed row must hold the longest prompt and its completion, "
            f"{longest} tokens. Received: packing={packing}. Use a larger "
            "number, or packing=True for rows of `sequence_length`."
        )
    return packing


def room(sequence_length, max_length, max_completion_length):
    """Returns the most tokens of a prompt, and a text that says why."""
    limits = [("sequence_length", sequence_length)]
    if max_length is not None:
        limits.append(("the model's context", max_length))
    name, limit = min(limits, key=lambda pair: pair[1])
    left = limit - max_completion_length
    if left < 1:
        raise ValueError(
            "`max_completion_length` must leave room for a prompt. Received: "
            f"max_completion_length={max_completion_length}, {name} of "
            f"{limit} tokens"
        )
    return left, (
        f"{name} of {limit} less max_completion_length={max_completion_length}"
    )


def sampling(*, tokenizer, vocabulary_size, **settings):
    """Makes a `Sampling` of its fields as the user passed them, checked."""
    names = (
        "num_generations",
        "max_completion_length",
        "num_minibatches",
        "num_iterations",
    )
    for name in names:
        settings[name] = checks.positive_int(name, settings[name])
    training_temperature(settings["temperature"])
    old_log_probs(settings["old_log_probs"])
    settings["temperature"] = float(settings["temperature"])
    masked = settings["mask_truncated_completions"]
    checks.flag("mask_truncated_completions", masked)
    settings["mask_truncated_completions"] = bool(masked)
    checks.flag("routing_replay", settings.get("routing_replay", False))
    settings["stop_token_ids"] = stop_token_ids(
        settings["stop_token_ids"], tokenizer, vocabulary_size
    )
    return Sampling(**settings)


def scoring(
    given, reward_weights, advantages_, loss, num_generations, episode=None,
    **kw,
):  # fmt: skip
    """Makes a `Scoring` of its fields as the user passed them, checked.

    With an `Episode`, its own reward is the first one.
    """
    run.check_settings(
        kw["timeout"], kw["on_error"], ("reward_timeout", "on_reward_error")
    )
    functions = []
    if given is not None or episode is None:
        functions = rewards(given)
    names = reward_lib.names(functions)
    values = weights(reward_weights, names)
    if episode is not None:
        names = [episode.name, *names]
        if names.count(episode.name) > 1:
            raise ValueError(
                "The rewards and the episode must have different names. "
                f"Received: names={names}. Rename one, or pass "
                "`kpt.episodes.Episode(..., name=...)`."
            )
        if values is not None:
            values = np.append(1.0, values)
    checks.not_negative("max_resamples", kw["max_resamples"])
    kind = advantages(advantages_, loss, num_generations)
    return Scoring(
        rewards=tuple(functions),
        names=tuple(names),
        weights=values,
        advantages=kind,
        kl_in_reward=takes_kl(kind),
        **kw,
    )
