"""Bad inputs: by id, the call, the error's type, words of its message.

A call takes a namespace of tasks and of a folder; see `test_bad_inputs.py`.
"""

import copy
import functools
import json
import re
import shutil

import keras
import numpy as np

import keras_posttrain as kpt
from tests.support import REFERENCE

MODEL = REFERENCE / "models/qwen3"
ROW = {"prompt_ids": [5, 6], "completion_ids": [7, 8]}
ROWS = [ROW, ROW]
PAIR = {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]}
LABELLED = {"prompt_ids": [5], "completion_ids": [6], "label": True}
TEXT = {"prompt": "2 + 2 =", "completion": " 4"}
CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
]
NAN = float("nan")
losses, rewards, callbacks = kpt.losses, kpt.rewards, kpt.callbacks


def reward(completions, **columns):
    return [0.0] * len(completions)


BAD = {}


def bad(name, call, *words, error=ValueError):
    assert name not in BAD, name
    BAD[name] = call, error, words


def each(place, call, name, values, *words):
    for value in values:
        # Workers must name a test alike.
        shown = re.sub(" at 0x[0-9a-f]+", "", str(value))
        bad(
            f"{place}-{name}-{shown[:50]!r}",
            lambda t, value=value: call(t, **{name: value}),
            name,
            *words,
        )


# --- Calls of the public methods ---------------------------------------------


def sft_make(t, **kwargs):
    kpt.SFTTask(t.model, **kwargs)


def sft_preset(t, **kwargs):
    kpt.SFTTask.from_preset(**{"preset": MODEL, **kwargs})


def sft_fit(t, dataset=ROWS, **kwargs):
    t.sft.fit(dataset, **kwargs)


def sft_compile(t, **kwargs):
    t.sft.compile(**kwargs)


def sft_evaluate(t, dataset=ROWS, **kwargs):
    t.sft.evaluate(dataset, **kwargs)


def suggest(t, dataset=ROWS, **kwargs):
    t.sft.suggest(dataset, **kwargs)


def dpo_fit(t, dataset=(PAIR, PAIR), **kwargs):
    t.dpo.fit(list(dataset), **kwargs)


def dpo_compile(t, **kwargs):
    t.dpo.compile(**kwargs)


def kto_fit(t, dataset=(LABELLED, LABELLED | {"label": False}), **kwargs):
    t.kto.fit(list(dataset), **kwargs)


def reward_fit(t, dataset=(PAIR, PAIR), **kwargs):
    t.reward.fit(list(dataset), **kwargs)


def reward_compile(t, **kwargs):
    t.reward.compile(**kwargs)


def grpo_compile(t, **kwargs):
    given = {"rewards": [reward], "max_completion_length": 8, **kwargs}
    t.blank.compile(**given)


def grpo_fit(t, dataset=({"prompt_ids": [5]},) * 2, **kwargs):
    t.grpo.fit(list(dataset), **kwargs)


def grpo_evaluate(t, dataset=({"prompt_ids": [5]},), **kwargs):
    t.grpo.evaluate(list(dataset), **kwargs)


def ppo_compile(t, **kwargs):
    given = {"rewards": [reward], "max_completion_length": 8, **kwargs}
    t.ppo.compile(**given)


def distill_compile(t, **kwargs):
    t.distill.compile(**kwargs)


def distill_fit(t, dataset=ROWS, **kwargs):
    t.distill.fit(dataset, **kwargs)


def generate(t, prompts=({"prompt_ids": [5]},), **kwargs):
    t.sft.generate(prompts, **kwargs)


def score_rows(t, rows=ROWS, **kwargs):
    t.sft.log_probs(rows, **kwargs)


def plan(t, topology="cpu:8", **kwargs):
    t.sft.plan(topology, **kwargs)


def lora(t, **kwargs):
    kpt.LoRA(**kwargs)


def mix(t, **kwargs):
    kpt.data.mix(**{"datasets": {"a": ROWS, "b": ROWS}, **kwargs})


def make(kind):
    """A call that makes an object."""
    return lambda t, **kwargs: kind(**kwargs)


# --- Counts ------------------------------------------------------------------

for call, name in [
    (dpo_fit, "batch_size"),
    (dpo_fit, "epochs"),
    (kto_fit, "batch_size"),
    (grpo_fit, "batch_size"),
    (distill_fit, "batch_size"),
    (sft_evaluate, "batch_size"),
    (sft_evaluate, "max_tokens"),
    (sft_compile, "micro_batch_size"),
    (grpo_compile, "num_generations"),
    (grpo_compile, "max_completion_length"),
    (grpo_compile, "num_minibatches"),
    (grpo_compile, "num_iterations"),
    (grpo_evaluate, "num_generations"),
    (grpo_fit, "validation_generations"),
    (generate, "max_tokens"),
    (generate, "num_generations"),
    (generate, "top_k"),
    (score_rows, "batch_size"),
    (sft_make, "chunk_size"),
    (plan, "batch_size"),
]:
    values = [0, "8"]
    each(call.__name__, call, name, values)
each("sft_fit", sft_fit, "batch_size", [0, -1, 2.5, "8", True, None])
each("sft_fit", sft_fit, "epochs", [0, -1, 2.5, "8", True, None])
each("sft_evaluate", sft_evaluate, "num_samples", [-1, 1.5, "2"])

# --- Making a task -----------------------------------------------------------

each("make", sft_make, "sequence_length", [0, 1, -5, 2.5, "64", None])
each("make", sft_make, "sequence_length", [10**7], "at most")
each("make", sft_make, "lora", [16, "lora", {"rank": 4}])
each("make", sft_make, "reference", ["qwen3"])
each("make", sft_make, "truncation", ["left", None])
each("make", sft_make, "remat", ["half", True])
each("make", sft_make, "attention", ["flash", None, "cudnn"], "attention=")
each("make", sft_make, "train_on", ["prompt", None, 3])
each("make", sft_make, "tokenizer", [3, object, "no/such", "", {}])
each("make", sft_make, "chat_template", ["{{ messages }}"], "tokenizer")
bad(
    "make-model-str", lambda t: kpt.SFTTask("qwen3"), "CausalLM", "from_preset"
)
bad("make-model-path", lambda t: kpt.SFTTask(MODEL), "CausalLM")
bad("make-model-none", lambda t: kpt.SFTTask(None), "CausalLM", "NoneType")
bad(
    "make-model-backbone",
    lambda t: kpt.SFTTask(t.model.backbone),
    "CausalLM",
    "Qwen3Backbone",
)
each(
    "preset", sft_preset, "preset", [None, 3, "", "no_such_preset", "no/such"]
)
each("preset", sft_preset, "preset", ["qwen3_0.6b"], "qwen3_0.6b_en")
each("preset", sft_preset, "dtype", ["fp16", "float16", "int8", 16])
each("preset", sft_preset, "tokenizer", [3, "no/such"])
each("preset", sft_preset, "chat_template", ["{% if %}", 3])


def load_model(t, **settings):
    folder = t.path / "model"
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    sft_preset(t, preset=folder)


for name in ("num_attention_heads", "num_key_value_heads", "hidden_size"):
    each("config", load_model, name, [0, "4"], "config.json")
each("config", load_model, "vocab_size", [None, -1], "config.json")
each("config", load_model, "rms_norm_eps", ["1e-6", 0], "config.json")
each("config", load_model, "hidden_act", ["tanh"], "config")
each("config", load_model, "num_hidden_layers", [0, 2.5, None])
each("config", load_model, "max_position_embeddings", [0])
each("config", load_model, "rope_scaling", [{"rope_type": "magic"}], "magic")
each(
    "from_task",
    lambda t, **k: kpt.DPOTask.from_task(t.sft, **k),
    "adapter",
    ["copy", None],
)
each(
    "from_task", lambda t, **k: kpt.DPOTask.from_task(t.sft, **k), "lora", [16]
)
bad("from_task-str", lambda t: kpt.DPOTask.from_task("run/"), "task", "'run/'")
bad("from_task-lm", lambda t: kpt.DPOTask.from_task(t.model), "task")
bad(
    "distill-teacher-number",
    lambda t: kpt.DistillTask(t.model, teacher=3),
    "teacher",
    "3",
)
bad(
    "distill-teacher-tokenizer",
    lambda t: kpt.DistillTask(t.model, teacher=MODEL, teacher_tokenizer=3),
    "teacher_tokenizer=3",
)

# --- LoRA --------------------------------------------------------------------

each("lora", lora, "rank", [0, -1, 2.0, "4", None, True])
each("lora", lora, "alpha", [0, -1, "16", NAN])
each("lora", lora, "dropout", [-0.1, 1.0, "0.1", NAN])
each("lora", lora, "targets", ["(", [], 3, [3]])
each("lora", lora, "seed", [-1, "0", 1.5])
each("lora", lora, "rslora", ["yes"])
bad(
    "lora-rank-beyond-the-layers",
    lambda t: sft_make(t, lora=kpt.LoRA(rank=100_000)),
    "rank=100000",
)
bad(
    "lora-no-layer-matches",
    lambda t: sft_make(t, lora=kpt.LoRA(targets="query")),
    "targets='query'",
    "q_proj",
)
bad(
    "lora-one-of-two-matches",
    lambda t: sft_make(t, lora=kpt.LoRA(targets=["q_proj", "vv_proj"])),
    "vv_proj",
)

# --- compile -----------------------------------------------------------------

each("sft_compile", sft_compile, "loss", ["mse", 3, losses.SFTLoss])
each("sft_compile", sft_compile, "loss", [keras.losses.MeanSquaredError])
each("sft_compile", sft_compile, "loss", [keras.losses.Hinge()], "Keras")
each("sft_compile", sft_compile, "loss", [losses.GRPOLoss()], "GRPOTask")
each("sft_compile", sft_compile, "loss", [losses.DPOLoss()], "DPOTask")
each("sft_compile", sft_compile, "loss", [losses.KTOLoss()], "DPOTask")
each("sft_compile", sft_compile, "loss", [losses.ValueLoss()], "PPOTask")
each("sft_compile", sft_compile, "loss", [losses.ForwardKLLoss()], "DistillT")
each(
    "sft_compile",
    sft_compile,
    "loss",
    [losses.BradleyTerryLoss()],
    "RewardTask",
)
each("sft_compile", sft_compile, "router_loss", [0.001, "auto"], "RouterLoss")
each("sft_compile", sft_compile, "router_loss", [losses.RouterLoss()], "Mixtr")
each("sft_compile", sft_compile, "max_grad_norm", [0, -1.0, "1", NAN, True])
each("sft_compile", sft_compile, "optimizer", ["adamm", 3, 1e-3, None])
each("sft_compile", sft_compile, "optimizer", [keras.optimizers.AdamW])
each("sft_compile", sft_compile, "run_eagerly", ["yes", 1])
bad(
    "sft_compile-negative-rate",
    lambda t: t.sft.compile(keras.optimizers.SGD(-1.0)),
    "learning_rate",
    "-1.0",
)
bad(
    "sft_compile-nan-rate",
    lambda t: t.sft.compile(keras.optimizers.SGD(NAN)),
    "learning_rate",
    "nan",
)
bad(
    "sft_compile-accumulation",
    lambda t: t.sft.compile(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    ),
    "micro_batch_size",
)
each("dpo_compile", dpo_compile, "loss", [losses.SFTLoss(), losses.GRPOLoss()])
each("dpo_compile", dpo_compile, "loss", [losses.BradleyTerryLoss()], "Reward")
each("dpo_compile", dpo_compile, "reference_cache", [3])
each("reward_compile", reward_compile, "loss", [losses.DPOLoss()], "DPOTask")
each("reward_compile", reward_compile, "loss", ["mse", losses.SFTLoss()])
each("grpo_compile", grpo_compile, "loss", [losses.SFTLoss(), "grpo", 3])
each("grpo_compile", grpo_compile, "rewards", [[], 3, [3], None, "accuracy"])
each("grpo_compile", grpo_compile, "rewards", [[rewards.MathReward]], "Math")
each("grpo_compile", grpo_compile, "reward_weights", [[1, 2], [NAN], "a", 2])
each("grpo_compile", grpo_compile, "advantages", ["group", 3])
each(
    "grpo_compile",
    grpo_compile,
    "advantages",
    [losses.GroupAdvantages],
)
each("grpo_compile", grpo_compile, "temperature", [0, -1.0, "a", NAN])
each("grpo_compile", grpo_compile, "reward_timeout", [0, -1, "a", NAN])
each("grpo_compile", grpo_compile, "on_reward_error", ["stop", None])
each("grpo_compile", grpo_compile, "max_resamples", [-1, 1.5])
each("grpo_compile", grpo_compile, "old_log_probs", ["none", 3])
each("grpo_compile", grpo_compile, "rollout", ["vllm", 3])
each("grpo_compile", grpo_compile, "rollout", [kpt.rollout.NativeRollout])
each("grpo_compile", grpo_compile, "top_k", [50], "temperature")
each("grpo_compile", grpo_compile, "top_p", [0.9], "temperature")
each("grpo_compile", grpo_compile, "max_completion_length", [64], "prompt")
each("grpo_compile", grpo_compile, "mask_truncated_completions", ["no"])
each("grpo_compile", grpo_compile, "routing_replay", ["no", True])
each("grpo_compile", grpo_compile, "stop_token_ids", ["eos", 5, [1.5], [-1]])
bad(
    "grpo_compile-one-generation",
    lambda t: grpo_compile(t, num_generations=1),
    "num_generations=1",
)
bad(
    "grpo_compile-reward-is-sft",
    lambda t: grpo_compile(t, rewards=[t.sft]),
    "rewards[0]",
    "SFTTask",
)
each("grpo_compile", grpo_compile, "router_loss", [losses.RouterLoss()])
each("distill_compile", distill_compile, "router_loss", [0.1])
each("ppo_compile", ppo_compile, "router_loss", [losses.RouterLoss()])
each("ppo_compile", ppo_compile, "gamma", [-0.1, 2, "a", NAN])
each("ppo_compile", ppo_compile, "gae_lambda", [-0.1, "a"])
each("ppo_compile", ppo_compile, "kl_coef", [-1, NAN, "a"])
each("ppo_compile", ppo_compile, "kl_in", ["rewards", None])
each("ppo_compile", ppo_compile, "value_loss", ["mse", losses.SFTLoss()])
each("ppo_compile", ppo_compile, "value_model", [3])
each("ppo_compile", ppo_compile, "max_resamples", [2])
each("ppo_compile", ppo_compile, "whiten_advantages", ["no"])
each("distill_compile", distill_compile, "loss", [losses.SFTLoss()], "SFTTask")
each("distill_compile", distill_compile, "loss", [losses.DPOLoss(), "kl"])
each("distill_compile", distill_compile, "on_policy", [-1, 2, "yes"])
each("distill_compile", distill_compile, "top_k", [0, "a"])
each("distill_compile", distill_compile, "teacher_weights", [[1.0]])
each("distill_compile", distill_compile, "teacher_column", ["teacher"])
each("distill_compile", distill_compile, "num_generations", [4], "on_policy")

# --- Words of Keras and TRL --------------------------------------------------

for name, value, instead in [
    ("metrics", ["accuracy"], "metric_names"),
    ("jit_compile", True, "run_eagerly"),
    ("loss_weights", [1.0], "SumLoss"),
    ("steps_per_execution", 4, "leave it out"),
    ("learning_rate", 1e-4, "optimizer="),
    ("gradient_accumulation_steps", 4, "micro_batch_size"),
]:
    each("compile", sft_compile, name, [value], instead)
for name, value, instead in [
    ("y", [1], "dataset"),
    ("validation_split", 0.1, "validation_data="),
    ("validation_steps", 1, "validation_data"),
    ("steps_per_epoch", 4, "fewer rows"),
    ("initial_epoch", 2, "Checkpoint"),
    ("sample_weight", [1, 1], "'weight'"),
    ("class_weight", {0: 1.0}, "'weight'"),
]:
    each("fit", sft_fit, name, [value], instead)
bad("fit-x", lambda t: t.sft.fit(x=ROWS), "`x`", "`dataset`")
bad("dpo_fit-x", lambda t: t.dpo.fit(x=[PAIR]), "`x`", "`dataset`")
bad("grpo_fit-x", lambda t: t.grpo.fit(x=[ROW]), "`x`", "`dataset`")
each("grpo_compile", grpo_compile, "reward_funcs", [[reward]], "`rewards`")
each("evaluate", sft_evaluate, "steps", [3], "fewer rows")
each("evaluate", sft_evaluate, "sample_weight", [[1]], "'weight'")
for call in (sft_fit, dpo_fit, grpo_fit, sft_evaluate, grpo_evaluate):
    bad(
        f"{call.__name__}-bach_size",
        functools.partial(call, bach_size=4),
        "bach_size",
        "`batch_size`",
        error=TypeError,
    )
each("suggest", suggest, "memory", ["8GB", 0, -1, np.nan, True], "bytes")
each("suggest", suggest, "dataset", [None, 3, "no.jsonl", []], "`dataset`")
bad("suggest-column", lambda t: suggest(t, [{"txt": "a"}]), "row 0", "'txt'")
each("grpo", grpo_compile, "episode", [3, "tools", print, []], "`episode`")
each("grpo", grpo_compile, "episode", [reward], "async def")
bad("grpo-nothing", lambda t: grpo_compile(t, rewards=None), "`rewards`")
bad("play-early", lambda t: t.blank.play(), "compile")
bad("play-no-episode", lambda t: t.grpo.play(), "episode=None")


async def chatting(chat, secret):
    await chat("a")
    return 1.0


def episode(t, function=chatting, **kwargs):
    kpt.episodes.Episode(function, **kwargs)


def limits(t, **kwargs):
    kpt.episodes.Limits(**kwargs)


def tools(t, tools=(), **kwargs):
    kpt.episodes.Tools(tools, **kwargs)


each("episode", episode, "limits", [3, {"turns": 4}], "`limits`", "Limits")
each("episode", episode, "history", ["all", None], "append", "template")
for name in ("turns", "tokens", "context", "tool_calls"):
    each("limits", limits, name, [0, -1, 1.5, "4", True], f"`{name}`", "int")
each("limits", limits, "concurrency", [0, None, 2.5], "`concurrency`")
each("limits", limits, "retries", [-1, None, 0.5], "`retries`")
for name in ("tool_seconds", "seconds"):
    each("limits", limits, name, [0, -1.0, np.inf, "10"], "positive number")
each("limits", limits, "after_cut", ["go on", None], "'end'", "'continue'")
each("limits", limits, "limit_reward", [0, "none"], "'keep'", "'zero'")
each("tools", tools, "tools", [None, [], 3, [3], "python"], "`tools`")
bad("frozen-every", lambda t: kpt.episodes.Frozen(every=0), "`every`")
bad("frozen-share", lambda t: kpt.episodes.Frozen(share=0), "`share`")
bad(
    "two-names",
    lambda t: grpo_compile(
        t, episode=kpt.episodes.Episode(chatting, name="reward")
    ),
    "different names",
)
bad("predict", lambda t: t.sft.predict(["a"]), "predict", "generate")
bad("train_on_batch", lambda t: t.sft.train_on_batch(ROWS), "fit(rows")
bad("test_on_batch", lambda t: t.sft.test_on_batch(ROWS), "evaluate(rows)")
bad("save", lambda t: t.sft.save("a.keras"), "`save`", "export")
bad("save_weights", lambda t: t.sft.save_weights("a.weights.h5"), "Checkpoint")
bad("load_weights", lambda t: t.sft.load_weights("a.h5"), "load_adapter")
bad("quantize", lambda t: t.sft.quantize("int8"), "export")
bad("deepcopy", lambda t: copy.deepcopy(t.sft), "__deepcopy__", "from_task")
bad("copy", lambda t: copy.copy(t.sft), "from_task")
bad("get_config", lambda t: t.sft.get_config(), "from_preset")


class KerasStep(kpt.SFTTask):
    def train_step(self, data):
        return {}


class KerasLoss(kpt.SFTTask):
    def compute_loss(self, x=None, y=None, y_pred=None, **kwargs):
        return 0.0


bad(
    "keras-train_step",
    lambda t: KerasStep(t.model).compile(),
    "KerasStep.train_step",
    "`(logs, state)`",
)
bad(
    "keras-compute_loss",
    lambda t: KerasLoss(t.model).compile(),
    "KerasLoss.compute_loss",
    "kpt.losses.Loss",
)

# --- fit ---------------------------------------------------------------------

each("sft_fit", sft_fit, "seed", [2**40, None, -1, 1.5, "0"])
each("sft_fit", sft_fit, "shuffle", ["yes", 1, None])
each("sft_fit", sft_fit, "verbose", ["loud", 7])
each("sft_fit", sft_fit, "packing", [64, "yes", None])
each("sft_fit", sft_fit, "skip_steps", [[0], 3, ["a"], [999]])
each("sft_fit", sft_fit, "callbacks", [[print], 3, "early"])
each("dpo_fit", dpo_fit, "share_prefix", ["yes", 1])
each("dpo_fit", dpo_fit, "packing", ["yes", -1, 2.5, 1])
each("grpo_fit", grpo_fit, "share_prefix", ["yes", 1])
each("grpo_fit", grpo_fit, "packing", ["yes", -1, 2.5, 3])
each("grpo_fit", grpo_fit, "seed", [2**40, "0"])
each("grpo_fit", grpo_fit, "max_staleness", [-1, 1.5, True])
each("distill_fit", distill_fit, "packing", ["yes", -1])
each("distill_fit", distill_fit, "max_staleness", [1], "on_policy")
each("distill_fit", distill_fit, "share_prefix", [True], "packing")
bad("fit-before-compile", lambda t: t.fresh.fit(ROWS), "compile()")
bad("evaluate-before-compile", lambda t: t.fresh.evaluate(ROWS), "compile()")
bad("plan-before-compile", lambda t: t.fresh.plan("cpu:8"), "compile()")

# --- Callbacks ---------------------------------------------------------------

Early, Plateau = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
)
for name, call, callback, words in [
    ("misspelt", sft_fit, Early("los", mode="min"), ["'los'", "'loss'"]),
    ("no-validation", sft_fit, Early(), ["'val_loss'", "validation_data"]),
    ("plateau", sft_fit, Plateau("lr_loss"), ["'lr_loss'", "loss"]),
    ("no-direction", sft_fit, Early("entropy"), ["'entropy'", "mode='max'"]),
    ("keras-accuracy", sft_fit, Early("accuracy"), ["mean_token_accuracy"]),
    ("dpo", dpo_fit, Early("reward/margins"), ["'rewards/margins'"]),
    ("grpo", grpo_fit, Early("rewards"), ["'rewards'", "reward"]),
    ("grpo-of-rewards", grpo_fit, Early("rewards/f/mean"), ["rewards/reward"]),
    ("model", sft_fit, keras.callbacks.ModelCheckpoint("a.keras"), ["Checkp"]),
    ("backup", sft_fit, keras.callbacks.BackupAndRestore("a"), ["Checkpoint"]),
    ("class", sft_fit, callbacks.Progress, ["callbacks", "Progress"]),
    ("reference", sft_fit, callbacks.UpdateReference(), ["reference"]),
]:
    bad(
        f"callback-{name}",
        functools.partial(call, callbacks=[callback]),
        *words,
    )
checkpoint = make(functools.partial(callbacks.Checkpoint, "run"))
each("Checkpoint", checkpoint, "every", [0, -1, 2.5, "8", None])
each("Checkpoint", checkpoint, "keep", [0, None])
each("Checkpoint", checkpoint, "from_step", [-1, "5"])
each("Checkpoint", checkpoint, "override", ["learning_rate", [3]])
each("Checkpoint", make(callbacks.Checkpoint), "directory", [None, 3])
each("MetricsLog", make(callbacks.MetricsLog), "directory", [None, 3])
each(
    "CompletionsLog",
    make(functools.partial(callbacks.CompletionsLog, "a")),
    "format",
    ["csv", None],
)
each("CompletionsLog", make(callbacks.CompletionsLog), "directory", [None])
each("UpdateReference", make(callbacks.UpdateReference), "every", [0, "1"])
each("UpdateReference", make(callbacks.UpdateReference), "mixup", [0, 2, "a"])

# --- Rows --------------------------------------------------------------------

each("sft_fit", sft_fit, "dataset", [[], 3, None, "no.jsonl", "*.jsonl", ROW])
each("sft_fit", sft_fit, "validation_data", [[], 3, "no.jsonl"])
MANY = {"prompt": "a", "completion": "b"}
for name, rows, words in [
    ("no-dict", [ROW, [1, 2]], ["row 1", "dict"]),
    ("missing", [{"prompt_ids": [1]}], ["row 0", "completion_ids"]),
    (
        "misspelt",
        [ROW, {"prompt_ids": [1], "completions_ids": [2]}],
        ["row 1"],
    ),
    ("two-types", [ROW, TEXT], ["row 1", "one type"]),
    ("ids-of-text", [{"prompt_ids": "ab", "completion_ids": [1]}], ["row 0"]),
    ("text-of-ids", [{"prompt": [5], "completion": [6]}], ["row 0"]),
    ("null-text", [MANY, {"prompt": "a", "completion": None}], ["row 1"]),
    ("number", [{"text": 3}], ["row 0", "'text'", "3"]),
    ("beyond", [{"prompt_ids": [1], "completion_ids": [9999]}], ["9999"]),
    ("negative", [{"prompt_ids": [-1], "completion_ids": [2]}], ["-1"]),
    ("float-id", [{"prompt_ids": [1.5], "completion_ids": [2]}], ["row 0"]),
    ("too-long", [{"prompt_ids": [5], "completion_ids": [5] * 64}], ["65"]),
    ("empty", [{"prompt_ids": [1], "completion_ids": []}], ["row 0"]),
    ("empty-text", [{"text": ""}], ["row 0"]),
    ("mask", [{"token_ids": [1, 2], "completion_mask": [1]}], ["2 token ids"]),
    ("no-loss", [{"token_ids": [1, 2], "completion_mask": [0, 0]}], ["row 0"]),
    (
        "nan-mask",
        [{"token_ids": [1, 2], "completion_mask": [0, NAN]}],
        ["nan"],
    ),
    ("weight-nan", [ROW | {"weight": NAN}], ["'weight'", "row 0"]),
    ("weight-text", [ROW | {"weight": "1"}], ["'weight'", "row 0"]),
    ("weight-huge", [ROW | {"weight": 1e300}], ["'weight'", "1e+300"]),
    ("weight-negative", [ROW, ROW | {"weight": -1}], ["row 1", "-1"]),
    ("wieght", [ROW | {"wieght": 2.0}], ["'wieght'", "'weight'"]),
    ("surrogate", [{"text": "a\ud83d"}], ["row 0", "text"]),
    ("role", [{"messages": [{"role": "bot", "content": "a"}]}], ["'bot'"]),
    (
        "Role",
        [{"messages": [{"role": "Assistant", "content": "a"}]}],
        ["Assi"],
    ),
    ("no-role", [{"messages": [{"content": "a"}]}], ["row 0", "role"]),
    ("no-content", [{"messages": [{"role": "user"}]}], ["row 0", "content"]),
    ("no-messages", [{"messages": []}], ["row 0"]),
    ("messages-str", [{"messages": "hello"}], ["row 0", "hello"]),
    ("message-str", [{"messages": ["hello"]}], ["row 0", "hello"]),
    ("no-answer", [{"messages": CHAT[:1]}], ["row 0"]),
    ("tools", [{"messages": CHAT, "tools": "search"}], ["row 0", "tools"]),
]:
    bad(f"rows-{name}", functools.partial(sft_fit, dataset=rows), *words)
    # All of them are rows of `log_probs` and of validation too.
for name, rows, words in [
    ("no-rejected", [{"prompt": "a", "chosen": "b"}], ["row 0", "rejected"]),
    ("sft-rows", ROWS, ["row 0", "chosen"]),
    ("labelled", [LABELLED], ["row 0"]),
    ("equal", [PAIR | {"rejected_ids": [6]}], ["dropped"]),
    ("null", [{"prompt": "a", "chosen": "b", "rejected": None}], ["row 0"]),
    ("empty", [PAIR | {"chosen_ids": []}], ["row 0"]),
    ("no-prompt", [{"chosen": "a b", "rejected": "c d"}], ["row 0", "prompt"]),
    ("long", [PAIR | {"chosen_ids": [5] * 99}], ["row 0", "100 tokens"]),
]:
    bad(f"pairs-{name}", functools.partial(dpo_fit, dataset=rows), *words)
for name, rows, words in [
    ("no-label", [ROW], ["row 0", "label"]),
    ("label-text", [LABELLED | {"label": "good"}], ["row 0", "'good'"]),
    ("label-number", [LABELLED | {"label": 0.7}], ["row 0", "0.7"]),
    ("one-kind", [LABELLED, LABELLED], ["label", "False"]),
    ("pairs", [PAIR], ["row 0"]),
]:
    bad(f"labels-{name}", functools.partial(kto_fit, dataset=rows), *words)
bad("kto-batch-of-one", functools.partial(kto_fit, batch_size=1), "batch_size")
for name, rows, words in [
    ("margin", [PAIR | {"margin": "big"}], ["row 0", "margin"]),
    ("margin-nan", [PAIR | {"margin": NAN}], ["row 0", "margin"]),
]:
    bad(f"reward-{name}", functools.partial(reward_fit, dataset=rows), *words)
for name, rows, words in [
    ("no-prompt", [{"question": "a"}], ["row 0", "prompt"]),
    ("empty", [{"prompt": ""}], ["row 0"]),
    ("null", [{"prompt": None}], ["row 0", "prompt"]),
    ("long", [{"prompt_ids": [5] * 61}], ["row 0", "61"]),
    ("reserved", [{"prompt": "a", "completions": "b"}], ["'completions'"]),
    ("mixed", [{"prompt": "a"}, {"prompt_ids": [5]}], ["row 1"]),
    ("columns", [{"prompt": "a", "x": 1}, {"prompt": "b"}], ["row 1", "'x'"]),
]:
    bad(f"prompts-{name}", functools.partial(grpo_fit, dataset=rows), *words)
bad(
    "grpo-column-of-reward",
    lambda t: t.answers.fit([{"prompt": "a", "anwser": "b"}]),
    "'answer'",
    "anwser",
)

# --- evaluate, log_probs, score, generate ------------------------------------

each("grpo_evaluate", grpo_evaluate, "temperature", [-1, "hot", NAN])
each("grpo_evaluate", grpo_evaluate, "answer", ["boxed"])
each("grpo_evaluate", grpo_evaluate, "seed", [2**40, "0"])
each("grpo_evaluate", grpo_evaluate, "correct_reward", ["1", NAN, None])
each("sft_evaluate", sft_evaluate, "dataset", [[], 3, None])
each("log_probs", score_rows, "rows", [[], 3, None, ROW])
bad("score-pairs", lambda t: t.reward.score([PAIR]), "row 0")
bad("score-text", lambda t: t.reward.score("hello"), "rows")
each("generate", generate, "temperature", [-1, "a", NAN])
each("generate", generate, "top_p", [0, 1.5, "a"])
each("generate", generate, "min_p", [-1, 2, "a"])
each("generate", generate, "seed", [2**40, -1, 1.5])
each("generate", generate, "stop_token_ids", ["eos", [-1], [1.5], 5, ["a"]])
each("generate", generate, "on_text", ["print"])
each("generate", generate, "prompts", [3, None, b"a"])
for name, prompts, words in [
    ("key", {"ids": [1]}, ["prompt_ids", "['ids']"]),
    ("empty", {"prompt_ids": []}, ["prompt of request 0"]),
    ("float", {"prompt_ids": [5.5]}, ["5.5"]),
    ("text", {"prompt_ids": "abc"}, ["prompt_ids", "abc"]),
    ("beyond", [{"prompt_ids": [1]}, {"prompt_ids": [9999]}], ["9999"]),
    ("no-content", [{"role": "user"}], ["content"]),
    ("none", ["a", None], ["prompt 1"]),
    ("number", ["a", 3], ["prompt 1", "3"]),
    ("surrogate", "a\ud83d", ["prompt 0"]),
]:
    bad(
        f"generate-{name}",
        functools.partial(generate, prompts=prompts),
        *words,
    )
bad(
    "generate-too-long",
    functools.partial(generate, max_tokens=10**6),
    "max_tokens=1000000",
    "context",
)

# --- plan --------------------------------------------------------------------

each("plan", plan, "topology", ["v9:4x4", "v5e", "", 8, None, "v5e:4x4 x 0"])
each("plan", plan, "strategy", ["fsdp", 8])
each("plan", plan, "remat", ["half"])
each("plan", plan, "sequence_length", [0, "64"])
each("plan", plan, "micro_batch_size", [0, "1"])
each(
    "plan_decode",
    lambda t, **k: t.sft.plan_decode("cpu:8", **k),
    "num_slots",
    [0, "8"],
)
each(
    "plan_decode",
    lambda t, **k: t.sft.plan_decode("cpu:8", **k),
    "num_tokens",
    [0, 2.5],
)

# --- Saving ------------------------------------------------------------------

each(
    "export",
    lambda t, **k: t.sft.export(t.path / "e", **k),
    "dtype",
    ["fp16", "int8", 3],
)
each(
    "export",
    lambda t, **k: t.sft.export(t.path / "e", **k),
    "max_shard_bytes",
    [0, -1, "5GB"],
)
bad("export-none", lambda t: t.sft.export(None), "path", "None")
bad("save_to_preset-none", lambda t: t.sft.save_to_preset(None), "None")
bad("save_adapter-none", lambda t: t.dpo.save_adapter(None), "path", "None")
bad("save_adapter-full", lambda t: t.sft.save_adapter(t.path / "a"), "lora=")
bad("merge-full", lambda t: t.sft.merge_adapter(), "lora=")
bad("unmerge-first", lambda t: t.dpo.unmerge_adapter(), "not merged")
bad("load_adapter-none", lambda t: t.dpo.load_adapter(None), "path", "None")
bad(
    "load_adapter-nothing",
    lambda t: t.dpo.load_adapter(t.path / "nothing"),
    "adapter_config.json",
    "nothing",
)


def load_config(t, **settings):
    folder = t.path / "adapter"
    folder.mkdir(exist_ok=True)
    for file in (REFERENCE / "adapters/qwen3_lora_r4_after").iterdir():
        shutil.copy(file, folder)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    t.dpo.load_adapter(folder)


for name, settings, words in [
    ("rank", {"r": 10**9}, ["r", "1000000000"]),
    ("rank-0", {"r": 0}, ["r", "0"]),
    ("rank-text", {"r": "two"}, ["two"]),
    ("kind", {"peft_type": "PREFIX_TUNING"}, ["PREFIX_TUNING"]),
    ("alpha", {"lora_alpha": "a"}, ["alpha", "'a'"]),
    ("dora", {"use_dora": True}, ["use_dora"]),
]:
    bad(
        f"load_adapter-{name}",
        functools.partial(load_config, **settings),
        *words,
    )
bad(
    "reward-save_to_preset",
    lambda t: t.reward.save_to_preset(t.path / "p"),
    "save_adapter",
)

# --- Losses and advantages ---------------------------------------------------

each("DPOLoss", make(losses.DPOLoss), "beta", [-1, 0, "a", NAN])
each("DPOLoss", make(losses.DPOLoss), "label_smoothing", [-0.1, 0.6, "a"])
each("DPOLoss", make(losses.DPOLoss), "divergence", ["kl"])
each("KTOLoss", make(losses.KTOLoss), "desirable_weight", [-1, NAN])
each("GRPOLoss", make(losses.GRPOLoss), "beta", [-1, "a", NAN])
each("GRPOLoss", make(losses.GRPOLoss), "epsilon", [-1, "a"])
each("GRPOLoss", make(losses.GRPOLoss), "kl_estimator", ["k9"])
each("GRPOLoss", make(losses.GRPOLoss), "entropy_coef", [NAN, "a"])
each("GRPOLoss", make(losses.GRPOLoss), "masks", ["top"])
each("ValueLoss", make(losses.ValueLoss), "clip", [-1, "a"])
each("RouterLoss", make(losses.RouterLoss), "balance", [-1, NAN, "a"])
each("RouterLoss", make(losses.RouterLoss), "z", [-1, "a"])
each("RouterLoss", make(losses.RouterLoss), "per_layer", [1, "yes"])
each("ForwardKLLoss", make(losses.ForwardKLLoss), "temperature", [0, "a"])
each("ForwardKLLoss", make(losses.ForwardKLLoss), "alpha", [-1, 2])
each("SumLoss", make(losses.SumLoss), "losses", [[], [3], losses.SFTLoss()])
each(
    "SumLoss",
    make(functools.partial(losses.SumLoss, [losses.SFTLoss()])),
    "weights",
    [[1, 2], [NAN], ["a"]],
)
each("GroupAdvantages", make(losses.GroupAdvantages), "scale", ["std", None])
each("PassAtKAdvantages", make(losses.PassAtKAdvantages), "k", [0, "2"])
each("ImportanceCorrection", make(losses.ImportanceCorrection), "mode", ["x"])
each("HiddenStateLoss", make(losses.HiddenStateLoss), "layers", ["last", [1]])
each("HiddenStateLoss", make(losses.HiddenStateLoss), "metric", ["l7"])

# --- Rewards -----------------------------------------------------------------

each("LengthReward", make(rewards.LengthReward), "minimum", [-1, "1"])
each(
    "LengthReward",
    make(functools.partial(rewards.LengthReward, 5)),
    "maximum",
    [3, "9"],
)
each("Isolated", make(rewards.Isolated), "function", [3, rewards.MathReward])
each(
    "Isolated",
    make(functools.partial(rewards.Isolated, reward)),
    "timeout",
    [0, "1"],
)
each("JudgeReward", make(rewards.JudgeReward), "ask", [3])
each(
    "JudgeReward",
    make(functools.partial(rewards.JudgeReward, print)),
    "template",
    ["{prompt}", "{", 3],
)
each(
    "JudgeReward",
    make(functools.partial(rewards.JudgeReward, print)),
    "low",
    [20, "a"],
)
each("ModelReward", make(rewards.ModelReward), "model", [3, "path", None])


def run(functions=(reward,), prompts=("a",), completions=("b",), **kwargs):
    rewards.run_rewards(list(functions), prompts, completions, **kwargs)


for name, function, words in [
    (
        "raises",
        lambda completions: 1 / 0,
        ["ZeroDivisionError", "completion 0"],
    ),
    ("short", lambda completions: [], ["for each of the 1", "lambda"]),
    ("text", lambda completions: ["a"], ["finite number", "'a'"]),
    ("nan", lambda completions: [NAN], ["finite number", "nan"]),
    ("none", lambda completions: None, ["None"]),
    ("column", lambda answers: [1.0], ["'answers'"]),
]:
    bad(f"reward-{name}", lambda t, f=function: run([f]), *words)
each("run_rewards", lambda t, **k: run(**k), "timeout", [0, "1"])
each("run_rewards", lambda t, **k: run(**k), "on_error", ["ignore"])
each("run_rewards", lambda t, **k: run(**k), "prompts", [["a", "b"]])

# --- Rollout engines ---------------------------------------------------------

native = make(kpt.rollout.NativeRollout)
each("NativeRollout", native, "num_slots", [0, "8", 2.5])
each("NativeRollout", native, "cache_bytes", [0, "8GB"])
each("NativeRollout", native, "merge_adapter", ["yes"])
each("NativeRollout", native, "compile_ahead", ["yes", 3])
bad(
    "engine-without-model",
    lambda t: kpt.rollout.NativeRollout().generate([kpt.rollout.Request([5])]),
    "no model yet",
)
bad("engine-prompt", lambda t: t.engine.generate(["hello"]), "Request")
bad(
    "engine-one", lambda t: t.engine.generate(kpt.rollout.Request([5])), "list"
)
bad("request-text", lambda t: kpt.rollout.Request("hello"), "token_ids")
each("vllm", make(kpt.rollout.VLLMRollout), "url", ["localhost:8000"])

# --- Tokenizers and chat templates -------------------------------------------

bad(
    "tokenizer-no-files",
    lambda t: kpt.Tokenizer.from_directory(t.path),
    "tokenizer.json",
)
bad("tokenizer-none", lambda t: kpt.Tokenizer.from_directory(None), "path")
bad("tokenizer-backend", lambda t: kpt.Tokenizer("gpt2"), "backend", "gpt2")
bad("tokenizer-hub", lambda t: kpt.Tokenizer.from_keras_hub(3), "KerasHub")
bad("encode-number", lambda t: t.sft.tokenizer.encode(3), "text", "3")
bad("decode-text", lambda t: t.sft.tokenizer.decode("abc"), "ids", "abc")
bad("decode-beyond", lambda t: t.sft.tokenizer.decode([2**40]), "ids")
bad(
    "template-syntax",
    lambda t: t.sft.tokenizer.with_chat_template("{% for %}"),
    "chat_template",
)


def chat_with(t, template):
    task = kpt.SFTTask(
        t.model, t.sft.tokenizer, chat_template=template, sequence_length=64
    )
    task.generate(CHAT[:1], max_tokens=2)


for name, template, words in [
    ("division", "{{ 1/0 }}", ["division by zero"]),
    ("undefined", "{{ messages[0].a.b }}", ["template"]),
    ("endless", "{% for i in range(10**10) %}{% endfor %}", ["template"]),
    ("raises", "{{ raise_exception('no system') }}", ["no system"]),
]:
    bad(
        f"template-{name}",
        functools.partial(chat_with, template=template),
        *words,
    )

# --- Mixtures and files ------------------------------------------------------

each("mix", mix, "datasets", [{}, [], 3, None, {"a": []}, {"a": 3}])
each("mix", mix, "weights", [{"a": 1}, {"a": -1, "b": 1}, {"a": NAN, "b": 1}])
each("mix", mix, "weights", [{"a": 0, "b": 0}, "equal"])
each("mix", mix, "seed", [-1, "0"])


def read(t, file, content, kind="wb"):
    path = t.path / file
    path.write_bytes(content)
    t.sft.fit(path)


for name, file, content, words in [
    ("empty", "a.jsonl", b"", ["dataset", "one row"]),
    (
        "broken",
        "b.jsonl",
        b'{"text": "a"}\n{"text": \n',
        ["b.jsonl", "line 2"],
    ),
    ("number", "c.jsonl", b'{"text": "a"}\n3\n', ["row 1", "dict"]),
    ("latin", "d.jsonl", '{"text": "é"}'.encode("latin-1"), ["UTF-8"]),
    ("nested", "e.jsonl", b"[" * 100_000, ["e.jsonl", "line 1"]),
    ("parquet", "h.parquet", b"no parquet", ["h.parquet"]),
    ("json", "i.json", b'{"text"', ["i.json"]),
    ("csv", "j.csv", b"text\n\xff\xfe\n", ["j.csv"]),
    ("ending", "k.yaml", b"text: a", ["k.yaml", ".jsonl"]),
]:
    bad(
        f"file-{name}",
        functools.partial(read, file=file, content=content),
        *words,
    )
bad(
    "columns-lengths",
    lambda t: t.sft.fit({"text": ["a", "b"], "weight": [1]}),
    "weight",
)
bad("columns-array", lambda t: t.sft.fit(np.zeros((3, 4))), "dataset")
bad("dataset-set", lambda t: t.sft.fit({"a", "b"}), "dataset")
bad(
    "dataset-generator-epochs",
    lambda t: t.sft.fit((r for r in ROWS), epochs=2),
    "epochs",
)

# --- Distribution and examples -----------------------------------------------

dist = kpt.distribution
each("fsdp", make(dist.fsdp), "data", [0, "8", 3])
each("fsdp", make(dist.fsdp), "context", [0, "8", 3])
each("tensor", make(dist.tensor_parallel), "model", [0, "8", 3])
bad(
    "search",
    lambda t: dist.search(t.sft, "cpu:8", strategies=[]),
    "strategies",
)
bad(
    "tiny_preset", lambda t: kpt.examples.tiny_preset(t.path / "t", []), "rows"
)
bad(
    "tiny_preset-rows",
    lambda t: kpt.examples.tiny_preset(t.path / "t", 3),
    "rows",
)
