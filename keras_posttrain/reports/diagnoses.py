"""What may be wrong with a run, in plain words, by rules on its metrics."""

import collections
import dataclasses
import math

import numpy as np

# Steps that a rule looks at.
RECENT = 20
CLIPPED = "clip_ratio/region_mean"
APART = "sampling/sampling_logp_difference/mean"


@dataclasses.dataclass
class Diagnosis:
    """One finding.

    Attributes:
        name: string, of its rule.
        level: `"error"`, `"warning"` or `"note"`.
        text: string, what was seen.
        advice: string, what to try.
        first, last: ints, the first and the last step at which it held.
    """

    name: str
    level: str
    text: str
    advice: str
    first: int = 0
    last: int = 0


class Diagnoses:
    """Applies the rules to each step of a run.

    `found` has a `Diagnosis` by the name of each rule that has held.
    """

    def __init__(self):
        self.found = {}
        self._window = collections.deque(maxlen=2 * RECENT)
        self._norms = collections.deque(maxlen=50)
        self._lowest = math.inf
        self._count = 0

    def add(self, step, logs, is_first=False):
        """Adds the metrics of a step, a dict of floats.

        `is_first` says that no step on the same rollout was before it.
        """
        self._count += 1
        self._window.append(logs)
        # Rules on the newest steps say the same of neighbouring ones.
        rules = (*OF_STEPS, *(OF_WINDOWS if self._count % 5 == 0 else ()))
        for rule in rules:
            if finding := rule(self, logs, is_first):
                self._note(step, finding)

    def add_validation(self, step, logs):
        """Adds the metrics of a validation, a dict of floats."""
        loss = logs.get("val_loss", math.nan)
        if loss > 1.05 * self._lowest and self._lowest > 0:
            self._note(
                step,
                Diagnosis(
                    "validation",
                    "warning",
                    f"The loss on held-out rows is {loss:.4g}, up from its "
                    f"lowest value of {self._lowest:.4g}: the model learns "
                    "the training rows by heart.",
                    "Use fewer epochs or a lower learning rate, keep the "
                    "best weights (EarlyStopping), or add rows.",
                ),
            )
        if loss < self._lowest:
            self._lowest = loss

    def add_data(self, report):
        """Adds a `DataReport`, or `None`."""
        rows = getattr(report, "rows", 0)
        if not rows:
            return
        lost = sum(report.dropped.values()) + report.cut
        if lost > 0.1 * rows:
            self._note(
                0,
                Diagnosis(
                    "data",
                    "warning",
                    f"{lost:,} of {rows:,} rows were dropped or cut.",
                    "See the data report below; a longer `sequence_length` "
                    "keeps long rows.",
                ),
            )

    def _note(self, step, finding):
        old = self.found.get(finding.name)
        finding.first = old.first if old else step
        finding.last = step
        self.found[finding.name] = finding

    def data(self):
        """Returns them as a list of dicts, the worst first."""
        order = ("error", "warning", "note")
        found = sorted(self.found.values(), key=lambda x: order.index(x.level))
        return [dataclasses.asdict(x) for x in found]

    def restore(self, data, step):
        """Takes back those of `data` that began at `step` or before."""
        for values in data:
            if values["first"] <= step:
                self.found[values["name"]] = Diagnosis(**values)

    def recent(self, name, count=RECENT):
        """Returns the newest finite values of a metric, a list."""
        found = [x[name] for x in self._window if name in x]
        return [x for x in found if math.isfinite(x)][-count:]


def _mean(values, least=5):
    """Returns the mean of at least so many values, else 0."""
    return float(np.mean(values)) if len(values) >= least else 0.0


def not_finite(run, logs, is_first):
    values = [logs.get(n, 0.0) for n in ("loss", "grad_norm")]
    if all(map(math.isfinite, values)):
        return None
    return Diagnosis(
        "not finite",
        "error",
        "The loss or the gradient is not finite. Such a step changes nothing.",
        "Lower the learning rate; look at the rows of these steps and leave "
        "them out with `skip_steps`; with float16 use bfloat16. To go back: "
        "`Checkpoint(directory, from_step=...)`.",
    )


def spikes(run, logs, is_first):
    norm, before = logs.get("grad_norm", 0.0), list(run._norms)
    # Steps that have nothing to learn are no measure of the others.
    if not math.isfinite(norm) or norm == 0:
        return None
    run._norms.append(norm)
    usual = float(np.median(before)) if len(before) >= 10 else math.inf
    if norm <= 10 * usual:
        return None
    return Diagnosis(
        "gradient spike",
        "warning",
        f"The gradient norm was {norm:.3g}, more than ten times the median "
        f"of {usual:.3g} of the steps before.",
        "Single spikes are clipped by `max_grad_norm`. If they come often, "
        "lower the learning rate, warm it up, or look at the rows of these "
        "steps (`skip_steps`).",
    )


def equal_rewards(run, logs, is_first):
    share = _mean(run.recent("frac_reward_zero_std"))
    if share <= 0.8:
        return None
    reward = _mean(run.recent("reward"))
    return Diagnosis(
        "equal rewards",
        "warning",
        f"In {share:.0%} of the groups all completions earn the same "
        f"(the mean reward is {reward:.3g}), and teach nothing.",
        "Use prompts that are solved sometimes but not always, more "
        "completions a prompt (`num_generations`), a reward with more grades, "
        "or `max_resamples`.",
    )


def entropy_collapse(run, logs, is_first):
    if "completions/mean_length" not in logs:
        return None
    values = run.recent("entropy", 2 * RECENT)
    if len(values) < RECENT + 5:
        return None
    now, before = _mean(values[-5:]), _mean(values[-RECENT - 5 : -RECENT])
    if now >= 0.5 * before or before < 0.05:
        return None
    return Diagnosis(
        "entropy",
        "warning",
        f"The entropy fell from {before:.3g} to {now:.3g} within {RECENT} "
        "steps: samples become alike, and there is less to learn from.",
        "Lower the learning rate, raise `epsilon_high` or `entropy_coef` of "
        "the loss, or add a KL term (`beta`).",
    )


def lengths(run, logs, is_first):
    share = _mean(run.recent("completions/clipped_ratio"))
    if share <= 0.3:
        return None
    return Diagnosis(
        "length limit",
        "warning",
        f"{share:.0%} of the completions were cut off at their limit.",
        "Raise `max_completion_length`; check that `stop_token_ids` has the "
        "token that ends a turn; leave cut ones out with "
        "`mask_truncated_completions=True`, or reward short answers.",
    )


def first_ratio(run, logs, is_first):
    old = logs.get("staleness/mean", 0.0) > 0
    if not is_first or old or logs.get(CLIPPED, 0.0) <= 0.01:
        return None
    return Diagnosis(
        "first ratio",
        "error",
        "At the first update after a rollout the ratio of the policy to the "
        f"one that sampled was clipped for {logs[CLIPPED]:.1%} of the tokens; "
        "it should be 1.",
        'With `old_log_probs="rollout"` the engine and the trainer differ: '
        'use `"trainer"`. Otherwise the weights changed between sampling and '
        "training, or dropout is on.",
    )


def apart(run, logs, is_first):
    old = logs.get("staleness/mean", 0.0) > 0
    gap = _mean(run.recent(APART, 5), 1)
    if APART not in logs or old or gap <= 0.02:
        return None
    return Diagnosis(
        "engine and trainer",
        "warning",
        "The log-probabilities of engine and trainer differ by "
        f"{gap:.2g} a token on average.",
        "Use the same dtype and weights in both; add "
        "`correction=kpt.losses.ImportanceCorrection()` to the loss; check "
        "that the engine gets the weights after each rollout.",
    )


def unreadable(run, logs, is_first):
    bad = _mean(run.recent("tools/unreadable"), 3)
    good = _mean(run.recent("tools/calls"), 3)
    if bad <= 0.2 * (good + bad):
        return None
    return Diagnosis(
        "tool calls",
        "warning",
        f"{bad / (good + bad):.0%} of the tool calls could not be read.",
        "Show the format in the prompt or the chat template, fine-tune on "
        "some calls first (`SFTTask`), or reward readable calls.",
    )


def failures(run, logs, is_first):
    failed = logs.get("episodes/failed", 0.0)
    if failed <= 0:
        return None
    return Diagnosis(
        "failed episodes",
        "warning",
        f"{failed:.0f} episodes of a rollout failed and were left out.",
        "Look at their errors among the samples (filter by ending `error`).",
    )


def divergence(run, logs, is_first):
    kl = _mean(run.recent("kl"))
    if kl <= 0.5:
        return None
    return Diagnosis(
        "KL",
        "note",
        f"The policy is far from the reference: KL {kl:.3g} a token.",
        "Read samples: rewards may be gamed. Raise `beta` or lower the "
        "learning rate.",
    )


def skipped(run, logs, is_first):
    share = _mean(run.recent("skipped"), 10)
    if share <= 0.3:
        return None
    return Diagnosis(
        "skipped steps",
        "warning",
        f"{share:.0%} of the newest steps changed nothing.",
        "Steps without a token with loss, without an advantage or with a "
        "gradient that is not finite are skipped; the log names the reason.",
    )


def both_fall(run, logs, is_first):
    chosen = run.recent("rewards/chosen", 2 * RECENT)
    margins = run.recent("rewards/margins")
    if len(chosen) < RECENT or "rewards/margins" not in logs:
        return None
    if _mean(chosen[-10:]) >= -1.0 or _mean(margins) <= 0:
        return None
    return Diagnosis(
        "chosen answers",
        "note",
        "The margin grows, but the chosen answers become less probable too: "
        f"their reward is {_mean(chosen[-10:]):.3g}.",
        "Lower the learning rate, raise `beta`, or add the loss of the chosen "
        "answers (`kpt.losses.SumLoss` with `ChosenSFTLoss`).",
    )


def critic(run, logs, is_first):
    explained = run.recent("value/explained_variance")
    if len(explained) < RECENT or _mean(explained[-10:]) > 0:
        return None
    return Diagnosis(
        "value model",
        "warning",
        "The values explain none of the returns' variance.",
        "Train the values longer before the policy (a lower learning rate, "
        "more `num_iterations`), or begin from a reward model.",
    )


OF_STEPS = (not_finite, spikes, first_ratio, failures)
OF_WINDOWS = (
    equal_rewards,
    entropy_collapse,
    lengths,
    apart,
    unreadable,
    divergence,
    skipped,
    both_fall,
    critic,
)
