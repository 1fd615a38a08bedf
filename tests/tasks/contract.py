"""The contract of every task; `test_contract.py` runs each task through it.

A case is a task with a loss, rows, and the ways to run the same update: in
micro-batches, packed, with shared prompts, from a cache, rematerialised. The
ways of a case cover each pair of settings rather than their product. Nearly
all cases use one tiny Llama of one layer, and the compile cache serves one
check with what another has compiled. What layers get from each other is the
same for all tasks: one case, whose ways have most settings, has two.
"""

import dataclasses
import functools
import pathlib
import tempfile

import jax
import keras
import numpy as np

import keras_posttrain as kpt
from tests.support import (
    REFERENCE,
    load_json,
    one_layer,
    random_rows,
    read_log,
    spread_adapter,
    starts_again,
    weights,
)

losses = kpt.losses
TWO_LAYERS = [REFERENCE / "models" / x for x in ("llama3", "llama3_ref")]
MODEL, OTHER = map(one_layer, TWO_LAYERS)

ROWS = random_rows(8, seed=1)
PAIRS = load_json("dpo.json")["datasets"]["llama3"][:6]
LABELLED = [
    {k: row[k] for k in ("prompt_ids", "completion_ids", "label")}
    for row in load_json("kto.json")["datasets"]["llama3"][:6]
]
COMPLETIONS = [
    {"prompt_ids": r["token_ids"][:6], "completion_ids": r["token_ids"][6:]}
    for r in random_rows(6, low=9)
]
# What the teacher reads in place of the prompt, and which teacher it is.
TEACHER_PROMPTS = [
    {
        **r,
        "teacher_prompt_ids": [5, 6, 7] + r["prompt_ids"],
        "who": "ab"[i % 2],
    }
    for i, r in enumerate(COMPLETIONS)
]
PROMPTS = [{"prompt_ids": r["token_ids"]} for r in random_rows(6, 4, 6)]


def odd(completions):
    """The share of odd token ids: differs among random completions."""
    return [sum(x % 2 for x in ids) / len(ids) for ids in completions]


@dataclasses.dataclass(frozen=True)
class Case:
    """A task and the ways to run it.

    Attributes:
        kind: the task's class.
        rows: list of dicts, one batch.
        ways: dicts of settings that must not change the update: arguments
            of `compile`, of `fit` and of `from_preset`; `cached` stands for
            a cache on disk, `num_slots` for an engine with so many slots.
        compiled: dict, more arguments of `compile`.
        given: dict, more arguments of `from_preset`.
        cache: dict, the arguments of `compile` that stand for `cached`, with
            `None` in place of the directory.
        preset: path of the model.
        lora: bool, an adapter with dropout, or all weights.
        rate: float, the learning rate of the one step of SGD.
        tolerance: float, how far an update may be off, as a share of the
            largest change of a weight.
    """

    kind: type
    rows: list
    ways: tuple
    compiled: dict = dataclasses.field(default_factory=dict)
    given: dict = dataclasses.field(default_factory=dict)
    cache: dict = dataclasses.field(default_factory=dict)
    preset: pathlib.Path = MODEL
    lora: bool = True
    rate: float = 0.1
    tolerance: float = 2e-5


# Each pair of two settings is in one of the three, or in the plain run.
IN_PAIRS = (
    {"packing": True, "micro_batch_size": 1},
    {"share_prefix": True, "micro_batch_size": 2},
    {"share_prefix": True, "packing": 96},
)
COMPARED = {"reference": OTHER}
TEACHER = {"teacher": OTHER}
SAMPLED = {
    "rewards": [odd],
    "max_completion_length": 6,
    # Any of these ends a completion, so that lengths differ.
    "stop_token_ids": range(3, 60),
}
SAMPLED_IN_PAIRS = (
    {"packing": 24, "micro_batch_size": 2, "num_slots": 3},
    {"share_prefix": True, "micro_batch_size": 4},
    {"share_prefix": True, "packing": 24},
)
TASKS = {
    "sft": Case(
        kpt.SFTTask,
        ROWS,
        (
            {"packing": True, "batch_size": 4, "micro_batch_size": 2},
            {"remat": "full", "micro_batch_size": 4},
            {"packing": True, "batch_size": 4, "chunk_size": 7},
        ),
    ),
    "dpo": Case(
        kpt.DPOTask,
        PAIRS,
        (
            {"packing": True, "micro_batch_size": 1},
            # Two padding pairs fill the second micro-batch.
            {"share_prefix": True, "micro_batch_size": 4, "cached": True},
            {"share_prefix": True, "packing": 96, "cached": True},
        ),
        given=COMPARED,
        cache={"reference_cache": None},
    ),
    # Its reference is a copy of the adapter that training begins with.
    "kto": Case(
        kpt.DPOTask,
        LABELLED,
        IN_PAIRS,
        compiled={"loss": losses.KTOLoss()},
    ),
    "reward": Case(kpt.RewardTask, PAIRS, IN_PAIRS, rate=0.01),
    "grpo": Case(
        kpt.GRPOTask,
        PROMPTS[:4],
        SAMPLED_IN_PAIRS,
        compiled={
            **SAMPLED,
            "loss": losses.GRPOLoss(beta=0.1, entropy_coef=0.01),
            "num_generations": 4,
            "num_iterations": 2,
        },
        rate=1.0,
        tolerance=1e-4,
    ),
    "ppo": Case(
        kpt.PPOTask,
        PROMPTS[:2],
        SAMPLED_IN_PAIRS,
        compiled={
            **SAMPLED,
            "loss": losses.PPOLoss(entropy_coef=0.01),
            "value_model": OTHER,
            "num_generations": 4,
            "num_minibatches": 2,
            "num_iterations": 1,
        },
        tolerance=1e-4,
    ),
    "distill": Case(
        kpt.DistillTask,
        ROWS[:6],
        (
            {"packing": True, "micro_batch_size": 1},
            {"cached": True, "micro_batch_size": 4},
        ),
        compiled={"loss": losses.ForwardKLLoss(temperature=2.0, alpha=0.5)},
        given=TEACHER,
        # The whole vocabulary.
        cache={"teacher_cache": None, "top_k": 512},
        rate=1.0,
        tolerance=2e-4,
    ),
    # Half of the rows are sampled, the others are given.
    "distill_on_policy": Case(
        kpt.DistillTask,
        COMPLETIONS,
        ({"packing": True, "micro_batch_size": 2},),
        compiled={"on_policy": 0.5, "max_completion_length": 8},
        given=TEACHER,
        rate=1.0,
    ),
}
# More losses, of which the update alone is compared.
VARIANTS = {
    "dpo_two_layers": dataclasses.replace(
        TASKS["dpo"],
        preset=TWO_LAYERS[0],
        given={"reference": TWO_LAYERS[1]},
    ),
    "orpo": Case(
        kpt.DPOTask,
        PAIRS,
        ({"share_prefix": True, "packing": True},),
        compiled={"loss": losses.ORPOLoss()},
    ),
    "aot": Case(
        kpt.DPOTask,
        PAIRS,
        (
            {
                "micro_batch_size": 4,
                "share_prefix": True,
                "packing": 96,
                "cached": True,
            },
        ),
        compiled={"loss": losses.AOTLoss()},
        given=COMPARED,
        cache={"reference_cache": None},
    ),
    # All weights of a family whose layers see a window of tokens.
    "dpo_windows": Case(
        kpt.DPOTask,
        PAIRS,
        ({"share_prefix": True, "packing": 96},),
        preset=REFERENCE / "models/gemma2",
        lora=False,
    ),
    # Sorts over the batch, padding pairs left out.
    "aot_unpaired": Case(
        kpt.DPOTask,
        PAIRS,
        ({"micro_batch_size": 4},),
        compiled={"loss": losses.AOTLoss(paired=False)},
        given=COMPARED,
    ),
    "apo_unpaired": Case(
        kpt.DPOTask,
        LABELLED,
        ({"packing": True, "cached": True},),
        compiled={"loss": losses.APOZeroUnpairedLoss()},
        given=COMPARED,
        cache={"reference_cache": None},
    ),
    "ppo_own_head": Case(
        kpt.PPOTask,
        PROMPTS[:2],
        ({"share_prefix": True, "packing": 24},),
        compiled={**SAMPLED, "num_generations": 4, "num_iterations": 1},
        tolerance=1e-4,
    ),
    "distill_by_column": Case(
        kpt.DistillTask,
        TEACHER_PROMPTS,
        ({"packing": 48},),
        compiled={
            "loss": losses.TotalVariationLoss(),
            "teacher_column": "who",
        },
        given={"teacher": {"a": OTHER, "b": None}},
        rate=1.0,
    ),
    "distill_by_weight": Case(
        kpt.DistillTask,
        ROWS[:6],
        ({"packing": True, "micro_batch_size": 1},),
        compiled={"loss": losses.JSDLoss(), "teacher_weights": [0.75, 0.25]},
        given={"teacher": [OTHER, None]},
        rate=1.0,
    ),
    "distill_hidden": Case(
        kpt.DistillTask,
        ROWS[:6],
        ({"packing": True, "micro_batch_size": 2},),
        compiled={
            "loss": losses.SumLoss(
                [losses.SkewKLLoss(), losses.HiddenStateLoss()], [1.0, 0.3]
            )
        },
        given=TEACHER,
        rate=1.0,
    ),
    "distill_attention": Case(
        kpt.DistillTask,
        ROWS[:6],
        ({"packing": True, "micro_batch_size": 2},),
        compiled={
            "loss": losses.SumLoss([losses.SFTLoss(), losses.AttentionLoss()])
        },
        given=TEACHER,
        rate=1.0,
    ),
}
CASES = TASKS | VARIANTS
OF_COMPILE = ("micro_batch_size", "rollout")
OF_COMPILE += ("reference_cache", "teacher_cache", "top_k")
OF_PRESET = ("remat", "chunk_size")


def parted(settings, names):
    """Two dicts: the settings with these names, and the others."""
    own = {k: v for k, v in settings.items() if k in names}
    return own, {k: v for k, v in settings.items() if k not in names}


def make(case, optimizer, lora=True, compiled=None, **given):
    """A task with dropout and an adapter that is not 0, compiled."""
    if lora:
        given["lora"] = kpt.LoRA(rank=4, alpha=8, dropout=0.2)
    keras.utils.set_random_seed(0)
    task = case.kind.from_preset(
        case.preset, sequence_length=64, **{**case.given, **given}
    )
    if lora:
        spread_adapter(task)
    if "rewards" in case.compiled:
        # Rewards are given ids where there is no tokenizer.
        task.tokenizer = None
    settings = {"max_grad_norm": None, **case.compiled, **(compiled or {})}
    task.compile(optimizer, **settings)
    if case.kind is kpt.PPOTask:
        spread(task.value_model.kernel)
    return task


def spread(variable, seed=5):
    """Values that differ in place of a start at 0."""
    rng = np.random.default_rng(seed)
    variable.assign(rng.normal(0, 0.05, variable.shape).astype("float32"))


class Record(keras.callbacks.Callback):
    """The logs of every step."""

    def on_train_begin(self, logs=None):
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(
            {
                name: float(value)
                for name, value in logs.items()
                # A prompt that is held once is fewer tokens.
                if not name.startswith(("time/", "num_tokens"))
            }
        )


# --- The same update ---------------------------------------------------------


def update(case, lora=None, **way):
    """Returns what one batch reports and changes.

    Args:
        case: `Case`.
        lora: bool, or `None` for the case's own.
        **way: settings, as in `Case.ways`.

    Returns:
        `(logs, change)`: a list of dicts, one a step, and a dict of arrays.
    """
    with tempfile.TemporaryDirectory() as folder:
        if way.pop("cached", False):
            way |= {k: v or folder for k, v in case.cache.items()}
        if slots := way.pop("num_slots", None):
            way["rollout"] = kpt.rollout.NativeRollout(num_slots=slots)
        compiled, way = parted(way, OF_COMPILE)
        given, fit = parted(way, OF_PRESET)
        task = make(
            case,
            keras.optimizers.SGD(case.rate),
            lora=case.lora if lora is None else lora,
            compiled=compiled,
            **given,
        )
        before, record = list(weights(task).values()), Record()
        settings = {"batch_size": len(case.rows), "shuffle": False, **fit}
        task.fit(case.rows, verbose=0, callbacks=[record], **settings)
    after = weights(task)
    return record.steps, {
        path: value - first
        for (path, value), first in zip(after.items(), before)
    }


def plain_update(name, lora=None):
    """As `update` without a way, computed once."""
    case = CASES[name]
    return _plain_update(name, case.lora if lora is None else lora)


@functools.cache
def _plain_update(name, lora):
    return update(CASES[name], lora)


def assert_same_update(first, second, tolerance, what):
    (steps, change), (other_steps, other_change) = first, second
    assert len(steps) == len(other_steps) > 0, what
    for ours, theirs in zip(steps, other_steps):
        assert ours.keys() == theirs.keys(), what
        for name, value in ours.items():
            np.testing.assert_allclose(
                theirs[name],
                value,
                rtol=max(tolerance, 2e-5),
                atol=2e-5,
                err_msg=f"{what} {name}",
            )
    size = max(np.abs(x).max() for x in change.values())
    assert size > 1e-5, what
    # In order: Keras numbers the layers of one model after another's.
    for (path, value), other in zip(
        change.items(), other_change.values(), strict=True
    ):
        # A weight of size 1 is stored to 1e-7, whatever the change.
        np.testing.assert_allclose(
            other,
            value,
            rtol=0,
            atol=tolerance * size + 2e-7,
            err_msg=f"{what} {path}",
        )


def check_same_update(name, together=False):
    """However a batch is laid out, one step changes the same.

    With `together` all settings are used at once; where ways differ in one,
    the first counts.
    """
    case = CASES[name]
    plain = plain_update(name)
    ways = case.ways
    if together:
        ways = [{k: v for way in reversed(ways) for k, v in way.items()}]
    for way in ways:
        found = update(case, **way)
        assert_same_update(plain, found, case.tolerance, f"{name} {way}")


# --- Resumed runs ------------------------------------------------------------


class Killed(Exception):
    pass


class KillAt(keras.callbacks.Callback):
    """Raises after a step of the run."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.step == self.step:
            raise Killed


def made_to_run(case, folder):
    cache = {k: v or folder / "cache" for k, v in case.cache.items()}
    return make(case, keras.optimizers.Adam(1e-3), compiled=cache)


def run(task, case, directory, epochs=2, dies_at=None):
    """Trains with checkpoints, until the end or until it is killed."""
    callbacks = [
        kpt.callbacks.MetricsLog(directory),
        kpt.callbacks.Checkpoint(directory, every=1),
    ]
    if dies_at:
        callbacks.append(KillAt(dies_at))
    size = max(len(case.rows) // 2, 1)
    try:
        task.fit(
            case.rows,
            batch_size=size,
            epochs=epochs,
            verbose=0,
            callbacks=callbacks,
        )
    except Killed:
        assert dies_at
    else:
        assert not dies_at
    return task


def log_of(directory):
    """The lines of the log without what is measured by a clock."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("time/", "tokens_per_second"))
        }
        for line in read_log(directory)
    ]


def state_of(task):
    """What training changes: a list of paths and arrays."""
    variables = [*task.trainable_variables, *task.optimizer.variables]
    return [(v.path, np.array(v.value)) for v in variables]


def assert_bit_equal(ours, theirs):
    for (path, first), (_, second) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(first, second, err_msg=path)


def check_resumed_run(name, directory, stops=False):
    """Killed within an epoch and resumed: bit for bit.

    With `stops` it also stops after the epoch.
    """
    case = TASKS[name]
    # One task is compiled for the runs that resume nothing.
    first = starts_again(lambda: made_to_run(case, directory))
    task = run(first(), case, directory / "straight")
    steps, straight = task.step, state_of(task)
    assert steps >= 4
    parts = directory / "parts"
    run(first(), case, parts, dies_at=steps // 2 - 1)
    if stops:
        stopped = run(made_to_run(case, directory), case, parts, epochs=1)
        assert stopped.step == steps // 2
    resumed = run(made_to_run(case, directory), case, parts)
    assert resumed.step == steps
    # What is read from the disk asks for no other programs.
    programs = [x.compiled_train_step._cache_size() for x in (task, resumed)]
    assert programs[1] <= programs[0]
    assert_bit_equal(straight, state_of(resumed))
    ours, theirs = log_of(directory / "straight"), log_of(parts)
    assert [line["step"] for line in theirs] == list(range(1, steps + 1))
    assert ours == theirs


# --- Files -------------------------------------------------------------------


def check_export(name, directory):
    """Exports, and saved adapters, equal the task's model."""
    case = TASKS[name]
    task = make(case, keras.optimizers.SGD(0.1))
    expected = outputs(task)
    task.export(directory / "model")
    exported = case.kind.from_preset(
        directory / "model", sequence_length=64, **case.given
    )
    np.testing.assert_allclose(
        outputs(exported), expected, rtol=1e-4, atol=2e-5
    )
    task.save_adapter(directory / "adapter")
    adapted = case.kind.from_preset(
        case.preset,
        sequence_length=64,
        **case.given,
        **({"lora": kpt.LoRA(rank=4)} if name == "reward" else {}),
    )
    assert np.abs(outputs(adapted) - expected).max() > 1e-3
    adapted.load_adapter(directory / "adapter")
    np.testing.assert_allclose(
        outputs(adapted), expected, rtol=1e-6, atol=1e-6
    )


def outputs(task):
    """Scores of a reward model, log-probabilities of the others."""
    if isinstance(task, kpt.RewardTask):
        return np.array(task.score(COMPLETIONS, batch_size=6))
    return np.concatenate(task.log_probs(ROWS[:3], batch_size=3))


# --- Eight devices -----------------------------------------------------------


def both(devices=None):
    return kpt.distribution.fsdp_tensor_parallel(4, 2)


def two_parts(devices=None):
    return kpt.distribution.tensor_parallel(model=2)


# A layout of weights and a way to run for each: pairs, not products. The
# number of rows is not a multiple of the devices in any of them.
EIGHT_DEVICES = {
    "sft": (kpt.distribution.fsdp, False, {}),
    "dpo": (both, True, {"share_prefix": True, "cached": True}),
    "kto": (kpt.distribution.fsdp, True, {"micro_batch_size": 2}),
    "reward": (two_parts, False, {"share_prefix": True}),
    "grpo": (kpt.distribution.fsdp, False, {"packing": 24}),
    "ppo": (both, True, {"share_prefix": True}),
    "distill": (two_parts, True, {"packing": True}),
    "distill_on_policy": (kpt.distribution.data_parallel, True, {}),
}


def check_eight_devices(name):
    """A step over eight devices is that of one.

    It needs a process with eight devices, and leaves no distribution behind.
    """
    assert len(jax.devices()) >= 8
    case = TASKS[name]
    layout, lora, way = EIGHT_DEVICES[name]
    assert keras.distribution.distribution() is None
    one = plain_update(name, lora)
    keras.distribution.set_distribution(layout())
    try:
        eight = update(case, lora, **way)
    finally:
        keras.distribution.set_distribution(None)
    what = f"{name} {layout.__name__} {way}"
    assert_same_update(one, eight, max(case.tolerance, 1e-4), what)
