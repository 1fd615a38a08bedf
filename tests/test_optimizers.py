"""Optimizers in the training step."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import keras_posttrain as kpt
from keras_posttrain import optimizers
from keras_posttrain.training.step import apply_optimizer
from tests.support import REFERENCE, random_rows, read_log, weights

SHAPES = {
    "kernel": (3, 4),
    "bias": (2, 2),
    "scale": (4,),
}


def make_variables(dtype="float32", seed=0):
    """Returns a matrix, a bias with two axes (as in attention), a norm."""
    rng = np.random.default_rng(seed)
    found = []
    for name, shape in SHAPES.items():
        with keras.name_scope("layer"):
            value = 1 + rng.random(shape).astype("float32")
            found.append(keras.Variable(value, dtype=dtype, name=name))
    return found


class Run:
    """An optimizer with the state that the step keeps for it."""

    def __init__(self, optimizer, variables):
        self.optimizer = optimizers.get(optimizer, learning_rate=0.1)
        self.variables = variables
        optimizers.check(self.optimizer)
        self.masters = optimizers.build(self.optimizer, variables)
        self.state = {
            "trainable": [v.value for v in variables],
            "optimizer": [v.value for v in self.optimizer.variables],
        }
        self.apply = jax.jit(
            lambda state, gradients, keep: apply_optimizer(
                self.optimizer, self.masters, state, gradients, keep
            )
        )

    def step(self, gradients, keep=True):
        self.state = self.apply(self.state, gradients, keep)
        return [np.array(x, "float32") for x in self.state["trainable"]]


def random_gradients(seed):
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.normal(size=shape), "float32")
        for shape in SHAPES.values()
    ]


def zero_gradients():
    return [jnp.zeros(shape) for shape in SHAPES.values()]


def decayed(run):
    """Returns the variables that a step with zero gradients shrinks."""
    before = [np.array(x, "float32") for x in run.state["trainable"]]
    after = run.step(zero_gradients())
    return {
        v.name
        for v, x, y in zip(run.variables, before, after)
        if (x != y).any()
    }


DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_weight_decay_leaves_norms_and_biases_out(name, dtype):
    make = getattr(keras.optimizers, name)
    run = Run(make(0.1, weight_decay=0.5), make_variables(dtype))
    assert decayed(run) == {"kernel"}


def test_decayed_weights_shrink_by_rate_times_decay():
    """They are multiplied by 1 - 0.1 * 0.5 = 0.95."""
    variables = make_variables()
    before = np.array(variables[0].value)
    run = Run(keras.optimizers.AdamW(0.1, weight_decay=0.5), variables)
    after = run.step(zero_gradients())[0]
    np.testing.assert_allclose(after, 0.95 * before, rtol=1e-6)


@DTYPES
def test_a_users_exclusions_are_kept(dtype):
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    run = Run(optimizer, make_variables(dtype))
    assert decayed(run) == {"bias", "scale"}

    variables = make_variables(dtype)
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[variables[1]])
    assert decayed(Run(optimizer, variables)) == {"kernel", "scale"}

    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[])
    run = Run(optimizer, make_variables(dtype))
    assert decayed(run) == set(SHAPES)


@DTYPES
def test_the_optax_mask_leaves_norms_and_biases_out(dtype):
    transform = optax.adamw(0.1, weight_decay=0.5, mask=kpt.decay_mask)
    assert decayed(Run(transform, make_variables(dtype))) == {"kernel"}
    transform = optax.adamw(0.1, weight_decay=0.5)
    run = Run(transform, make_variables(dtype))
    assert decayed(run) == set(SHAPES), "Optax is taken as it is"


def test_the_mask_uses_path_and_axes():
    params = {
        "a/query/kernel": np.zeros((2, 3, 4)),
        "a/query/bias": np.zeros((3, 4)),
        "a/norm/scale": np.zeros(4),
        "bias_net/kernel": np.zeros((2, 2)),
        "model.layers.0.mlp.up_proj.lora_a": np.zeros((4, 2)),
    }
    assert list(kpt.decay_mask(params).values()) == [
        True, False, False, True, True,
    ]  # fmt: skip
    for v in make_variables():
        assert optimizers.is_decayed(v.path, v) == (v.name == "kernel")


# Optax


@DTYPES
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_optax_equals_keras_step_for_step(momentum, dtype):
    left = Run(optax.sgd(0.1, momentum=momentum), make_variables(dtype))
    right = Run(
        keras.optimizers.SGD(0.1, momentum=momentum), make_variables(dtype)
    )
    for step in range(6):
        gradients = random_gradients(step)
        for a, b in zip(left.step(gradients), right.step(gradients)):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_optax_adam_is_optaxs():
    """The wrapped transformation equals Optax's own loop."""
    transform = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.linear_schedule(0.1, 0.0, 5),
            weight_decay=0.2,
            mask=kpt.decay_mask,
        ),
    )
    variables = make_variables()
    params = {v.path: v.value for v in variables}
    state = transform.init(params)
    run = Run(transform, variables)
    for step in range(4):
        gradients = random_gradients(step)
        got = run.step(gradients)
        named = {v.path: g for v, g in zip(variables, gradients)}
        updates, state = transform.update(named, state, params)
        params = optax.apply_updates(params, updates)
        for a, v in zip(got, variables):
            np.testing.assert_allclose(a, params[v.path], rtol=2e-6)
    # Counts are integers in the optimizer's variables too.
    kinds = {str(v.dtype) for v in run.optimizer.variables}
    assert "int32" in kinds and "float32" in kinds


@DTYPES
def test_optax_partitions_by_path(dtype):
    def labels(params):
        return {k: "off" if k.endswith("bias") else "on" for k in params}

    transform = optax.multi_transform(
        {"on": optax.adam(0.1), "off": optax.set_to_zero()}, labels
    )
    run = Run(transform, make_variables(dtype))
    before = [np.array(x, "float32") for x in run.state["trainable"]]
    for step in range(3):
        after = run.step(random_gradients(step))
    moved = [(x != y).any() for x, y in zip(before, after)]
    assert moved == [True, False, True]


def test_two_variables_of_one_path_are_refused():
    variables = make_variables() + make_variables()
    with pytest.raises(ValueError, match="by path, and two variables share"):
        Run(optax.sgd(0.1), variables)


def test_an_injected_learning_rate_is_shown_and_settable():
    make = optax.inject_hyperparams(optax.sgd)
    run = Run(optax.chain(optax.clip(9.0), make(0.5)), make_variables())
    assert float(run.optimizer.learning_rate) == 0.5
    run.optimizer.learning_rate = 0.25
    run.state["optimizer"] = [v.value for v in run.optimizer.variables]
    before = [np.array(x) for x in run.state["trainable"]]
    gradients = random_gradients(0)
    for x, y, g in zip(before, run.step(gradients), gradients):
        np.testing.assert_allclose(y, x - 0.25 * g, rtol=1e-6)


def test_a_hidden_learning_rate_is_not_a_number_and_not_settable():
    make = optax.inject_hyperparams(optax.sgd)
    hidden = {
        "plain": optax.sgd(0.5),
        "two": optax.multi_transform(
            {"a": make(0.1), "b": make(0.2)},
            lambda params: dict.fromkeys(params, "a"),
        ),
    }
    for transform in hidden.values():
        run = Run(transform, make_variables())
        assert np.isnan(run.optimizer.learning_rate)
        with pytest.raises(ValueError, match="inject_hyperparams") as e:
            run.optimizer.learning_rate = 0.25
        assert "Received: learning_rate=0.25" in str(e.value)


def test_an_injected_schedule_is_shown_and_not_settable():
    """Its count is no learning rate, and a rate that is set would be
    overwritten by the next step."""
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    make = optax.inject_hyperparams(optax.sgd)
    run = Run(make(learning_rate=schedule), make_variables())
    assert float(run.optimizer.learning_rate) == 1.0
    before = [np.array(x) for x in run.state["trainable"]]
    gradients = random_gradients(0)
    run.step(gradients)
    after = run.step(gradients)
    for x, y, g in zip(before, after, gradients):
        np.testing.assert_allclose(y, x - (1 + 0.75) * g, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="schedule"):
        run.optimizer.learning_rate = 0.25


# Master weights


def test_updates_below_bfloat16_add_up():
    """100 steps of 2**-12 on weights in [1, 2), where bfloat16 counts in
    2**-7: each alone rounds to nothing; together they are 3 counts."""
    variables = make_variables("bfloat16")
    run = Run(keras.optimizers.SGD(2.0**-12), variables)
    before = [np.array(x, "float32") for x in run.state["trainable"]]
    ones = [jnp.ones(shape, "bfloat16") for shape in SHAPES.values()]
    first = run.step(ones)
    for x, y in zip(before, first):
        np.testing.assert_array_equal(x, y)
    for _ in range(99):
        after = run.step(ones)
    for x, y in zip(before, after):
        np.testing.assert_allclose(x - y, 100 * 2.0**-12, atol=2.0**-8)
        assert (x - y > 0).all()


def test_masters_stay_within_rounding_of_the_float32_run():
    half = make_variables("bfloat16")
    full = make_variables()
    for a, b in zip(full, half):
        a.assign(b.value.astype("float32"))
    left = Run(keras.optimizers.Adam(1e-3), half)
    right = Run(keras.optimizers.Adam(1e-3), full)
    for step in range(20):
        gradients = random_gradients(step)
        got, want = left.step(gradients), right.step(gradients)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=2.0**-8)
    masters = [left.state["optimizer"][i] for i in left.masters]
    for a, b in zip(masters, want):
        assert a.dtype == "float32"
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert {str(x.dtype) for x in left.state["trainable"]} == {"bfloat16"}


def test_float32_weights_have_no_masters():
    run = Run(keras.optimizers.Adam(1e-3), make_variables())
    assert run.masters == [None] * len(SHAPES)
    assert len(run.optimizer.variables) == 2 + 2 * len(SHAPES)


def test_masters_keep_the_paths_of_the_weights():
    variables = make_variables("bfloat16")
    run = Run(keras.optimizers.Adam(1e-3), variables)
    masters = [run.optimizer.variables[i] for i in run.masters]
    assert [m.path for m in masters] == [v.path for v in variables]


def test_a_step_that_is_not_kept_changes_nothing():
    run = Run(keras.optimizers.Adam(0.1), make_variables("bfloat16"))
    before = jax.tree.map(np.array, run.state)
    bad = [x * jnp.nan for x in random_gradients(0)]
    run.step(bad, keep=False)
    jax.tree.map(np.testing.assert_array_equal, before, run.state)


OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(0.1, clipnorm=1.0),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "centered": lambda: keras.optimizers.RMSprop(0.1, centered=True),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "average": lambda: keras.optimizers.Adam(
        0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "8 bits": lambda: kpt.AdamW8bit(0.1),
    "optax": lambda: optax.adamw(0.1),
}


@DTYPES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_that_of_the_optimizer_alone(name, dtype):
    """With moments that are written once, on a CPU; a step that is not kept
    changes nothing."""
    run = Run(OPTIMIZERS[name](), make_variables(dtype))
    plain = jax.jit(run.optimizer.stateless_apply)
    for seed, keep in enumerate((True, True, False, True)):
        gradients = random_gradients(seed)
        old, states = run.state["trainable"], run.state["optimizer"]
        weights = [
            value if at is None else states[at]
            for value, at in zip(old, run.masters)
        ]
        new, renewed = plain(states, gradients, weights)
        want = ([n.astype(o.dtype) for n, o in zip(new, old)], renewed)
        run.step(gradients, keep)
        got = run.state["trainable"], run.state["optimizer"]
        for a, b in zip(
            jax.tree.leaves(got),
            jax.tree.leaves(want if keep else (old, states)),
            strict=True,
        ):
            assert a.dtype == b.dtype
            a, b = (np.asarray(x, "float32") for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_moments_are_written_once_and_not_copied():
    """XLA would copy both moments of Adam, each as large as the weight."""
    weight = keras.Variable(np.ones((512, 512), "float32"), name="kernel")
    run = Run(keras.optimizers.AdamW(0.1), [weight])
    program = jax.jit(
        lambda state, gradients: apply_optimizer(
            run.optimizer,
            run.masters,
            state,
            gradients,
            gradients[0][0, 0] > 0,
        ),
        donate_argnums=0,
    ).lower(run.state, [weight.value])
    memory = program.compile().memory_analysis()
    assert memory.temp_size_in_bytes < weight.value.nbytes / 8


# Arguments


def test_auto_is_adamw_without_decay():
    optimizer = optimizers.get("auto", learning_rate=3e-4)
    assert type(optimizer) is keras.optimizers.AdamW
    np.testing.assert_allclose(optimizer.learning_rate, 3e-4, rtol=1e-6)
    assert optimizer.epsilon == 1e-8 and not optimizer.weight_decay


def test_names_and_objects_are_accepted():
    assert type(optimizers.get("sgd", learning_rate=1)) is keras.optimizers.SGD
    optimizer = keras.optimizers.Lion(1e-4)
    assert optimizers.get(optimizer, learning_rate=1) is optimizer


@pytest.mark.parametrize("bad", ["no such", 3, None, object(), [1], {"lr": 1}])
def test_other_values_are_refused(bad):
    with pytest.raises(ValueError, match="an Optax transformation") as e:
        optimizers.get(bad, learning_rate=1e-3)
    assert f"Received: optimizer={bad!r}" in str(e.value)


def test_accumulation_in_the_optimizer_is_refused():
    optimizer = keras.optimizers.AdamW(1e-3, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="micro_batch_size") as e:
        optimizers.check(optimizer)
    assert "Received: gradient_accumulation_steps=4" in str(e.value)


def test_loss_scaling_is_refused():
    factor = keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    for optimizer in (factor, wrapped):
        with pytest.raises(ValueError, match="Losses are not scaled"):
            optimizers.check(optimizer)


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="Nothing is trainable"):
        optimizers.build(keras.optimizers.SGD(0.1), [])


# Through a task

ROWS = random_rows(8, low=6, high=14, seed=2)


def make_task(**kwargs):
    return kpt.SFTTask.from_preset(
        REFERENCE / "models/qwen2", sequence_length=16, **kwargs
    )


def test_schedules_count_optimizer_steps(tmp_path):
    """8 rows in batches of 4, each two micro-batches, two epochs: four
    steps, whose rates the schedule gives for 0 to 3."""
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 4, 0.2)
    task = make_task(lora=kpt.LoRA(rank=2))
    task.compile(keras.optimizers.SGD(schedule), micro_batch_size=2)
    task.fit(
        ROWS,
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[kpt.callbacks.MetricsLog(tmp_path)],
    )
    rates = [line["learning_rate"] for line in read_log(tmp_path)]
    np.testing.assert_allclose(rates, [1.0, 0.8, 0.6, 0.4], rtol=1e-6)
    assert int(task.optimizer.iterations.value) == 4


def test_callbacks_set_an_injected_learning_rate():
    make = optax.inject_hyperparams(optax.sgd)
    task = make_task(lora=kpt.LoRA(rank=2))
    task.compile(make(learning_rate=0.5))
    rates = [0.25, 0.0]
    scheduler = keras.callbacks.LearningRateScheduler(lambda i, _: rates[i])
    changes = []
    last = [weights(task)]

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            now = weights(task)
            changes.append(
                any((now[k] != v).any() for k, v in last[0].items())
            )
            last[0] = now

    history = task.fit(
        ROWS, epochs=2, verbose=0, callbacks=[scheduler, Watch()]
    )
    np.testing.assert_allclose(history.history["learning_rate"], rates)
    assert changes == [True, False]


def test_bfloat16_weights_train():
    """Every matrix moves, and as in float32 to bfloat16's rounding: eight
    steps of Adam at 1e-3 move a weight by 8e-3 at most."""
    results = {}
    for dtype in ("float32", "bfloat16"):
        task = make_task(dtype=dtype)
        if dtype == "bfloat16":
            start = weights(task)
        else:
            # The same weights, rounded.
            for v in task.trainable_variables:
                v.assign(v.value.astype("bfloat16").astype("float32"))
        task.compile(keras.optimizers.Adam(1e-3))
        history = task.fit(
            ROWS, batch_size=4, epochs=4, shuffle=False, verbose=0
        )
        results[dtype] = weights(task), history.history["loss"]
    (full, losses), (half, half_losses) = results.values()
    np.testing.assert_allclose(half_losses, losses, rtol=0.02)
    assert half_losses[-1] < half_losses[0]
    for key, value in half.items():
        assert value.dtype == "bfloat16"
        value = value.astype("float32")
        moved = np.abs(value - start[key].astype("float32"))
        assert moved.max() > 0, key
        # Signs of small gradients may differ, by at most this bound.
        np.testing.assert_allclose(
            value, full[key], rtol=2.0**-8, atol=1.7e-2, err_msg=key
        )
        if key.endswith("key/bias"):
            # It shifts all scores alike, so its gradient is only rounding.
            continue
        close = np.isclose(value, full[key], rtol=2.0**-8, atol=2e-3)
        assert close.mean() > 0.9, key
