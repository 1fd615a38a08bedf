"""Arguments and methods that tasks lack: what to use instead."""

import difflib
import functools
import inspect
import itertools
import reprlib

import keras

_ROWS = (
    "Rows hold inputs and targets: pass a list of dicts such as "
    "{'prompt': ..., 'completion': ...} as `dataset`."
)
_WEIGHTS = "Give the rows a column 'weight'."
_METRICS = (
    "The loss reports its metrics. For others, subclass it and extend "
    "`metric_names` and `total`."
)
_FEWER = "An epoch is every row once: pass fewer rows, and more `epochs`."

_LENGTH = "Use `max_tokens`, the maximum number of new tokens."
_FOUR_BITS = 'Use quantize="int4", "nf4" or "int8".'

# By method, arguments of Keras and of other libraries, and what to do.
ARGUMENTS = {
    "from_preset": {
        "torch_dtype": "Use `dtype`.",
        "max_length": "Use `sequence_length`.",
        "max_seq_length": "Use `sequence_length`.",
        "peft_config": "Use lora=kpt.LoRA(rank=16).",
        "lora_rank": "Use lora=kpt.LoRA(rank=16).",
        "load_in_4bit": _FOUR_BITS,
        "load_in_8bit": _FOUR_BITS,
        "quantization_config": _FOUR_BITS,
        "gradient_checkpointing": 'Use remat="full".',
    },
    "compile": {
        "metrics": _METRICS,
        "weighted_metrics": _METRICS,
        "loss_weights": "Use loss=kpt.losses.SumLoss(losses, weights).",
        "jit_compile": "Steps are always compiled; run_eagerly=True turns "
        "that off.",
        "steps_per_execution": "Steps never wait for the host; leave it out.",
        "auto_scale_loss": "Train in bfloat16, which needs no scaled losses.",
        "learning_rate": "Use optimizer=keras.optimizers.AdamW(learning_rate)"
        ".",
        "beta": "It belongs to the loss: loss=kpt.losses.DPOLoss(beta=0.1).",
        "gradient_accumulation_steps": "Use `micro_batch_size`, the rows of a "
        "batch that are computed at once.",
        "reward_funcs": "Use `rewards`.",
    },
    "fit": {
        "x": "Pass the rows as `dataset`, the first argument.",
        "y": _ROWS,
        "sample_weight": _WEIGHTS,
        "class_weight": _WEIGHTS,
        "validation_split": "Split the rows: `fit(rows[100:], "
        "validation_data=rows[:100])`.",
        "validation_batch_size": "It is `batch_size`; leave it out.",
        "validation_steps": "Pass fewer rows as `validation_data`.",
        "validation_freq": "Validation ends each epoch; for other times call "
        "`evaluate` between two calls of `fit`.",
        "steps_per_epoch": _FEWER,
        "initial_epoch": "With callbacks=[kpt.callbacks.Checkpoint(directory)]"
        " a run resumes where it stopped.",
        "num_train_epochs": "Use `epochs`.",
        "learning_rate": "Use `compile(optimizer=...)`.",
        "max_steps": _FEWER,
        "share_prefix": "It is for the completions of one prompt; use "
        "packing=True.",
        "eval_dataset": "Use `validation_data`.",
    },
    "evaluate": {
        "y": _ROWS,
        "sample_weight": _WEIGHTS,
        "steps": "Pass fewer rows as `dataset`.",
    },
    "generate": {
        "max_length": _LENGTH,
        "max_new_tokens": _LENGTH,
        "max_completion_length": _LENGTH,
        "do_sample": "Use `temperature`; 0 is greedy decoding.",
        "num_return_sequences": "Use `num_generations`.",
        "n": "Use `num_generations`.",
        "stop": "Use `stop_token_ids`.",
        "strip_prompt": "Completions never contain their prompts.",
    },
}

# Where a misplaced argument is looked for.
PLACES = (
    "from_preset",
    "compile",
    "fit",
    "evaluate",
    "generate",
    "log_probs",
    "plan",
)
# What `**kwargs` of a method are passed on to.
_PASSED_ON = {"from_preset": "__init__", "from_task": "__init__"}

_SAVING = (
    "Use `save_adapter` for an adapter, `export` or `save_to_preset` for a "
    "model, and `kpt.callbacks.Checkpoint(directory)` for a run."
)
_WEIGHT_FILES = (
    "It knows only whole models, without the adapter's settings or the "
    "optimizer. Use `save_adapter`/`load_adapter` for an adapter, `export` "
    "or `save_to_preset` for a model, and "
    "`kpt.callbacks.Checkpoint(directory)` for a run."
)
_NO_COPY = (
    "A task holds a model and a run. Use `from_task(task)` for another stage "
    "of training, or `from_preset` for another copy of the model."
)
_PREDICT = (
    "Use `generate(prompts)` for completions, `log_probs(rows)` for "
    "log-probabilities, or the `score(rows)` of a `kpt.RewardTask`."
)

# Methods of `keras.Model`, and what to do.
METHODS = {
    "predict": _PREDICT,
    "predict_on_batch": _PREDICT,
    "train_on_batch": "Use `fit(rows, batch_size=len(rows))`, which does one "
    "step, or override `train_step(state, batch)`.",
    "test_on_batch": "Use `evaluate(rows)`.",
    "save": _SAVING,
    "save_weights": _WEIGHT_FILES,
    "load_weights": _WEIGHT_FILES,
    "quantize": (
        "A quantized model can be sampled from but not trained: export the "
        "trained model, then quantize that."
    ),
    "get_config": _NO_COPY,
    "__deepcopy__": _NO_COPY,
    "__reduce__": _NO_COPY,
}

# Methods whose overrides Keras would call and tasks do not, and what to do.
UNUSED = {
    "compute_loss": "Subclass `kpt.losses.Loss` for another loss.",
    "compute_metrics": _METRICS,
}


def explained(method):
    """Makes a method name what to use for arguments that it lacks.

    `method` is a function of a `keras.Model`, or of its class.
    """
    name = method.__name__

    @functools.wraps(method)
    def checked(self, *args, **kwargs):
        cls = self if isinstance(self, type) else type(self)
        # A subclass may take other arguments than it passes on.
        bases = itertools.dropwhile(
            lambda base: _own(base, name) is not checked, cls.__mro__
        )
        taken, takes_others = _arguments(cls, name, bases)
        for key, value in kwargs.items():
            if key in taken or value is None:
                continue
            if key in (instead := ARGUMENTS.get(name, {})):
                raise ValueError(
                    f"{_title(cls, name)} has no argument `{key}`. "
                    f"{instead[key]} Received: {key}={reprlib.repr(value)}"
                )
            if not takes_others:
                raise _unknown(cls, name, key, taken)
        return method(self, *args, **kwargs)

    return checked


def _own(cls, name):
    """Returns a class's own function of a name, or `None`."""
    own = vars(cls).get(name)
    return getattr(own, "__func__", own)


def _arguments(cls, name, bases):
    """Finds the arguments of a method, with those that it passes on.

    `bases` are the classes to look at, in order. Returns a set of names, and
    whether others are passed on to Keras.
    """
    found, others = set(), True
    for base in itertools.takewhile(lambda c: c is not keras.Model, bases):
        if others and (method := _own(base, name)) is not None:
            given = inspect.signature(method).parameters.values()
            others = any(p.kind is p.VAR_KEYWORD for p in given)
            found.update(p.name for p in given if p.kind is not p.VAR_KEYWORD)
    if others and name in _PASSED_ON:
        more, others = _arguments(cls, _PASSED_ON[name], cls.__mro__)
        found |= more
    return found - {"self", "cls"}, others


def of_evaluation(task, kwargs):
    """Returns the arguments of Keras's own `evaluate`, or raises an error.

    `kwargs` are those that the `evaluate` of a `task` does not name.
    """
    passed_on = ("_use_cached_eval_dataset", "steps", "callbacks")
    ignored = ("x", "y", "sample_weight", "return_dict")
    for name in kwargs:
        if name not in (*passed_on, *ignored):
            given = inspect.signature(task.evaluate).parameters
            raise _unknown(type(task), "evaluate", name, given)
    return {k: v for k, v in kwargs.items() if k in passed_on}


def _title(cls, method):
    name = cls.__name__
    return f"`{name}`" if method == "__init__" else f"`{name}.{method}`"


def _unknown(cls, method, name, taken):
    """Returns a `TypeError` with the methods that take an argument `name`."""
    places = [
        f"`{place}`"
        for place in PLACES
        if name in _arguments(cls, place, cls.__mro__)[0]
    ]
    near = difflib.get_close_matches(name, taken, 1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    if places:
        *rest, last = places
        listed = f"{', '.join(rest)} and {last}" if rest else last
        hint = f" It is an argument of {listed}."
    return TypeError(f"{_title(cls, method)} has no argument `{name}`.{hint}")


def without_methods(cls):
    """Makes a subclass of `keras.Model` name what to use for `METHODS`."""

    def refusal(name, instead):
        def refuse(self, *args, **kwargs):
            raise ValueError(
                f"`{type(self).__name__}` has no `{name}`. {instead}"
            )

        refuse.__name__ = name
        refuse.__doc__ = f"Raises a `ValueError`. {instead}"
        return refuse

    for name, instead in METHODS.items():
        setattr(cls, name, refusal(name, instead))
    return cls


def check_overrides(task, base):
    """Raises a `ValueError` for a step as Keras's models have it.

    `base` is the class whose `train_step` and `test_step` tasks override.
    """
    own = type(task)
    for name, instead in UNUSED.items():
        if getattr(own, name) is not getattr(keras.Model, name):
            raise ValueError(
                f"`{own.__name__}.{name}` would never be called. {instead}"
            )
    for name in ("train_step", "test_step"):
        try:
            inspect.signature(getattr(task, name)).bind("state", "batch")
        except TypeError:
            raise ValueError(
                f"`{own.__name__}.{name}` must be a function of `state` and "
                "`batch`, dicts of arrays, that returns `(logs, state)`; see "
                f"`kpt.{base.__name__}.{name}`. Keras's `{name}(data)` would "
                "change variables in place."
            ) from None


def check_step(result):
    """Raises a `ValueError` for what no `train_step` may return."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not all(isinstance(x, dict) for x in result):
        raise ValueError(
            "`train_step` must return `(logs, state)`, two dicts. Received: "
            f"{reprlib.repr(result)}"
        )
    return result
