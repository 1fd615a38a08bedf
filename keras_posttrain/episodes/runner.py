"""Runs the episodes of a rollout at once, on one event loop."""

import asyncio
import collections
import dataclasses
import math
import numbers
import reprlib

import numpy as np

from keras_posttrain.episodes.chat import Chat, Ended, FunctionChat
from keras_posttrain.episodes.errors import EpisodeError
from keras_posttrain.episodes.run_tool import within
from keras_posttrain.episodes.trajectory import Trajectory
from keras_posttrain.workers.threads import in_thread


@dataclasses.dataclass(frozen=True)
class Row:
    """A row that episodes are run for.

    Attributes:
        place: int, its number in the rollout.
        row: int, its index in the dataset.
        columns: dict.
    """

    place: int
    row: int
    columns: dict


@dataclasses.dataclass(frozen=True)
class Place:
    """One episode of a rollout.

    Attributes:
        sessions: dict from players that sample to sessions.
        row: `Row`.
        generation: int, its number among the episodes of the row.
        seed: int, that of the rollout.
    """

    sessions: dict
    row: Row
    generation: int
    seed: int


class Runner:
    """Runs episodes in sessions of engines.

    Args:
        episode: `Episode`.
        table: `Table`.
        players: list of strings, all players.
        is_scored: bool, whether rewards score trajectories besides the
            episode itself.
    """

    def __init__(self, episode, table, players, is_scored):
        self.episode, self.table, self.players = episode, table, players
        self.is_scored = is_scored
        # Numbers of what happened.
        self.counts = collections.Counter()

    @property
    def trained(self):
        """List of strings, the players whose trajectories are trained on."""
        return [p for p in self.players if p not in self.episode.opponents]

    def __call__(self, sessions, rows, num_generations, seed, progress=None):
        """Runs `num_generations` episodes for each row.

        Args:
            sessions: dict from players that sample to `kpt.rollout.Session`s.
            rows: list of `Row`s.
            num_generations: int.
            seed: int, of the samples.
            progress: function called with 1 when an episode has ended, or
                `None`.

        Returns:
            A list with a list for each row of a dict for each episode, from
            trained players to `Trajectory`s.

        Raises:
            Exception: what an episode raised, with a note that names the
                row.
        """

        async def run():
            free = asyncio.Semaphore(self.table.limits.concurrency)
            async with asyncio.TaskGroup() as group:
                return [
                    [
                        group.create_task(
                            self._one(
                                free, Place(sessions, row, g, seed), progress
                            )
                        )
                        for g in range(num_generations)
                    ]
                    for row in rows
                ]

        # A notebook has an event loop in this thread.
        try:
            tasks = in_thread(lambda: asyncio.run(run())).result()
        except BaseExceptionGroup as group:
            # The others were cancelled for the first.
            raise group.exceptions[0] from None
        return [[task.result() for task in of_row] for of_row in tasks]

    async def _one(self, free, place, progress):
        """Runs one episode, again if it fails: returns its trajectories."""
        async with free:
            for _ in range(1 + self.table.limits.retries):
                chats = self._chats(place)
                try:
                    rewards, reason = await self._play(chats, place)
                    error = None
                except EpisodeError as failure:
                    self.counts["episodes/faults"] += 1
                    error = str(failure) or "EpisodeError"
                finally:
                    for chat in chats.values():
                        chat.release()
                if error is None:
                    break
            else:
                self.counts["episodes/failed"] += 1
        self.counts["episodes"] += 1
        if progress is not None:
            progress(1)
        if error is not None:
            return {
                name: Trajectory([], "error", row=place.row.row, player=name,
                                 error=error)
                for name in self.trained
            }  # fmt: skip
        return {
            name: self._trajectory(chats[name], place, rewards[name], reason)
            for name in self.trained
        }

    def _chats(self, place):
        chats = {}
        for number, name in enumerate(self.players):
            opponent = self.episode.opponents.get(name)
            seeds = place.seed, place.row.place, place.generation, number
            if name not in place.sessions:
                chats[name] = FunctionChat(name, opponent, seeds)
                continue
            session = place.sessions[name]
            share = getattr(opponent, "share", 1.0)
            if np.random.default_rng([*seeds, 1]).random() >= share:
                session = place.sessions[self.trained[0]]
            chats[name] = Chat(name, self.table.seat(session, seeds))
        return chats

    async def _play(self, chats, place):
        """Returns rewards by player and why the episode ended."""
        row, generation = place.row, place.generation
        words = [place.seed, row.place]
        seed = int(np.random.SeedSequence(words).generate_state(1)[0]) >> 1
        arguments = self.episode.arguments(
            chats, row.columns, seed, generation
        )
        name = self.episode.name
        try:
            result = await within(
                self.episode.function(**arguments),
                self.table.limits.seconds,
                f"The episode {name!r}",
            )
            return self._rewards(result, chats), "done"
        except EpisodeError:
            raise
        except Ended as ended:
            if str(ended) == "context":
                self._check_begun(chats, row)
            return dict.fromkeys(self.trained), str(ended)
        except Exception as error:
            turns = {p: chat.num_turns for p, chat in chats.items()}
            error.add_note(
                f"In the episode {name!r} of row {row.row}, generation "
                f"{generation}, after turns={turns}."
            )
            raise

    def _check_begun(self, chats, row):
        """Checks that the first turn of an episode had room."""
        if not self.table.refuses_long:
            return
        if any(chat.num_turns for chat in chats.values()):
            return
        said = max(
            len(chat.token_ids)
            for chat in chats.values()
            if isinstance(chat, Chat)
        )
        raise ValueError(
            "The first turn of an episode must have room. Received: an "
            f"episode {self.episode.name!r} of row {row.row} that begins with "
            f"{said} tokens, those of the chat template and of tools "
            f"included, of {self.table.context} in all. Use a "
            "`sequence_length` (and `Limits.context`) of more, a shorter "
            "prompt, fewer tools, or truncation='drop' to leave out such "
            "episodes."
        )

    def _rewards(self, result, chats):
        """Returns the reward of each trained player, or `None`."""
        trained = self.trained
        if result is None and self.is_scored:
            return dict.fromkeys(trained)
        if len(trained) == 1 and not isinstance(result, dict):
            result = {trained[0]: result}
        if isinstance(result, dict):
            names = {chat: name for name, chat in chats.items()}
            found = {names.get(k, k): v for k, v in result.items()}
            if set(trained) <= set(found) <= set(chats):
                if all(_is_reward(found[name]) for name in trained):
                    return {name: float(found[name]) for name in trained}
        wanted = "a finite number"
        if len(trained) > 1:
            wanted = "a dict with a finite number for each player's chat"
        raise ValueError(
            f"An episode must return its reward, {wanted}; None only where "
            "`compile` has `rewards`. Received: "
            f"{reprlib.repr(result)} from {self.episode.name!r} with the "
            f"players {self.players}."
        )

    def _trajectory(self, chat, place, reward, reason):
        """Returns what a player leaves behind."""
        segments, turn_rewards = chat.segments()
        used = chat.used
        if reason != "done":
            reason = used.reason or reason
        elif chat.was_cut:
            reason = "length"
        earned = math.fsum(turn_rewards)
        is_silent = reward is None and not chat.is_rewarded
        total = earned + (reward or 0.0)
        if reason != "done":
            total = self.table.limits.reward(total)
        if turn_rewards:
            turn_rewards[-1] += total - earned
        for name, value in used.counts.items():
            self.counts[name] += value
        return Trajectory(
            segments,
            reason,
            turn_rewards,
            chat.all_messages(),
            place.row.row,
            chat.player,
            None if is_silent and self.is_scored else total,
        )


def _is_reward(value):
    is_number = isinstance(value, (numbers.Real, np.generic))
    return is_number and math.isfinite(value)
