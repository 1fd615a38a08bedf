"""Shows one episode in the terminal."""

import dataclasses

from keras_posttrain import _console
from keras_posttrain.episodes.runner import Row, Runner
from keras_posttrain.rl.episode_sampler import session_of


def play(episodes, engine, columns, seed, human=None):
    """Runs an episode, prints it and returns its trajectories.

    Args:
        episodes: `Episodes`.
        engine: `Rollout`, ready to sample.
        columns: dict, the row.
        seed: int.
        human: string, a player whose turns are read from the terminal, or
            `None`.

    Returns:
        Dict from players to `kpt.episodes.Trajectory`s.
    """
    if human is not None:
        if human not in episodes.trained or len(episodes.trained) < 2:
            raise ValueError(
                "`human` must be one of several players. Received: "
                f"human={human!r}, players={episodes.trained}"
            )
        opponents = episodes.episode.opponents | {human: _Person(human)}
        episode = dataclasses.replace(episodes.episode, opponents=opponents)
        episodes = dataclasses.replace(episodes, episode=episode)
    runner = Runner(
        episodes.episode, episodes.table, episodes.players, is_scored=True
    )
    with session_of(engine, None, 1) as (session, _):
        with episodes.sessions(session) as sessions:
            [[found]] = runner(sessions, [Row(0, 0, columns)], 1, seed)
    for trajectory in found.values():
        _console.say(describe(trajectory))
    return found


def describe(trajectory):
    """Returns a trajectory as lines of text."""
    lines = [f"--- {trajectory.player} ---"]
    for message in trajectory.messages:
        lines.append(_said(message))
        for call in message.get("tool_calls", ()):
            function = call["function"]
            lines.append(
                f"  calls {function['name']}({function['arguments']})"
            )
    lines.append(
        f"({len(trajectory.turn_rewards)} turns, {len(trajectory)} tokens, "
        f"ended={trajectory.ended!r}, reward={trajectory.reward})"
    )
    return "\n".join(lines)


def _said(message):
    content = f"{message.get('content')}"
    # A board is shown in lines of its own.
    space = "\n" if "\n" in content else " "
    return f"{message['role']}:{space}{content}"


class _Person:
    """Plays by what is typed: a function of messages to a text."""

    def __init__(self, player):
        self.player, self._seen = player, 0

    def __call__(self, messages):
        for message in messages[self._seen :]:
            _console.say(_said(message))
        self._seen = len(messages) + 1
        return input(f"{self.player}> ")
