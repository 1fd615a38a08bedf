"""Runs episodes and scores their trajectories."""

import contextlib
import dataclasses
import time

import numpy as np

from keras_posttrain._spans import span
from keras_posttrain.distribution import processes
from keras_posttrain.episodes.opponents import Frozen
from keras_posttrain.episodes.runner import Row, Runner
from keras_posttrain.episodes.trajectory import Segment, Trajectory
from keras_posttrain.rewards.run import run_rewards
from keras_posttrain.rl.sampling import say_skipped
from keras_posttrain.rl.trajectory import Group

# Metrics of a rollout of episodes, as means over episodes.
MEANS = (
    "episodes/faults",
    "episodes/failed",
    "tools/calls",
    "tools/unreadable",
    "tools/errors",
    "tools/seconds",
)
TOTALS = ("rollout/computed_tokens", "rollout/recomputed_tokens")


@dataclasses.dataclass(frozen=True, eq=False)
class Episodes:
    """What a run samples episodes with.

    Attributes:
        episode: `kpt.episodes.Episode`.
        table: `episodes/seat.py:Table`.
        players: list of strings.
        engines: dict from opponents to the `Rollout`s they sample from.
            Those that are missing here are functions, or sample from the
            policy's engine.
    """

    episode: object
    table: object
    players: list
    engines: dict = dataclasses.field(default_factory=dict)

    @property
    def metric_names(self):
        """Tuple of the names of the metrics of episodes.

        Those that an episode counts besides are in its attribute
        `metric_names`, if it has one.
        """
        own = getattr(self.episode.function, "metric_names", ())
        return ("episodes/turns", *MEANS, *TOTALS, *own)

    @property
    def trained(self):
        """List of strings, the players that are trained."""
        return [p for p in self.players if p not in self.episode.opponents]

    @contextlib.contextmanager
    def sessions(self, session):
        """Opens the session of each player that samples, a dict.

        `session` is that of the policy.
        """
        with contextlib.ExitStack() as stack:
            found = dict.fromkeys(self.trained, session)
            for name, opponent in self.episode.opponents.items():
                if name in self.engines:
                    own = self.engines[name].session()
                    found[name] = stack.enter_context(own)
                elif isinstance(opponent, Frozen):
                    found[name] = session
            yield found


class EpisodeSampler:
    """Turns rows into groups of scored trajectories, one a row and player.

    It has the methods of `Sampler`. `open_session` is a function of the
    number of episodes to a context manager of a session and of a function
    that is called with 1 when an episode has ended, or `None`.
    """

    def __init__(self, open_session, episodes, sampling, scoring):
        self.open_session, self.episodes = open_session, episodes
        self.sampling, self.scoring = sampling, scoring
        self.seconds = {"time/rollout": 0.0, "time/reward": 0.0}
        self.metrics = {}

    def __call__(self, prompts, seed, step=0):
        """Returns a list of `Group`s."""
        return self.score(prompts, self.sample(prompts, seed), step)

    def sample(self, prompts, seed):
        """Runs the episodes of rows.

        Returns:
            A list of a list for each row of a dict for each episode, from
            players to `Trajectory`s.
        """
        start = time.perf_counter()
        rows = [Row(i, p.row, p.columns) for i, p in enumerate(prompts)]
        runner = Runner(
            self.episodes.episode,
            self.episodes.table,
            self.episodes.players,
            # In distillation nothing is scored.
            is_scored=bool(self.scoring.rewards) or not self.scoring.names,
        )
        own = rows[processes.share(len(rows))]
        many = self.sampling.num_generations
        found = error = None
        try:
            with self.open_session(len(own) * many) as (session, progress):
                with (
                    self.episodes.sessions(session) as sessions,
                    span("rollout"),
                ):
                    found = runner(sessions, own, many, seed, progress)
        except Exception as e:  # Any: other processes wait for a result.
            error = e
        # The sessions of all processes have ended, which exchange requests.
        found = _of_all(found, error)
        self._note(runner, found, session)
        self.seconds["time/rollout"] += time.perf_counter() - start
        return found

    def _note(self, runner, found, session):
        """Adds the metrics of a rollout to those of earlier ones."""
        own = dict(runner.counts)
        for part in (
            processes.exchange(own) if processes.count() > 1 else [own]
        ):
            for name, value in part.items():
                self.metrics[name] = self.metrics.get(name, 0.0) + value
        turns = sum(len(t.turn_rewards) for t in _trajectories(found))
        self.metrics["turns"] = self.metrics.get("turns", 0) + turns
        counts = getattr(session, "counts", None)
        for name in ("computed", "recomputed"):
            key, value = f"rollout/{name}_tokens", getattr(counts, name, 0)
            self.metrics[key] = self.metrics.get(key, 0.0) + value

    def results(self):
        """Returns the metrics of all that was sampled, floats by name."""
        found = self.metrics
        episodes = max(found.get("episodes", 0), 1)
        names = {*MEANS, *found} - {"episodes", "turns", *TOTALS}
        metrics = {n: found.get(n, 0.0) / episodes for n in sorted(names)}
        metrics["episodes/failed"] = float(found.get("episodes/failed", 0))
        players = len(self.episodes.trained)
        metrics["episodes/turns"] = found.get("turns", 0) / episodes / players
        for name in TOTALS:
            metrics[name] = float(found.get(name, 0.0))
        return metrics

    def score(self, prompts, found, step=0):
        """Scores what `sample` returned: a list of `Group`s."""
        start = time.perf_counter()
        if self.sampling.mask_truncated_completions:
            for t in _trajectories(found):
                if t.was_cut:
                    t.segments = [s.without_loss() for s in t.segments]
        groups = [
            Group(
                prompt,
                [episode[player] for episode in of_row],
                [episode[player].messages for episode in of_row],
                None,
            )
            for prompt, of_row in zip(prompts, found)
            for player in self.episodes.trained
        ]
        own = processes.share(len(groups))
        with span("reward"):
            parts = processes.exchange_results(
                lambda: [self._rewards(g, step).tolist() for g in groups[own]]
            )
        rewards = [np.array(g, "float32") for part in parts for g in part]
        for group, values in zip(groups, rewards):
            group.rewards = values
        self.seconds["time/reward"] += time.perf_counter() - start
        return groups

    def _rewards(self, group, step):
        """Returns the rewards of a group, `(trajectories, functions)`."""
        scoring, prompt = self.scoring, group.prompt
        found = np.full(
            (len(group.trajectories), len(scoring.names)), np.nan, "float32"
        )
        good = [i for i, t in enumerate(group.trajectories) if t.segments]
        first = len(scoring.names) - len(scoring.rewards)
        if first:
            for i in good:
                reward = group.trajectories[i].reward
                found[i, 0] = np.nan if reward is None else reward
        if good and scoring.rewards:
            trajectories = [group.trajectories[i] for i in good]
            columns = {k: [v] * len(good) for k, v in prompt.columns.items()}
            columns.pop("prompt", None)
            columns["trajectories"] = trajectories
            found[good, first:], report = run_rewards(
                scoring.rewards,
                [prompt.prompt] * len(good),
                [t.messages for t in trajectories],
                columns,
                completion_ids=[t.sampled_ids for t in trajectories],
                rows=[prompt.row] * len(good),
                timeout=scoring.timeout,
                on_error=scoring.on_error,
            )
            say_skipped(report, step)
        return found


@contextlib.contextmanager
def session_of(engine, progress, count):
    """Opens a session of an engine, with a function that counts episodes."""
    del count
    with engine.session() as session:
        yield session, progress


def _trajectories(found):
    return [t for row in found for e in row for t in e.values()]


def _of_all(found, error):
    """Returns what all processes have found; raises what one has raised."""

    def own():
        if error is not None:
            raise error
        return [
            [{p: _encode(t) for p, t in e.items()} for e in row]
            for row in found
        ]

    if processes.count() == 1:
        if error is not None:
            raise error
        return found
    parts = processes.exchange_results(own)
    return [
        [{p: _decode(t) for p, t in e.items()} for e in row]
        for part in parts
        for row in part
    ]


def _encode(trajectory):
    """Returns a trajectory as what JSON can encode."""
    fields = dict(vars(trajectory))
    fields["segments"] = [
        {
            name: value.tolist()
            for name, value in vars(segment).items()
            if value is not None
        }
        for segment in trajectory.segments
    ]
    return fields


def _decode(fields):
    floats = ("mask", "per_token_logps")
    segments = [
        Segment(
            **{
                name: np.array(v, "float32" if name in floats else "int32")
                for name, v in segment.items()
            }
        )
        for segment in fields["segments"]
    ]
    return Trajectory(**{**fields, "segments": segments})
