"""Implements `task.suggest`: settings for a dataset, each with its reason."""

import dataclasses
import inspect
import itertools
import math

import jax.numpy as jnp
import numpy as np

from keras_posttrain import optimizers
from keras_posttrain.data.batches.packing import pack
from keras_posttrain.data.rows.datasets import is_stream
from keras_posttrain.data.rows.prompts import prepare_prompts
from keras_posttrain.data.rows.streams import check_epochs
from keras_posttrain.distribution import layouts
from keras_posttrain.distribution.plan_table import readable
from keras_posttrain.models import sharding
from keras_posttrain.models.experts import chosen_share
from keras_posttrain.rollout.memory import free_bytes

TINKER = "Tinker cookbook, hyperparam_utils.py"
REGRET = "LoRA Without Regret, 2025"
SWEEP = "benchmarks/results/learning_rate.md"
DATA = "the data"
MEMORY = "an estimate; `task.plan` compiles the step"
# Tinker's rule, for adapters with the scale 32 / rank: LoRA's alpha of 32. The
# cookbook has since replaced it by a table of measured rates, from which it
# differs at most twofold: 2.9e-4 and 3e-4 for Llama-3.1-8B, 4.7e-4 and 1e-3
# for Qwen3-8B.
BASE_RATE, LORA_FACTOR, WIDTH, TINKER_ALPHA = 5e-5, 10.0, 2000, 32.0
EXPONENTS = {"Qwen": 0.0775, "Llama": 0.781}
# How the best rate falls with an adapter's scale times its rank.
SCALE_EXPONENT = 0.5
# Rows of a stream that are read, and the share of sequences that a row holds.
READ, QUANTILE = 4096, 0.995
# The most rows of a step with an adapter and without, and the fewest; the
# fewest steps of an epoch.
MOST_ROWS, FEWEST_ROWS, FEWEST_STEPS = {True: 32, False: 128}, 8, 100
# Prompts of a rollout, and samples of each.
MOST_PROMPTS, FEWEST_ROLLOUTS, GROUP = 32, 50, 16
# Padding beyond this share of a batch is worth packing.
FULL = 0.8
# Share of the memory that a step may take; where a task samples, the engine's
# cache takes the rest.
SHARE, SHARE_SAMPLED = 0.8, 0.5
# Tokens that keep a device busy.
BUSY = 2048


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a `Suggestion`.

    Attributes:
        where: str, `"task"`, `"compile"` or `"fit"`.
        name: str, the argument.
        value: its value.
        reason: str.
        source: str, where the rule or the number is from.
    """

    where: str
    name: str
    value: object
    reason: str
    source: str

    def __str__(self):
        value = self.value
        value = f"{value:.2g}" if isinstance(value, float) else repr(value)
        head = f"{self.where:<8} {self.name:<22} {value:<8}"
        return f"{head} {self.reason} [{self.source}]"


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Settings for a task and a dataset; `print` shows them with reasons.

    What cannot be known is left out.

    Attributes:
        title: str, the task and what was read of the dataset.
        settings: tuple of `Setting`s.
    """

    title: str
    settings: tuple

    def _of(self, where):
        return {x.name: x.value for x in self.settings if x.where == where}

    @property
    def task(self):
        """Dict, arguments for making the task again, as in `from_preset`."""
        return self._of("task")

    @property
    def compile(self):
        """Dict, arguments of `compile`, with a new optimizer each time."""
        found = self._of("compile")
        rate = found.pop("learning_rate")
        optimizer = optimizers.get("auto", learning_rate=rate)
        return {"optimizer": optimizer} | found

    @property
    def fit(self):
        """Dict, arguments of `fit`."""
        return self._of("fit")

    @property
    def learning_rate(self):
        """Float, that of the optimizer in `compile`."""
        return self._of("compile")["learning_rate"]

    @property
    def reasons(self):
        """Dict by name of strs, each a setting's reason and source."""
        return {x.name: f"{x.reason} [{x.source}]" for x in self.settings}

    def __str__(self):
        return "\n".join([self.title, *map(str, self.settings)])


def of_rows(task, dataset, memory, rate=None):
    """Suggests settings for rows; see `Task.suggest`.

    `rate` is the `Setting` of the learning rate, by default from the task's
    own rates.
    """
    longest = task.max_length or 2**20
    examples, report = task.prepare(
        dataset, sequence_length=longest, truncation="drop"
    )
    examples, seen = _read(examples)
    lengths = np.array(
        [sum(len(s.token_ids) for s in x.sequences) for x in examples]
    )
    single = np.array(
        [len(s.token_ids) for x in examples for s in x.sequences]
    )
    length = _sequence_length(single, task.max_length)
    kept = length[0].value
    _, together = task.filled_rows(FEWEST_ROWS)
    batch = _batch_size(task, len(examples))
    packing, fill = _packing(task, lengths, batch.value, kept * together)
    by_rows = task.filled_rows(FEWEST_ROWS, True)[0] is not None
    units, tokens = batch.value, kept * together
    if packing.value:
        each = kept if by_rows else max(kept, int(lengths.max()))
        units = max(round(batch.value * lengths.mean() / each / fill), 1)
        tokens = each
        if by_rows:
            reason = f"{units} packed rows hold about {batch.value} rows"
            reason += f": {batch.reason}"
            batch = dataclasses.replace(batch, value=units, reason=reason)
    found = [
        *length,
        *_memory(task, memory, units, tokens),
        rate or _rate(task),
        batch,
        packing,
    ]
    return _suggestion(task, f"{seen} of {report.rows:,} rows", single, found)


def of_prompts(task, dataset, memory):
    """Suggests settings for prompts to sample from; see `Task.suggest`."""
    longest = task.max_length or 2**20
    settings = task.row_settings(
        "dataset", sequence_length=longest, truncation="drop"
    )
    prompts, report = prepare_prompts(
        dataset,
        settings,
        max_prompt_length=longest,
        limit="the model's context",
    )
    prompts, seen = _read(prompts)
    lengths = np.array([len(p.token_ids) for p in prompts])
    many = _default(task, "num_generations")
    found = []
    completion = _completion_length(task, prompts)
    if completion is not None:
        found.append(completion)
        completion = completion.value
    elif task.sampling is not None:
        completion = task.sampling.max_completion_length
    else:
        completion = _default(task, "max_completion_length")
    if many > 1:
        many = GROUP
        found.append(
            Setting(
                "compile",
                "num_generations",
                many,
                "samples of a prompt, which are compared with each other",
                "Tinker cookbook, math_rl",
            )
        )
    size = _power(
        len(prompts) / FEWEST_ROLLOUTS, min(FEWEST_ROWS, len(prompts))
    )
    size = min(size, MOST_PROMPTS)
    rollouts = math.ceil(len(prompts) / size)
    batch = Setting(
        "fit",
        "batch_size",
        size,
        f"rollouts an epoch: {rollouts}; at most {MOST_PROMPTS} prompts, "
        f"and {FEWEST_ROLLOUTS} rollouts where the data allow",
        "our rule; Tinker's math_rl has 128 prompts",
    )
    length = _sequence_length(lengths, task.max_length, completion)
    memory = _memory(task, memory, size * many, length[0].value, SHARE_SAMPLED)
    found = [*length, *memory, _rate(task, samples=True), *found, batch]
    return _suggestion(
        task, f"{seen} of {report.rows:,} prompts", lengths, found
    )


def rate_by_width(policy):
    """Returns the `Setting` of Tinker's learning rate for fine-tuning."""
    width = policy.backbone.hidden_dim
    name = type(policy.backbone).__name__
    known = next((x for x in EXPONENTS if name.startswith(x)), None)
    power = EXPONENTS[known or "Qwen"]
    rate = BASE_RATE * (WIDTH / width) ** power
    reason = f"{BASE_RATE:.0e} x ({WIDTH} / {width})^{power:g}"
    if known is None:
        reason += f", Qwen's exponent: {name} is not calibrated"
    source = TINKER
    if policy.adapter is not None:
        factor, why = _lora_factor(policy.adapter.lora)
        rate *= LORA_FACTOR * factor
        reason += f" x {LORA_FACTOR:g} for LoRA{why}"
        source += f"; {SWEEP}"
    return Setting("compile", "learning_rate", rate, reason, source)


def _rate(task, samples=False):
    """Returns the task's own rate, for its adapter's scale."""
    adapter = task.policy.adapter
    rate = task.auto_learning_rates[adapter is None]
    reason, source = f"{rate:.0e}, that of optimizer='auto'", "our default"
    if samples and adapter is not None:
        source += "; TRL has 1e-5, Tinker 4e-5: try both"
    if adapter is not None:
        factor, why = _lora_factor(adapter.lora)
        rate, reason = rate * factor, reason + why
    return Setting("compile", "learning_rate", rate, reason, source)


def _lora_factor(lora):
    """Returns the factor for an adapter's scale, and its reason."""
    alpha = lora.scale * lora.rank
    factor = (TINKER_ALPHA / alpha) ** SCALE_EXPONENT
    if factor == 1:
        return 1.0, ""
    return factor, (
        f" x ({TINKER_ALPHA:g} / {alpha:g})^{SCALE_EXPONENT:g} for scale x "
        "rank"
    )


def _default(task, name):
    """Returns the default of an argument of the task's `compile`."""
    for owner in type(task).__mro__:
        if "compile" in vars(owner):
            found = inspect.signature(owner.compile).parameters.get(name)
            if found is not None:
                return found.default
    return None


def _read(examples):
    """Returns a list of examples, and how many were read, in words."""
    if not is_stream(examples):
        return list(examples), "all"
    try:
        check_epochs(examples, 2)
    except ValueError as error:
        raise ValueError(
            "`suggest` reads rows that `fit` could not read again. Received: "
            "a generator or another iterator. Pass a function that returns "
            "it, `lambda: make_rows()`, or a list of some of its rows."
        ) from error
    read = list(itertools.islice(iter(examples), READ))
    return read, "the first"


def _sequence_length(lengths, limit, completion=0):
    """Returns the settings of the length of rows."""
    longest = int(lengths.max())
    wanted = int(np.quantile(lengths, QUANTILE, method="inverted_cdf"))
    # One long row of few is no outlier.
    if longest <= 1.25 * wanted:
        wanted = longest
    length = _up(wanted + completion)
    if limit is not None:
        length = min(length, limit)
    cut = int((lengths + completion > length).sum())
    half, most = int(np.median(lengths)), f"the longest {longest:,}"
    reason = f"half of the sequences have at most {half:,} tokens, {most}"
    if completion:
        reason += f"; {completion} for the completion"
    found = [Setting("task", "sequence_length", length, reason, DATA)]
    if cut:
        why = f"{cut:,} of {len(lengths):,} sequences are longer than that"
        found.append(Setting("task", "truncation", "drop", why, DATA))
    return found


def _completion_length(task, prompts):
    """Returns the setting for the completions of rows that have some."""
    lengths = []
    for prompt in prompts:
        ids = prompt.columns.get("completion_ids")
        text = prompt.columns.get("completion")
        if (
            ids is None
            and isinstance(text, str)
            and task.tokenizer is not None
        ):
            ids = task.tokenizer.encode(text)
        if ids is not None:
            lengths.append(len(ids))
    if not lengths:
        return None
    wanted = int(np.quantile(lengths, QUANTILE, method="inverted_cdf"))
    return Setting(
        "compile",
        "max_completion_length",
        _up(1.5 * wanted),
        f"half more than the rows' own completions, {wanted:,} tokens",
        DATA,
    )


def _batch_size(task, count):
    has_adapter = task.policy.adapter is not None
    most = MOST_ROWS[has_adapter]
    size = _power(count / FEWEST_STEPS, min(FEWEST_ROWS, count))
    size = min(size, most)
    steps = math.ceil(count / size)
    reason = f"steps an epoch: {steps}; at most {most} rows, and "
    reason += f"{FEWEST_STEPS} steps where the data allow"
    source = f"{REGRET}: adapters lose in large batches"
    if not has_adapter:
        source = "Tinker cookbook, chat_sl: 128"
    return Setting("fit", "batch_size", size, reason, source)


def _packing(task, lengths, batch_size, capacity):
    """Returns the setting of packing, and the share of full rows."""
    rng = np.random.default_rng(0)
    order = rng.permutation(len(lengths))
    parts = [
        lengths[order[i : i + batch_size]]
        for i in range(0, len(order), batch_size)
    ]
    unpacked = lengths.sum() / sum(len(x) * x.max() for x in parts)
    capacity = max(capacity, int(lengths.max()))
    packed = lengths.sum() / (len(pack(lengths.tolist(), capacity)) * capacity)
    why = f"batches of rows that are padded are {unpacked:.0%} full, packed "
    why += f"{packed:.0%}"
    worth = bool(unpacked < FULL and packed > unpacked)
    if not task.policy.packable:
        worth, why = False, "the model's sequences cannot be packed"
    return Setting("fit", "packing", worth, why, DATA), packed


def _memory(task, memory, units, tokens, share=SHARE):
    """Returns the settings of the micro-batch and of rematerialisation.

    Args:
        memory: float or `None`, bytes of a device.
        units: int, rows (or pairs) of a step.
        tokens: int, those of each.
    """
    policy = task.policy
    trainable = {id(v) for v in task.trainable_variables}
    weights = sum(_num_bytes(v) for v in task.weights)
    if memory is None:
        loaded = not optimizers.holds_shapes(task.trainable_variables)
        memory = free_bytes() + weights * loaded
    state = 0.0
    for v in task.weights:
        if id(v) in trainable:
            count = _num_bytes(v) / jnp.dtype(v.dtype).itemsize
            # Gradients and Adam's two moments, and masters of bfloat16.
            state += count * (4 + 8 + 4 * (jnp.dtype(v.dtype).itemsize < 4))
    loss = task.objective or task.default_loss()
    if "ref_per_token_logps" in loss.needs and policy.adapter is None:
        state += weights
    vocabulary = policy.backbone.vocabulary_size
    head = 8 * vocabulary * policy.head().chunk(vocabulary, units * tokens)
    room = share * memory - weights - state - head
    shards = sharding.row_shards()
    devices = sharding.data_axis()[2]
    each = {
        x: tokens * _token_bytes(policy, x) * shards / devices
        for x in ("none", "full")
    }
    sizes = {x: _fitting(room, each[x], units, shards) for x in each}
    remat = "none"
    if sizes["none"] * tokens < min(units * tokens, BUSY * devices):
        remat = "full" if sizes["full"] > sizes["none"] else "none"
    size = sizes[remat]
    fixed = readable(weights + state + head)
    lack = ""
    if not size:
        remat, size = "full", shards
        lack = "; too little for one row: use LoRA, bfloat16 or FSDP"
    why = (
        f"of {readable(memory)}, {fixed} for weights, gradients and "
        f"optimizer, {readable(each[remat])} a row{lack}"
    )
    micro = None if size >= units else size
    text = "what layers compute is kept for the backward pass"
    if remat == "full":
        text = "layers are computed twice, since there is no room to keep them"
    return [
        Setting("task", "remat", remat, text, MEMORY),
        Setting("compile", "micro_batch_size", micro, why, MEMORY),
    ]


def _fitting(room, each, units, shards):
    """Returns how many units fit, a power of two a device, or all."""
    count = int(max(room, 0) // each) * shards
    if count >= units:
        return units
    return 2 ** int(math.log2(count // shards)) * shards if count else 0


def _token_bytes(policy, remat):
    """Returns a token's bytes of what is kept for the backward pass.

    Of each matrix its input and its output, and with `remat` the inputs of
    layers, next to one whole layer.
    """
    backbone, layers = policy.backbone, policy.layers
    hidden = backbone.hidden_dim
    share = chosen_share(backbone)
    width = 0.0
    for v in layers[0].variables:
        if len(v.shape) > 1:
            out = math.prod(v.shape) / hidden
            names = layouts.meanings(v.path, len(v.shape)) or ()
            is_expert = names[:1] == ("experts",)
            width += hidden + out * (share if is_expert else 1)
    size = jnp.dtype(backbone.compute_dtype).itemsize
    if remat == "full":
        return size * (len(layers) * policy.state_dim + width)
    return size * len(layers) * width


def _num_bytes(variable):
    """Returns a device's bytes of a variable."""
    shape = tuple(variable.shape)
    layout = getattr(variable.value, "sharding", None)
    if layout is not None:
        shape = layout.shard_shape(shape)
    return math.prod(shape) * jnp.dtype(variable.dtype).itemsize


def _power(wanted, least):
    """Returns the power of two below a number, and not below another."""
    return max(2 ** int(math.log2(max(wanted, 1))), least)


def _up(length):
    """Returns a length as a multiple of 64, of 16 where it is short."""
    step = 64 if length > 128 else 16
    return math.ceil(length / step) * step


def _suggestion(task, read, lengths, settings):
    low, high = int(lengths.min()), int(lengths.max())
    title = f"Suggestions for {type(task).__name__}, from {read}"
    return Suggestion(f"{title} ({low:,} to {high:,} tokens)", tuple(settings))
