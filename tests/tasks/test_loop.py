"""`kpt.Loop`: a user's own loop over the steps of `fit`."""

import functools

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import (
    REFERENCE,
    one_layer,
    random_rows,
    read_log,
    starts_again,
    weights,
)

MODEL = one_layer(REFERENCE / "models/llama3")
ROWS = random_rows(12, seed=3)


def make(cls=kpt.SFTTask, lora=True, optimizer=None, **settings):
    task = cls.from_preset(
        MODEL,
        sequence_length=64,
        lora=kpt.LoRA(rank=4) if lora is True else lora or None,
    )
    if cls is kpt.GRPOTask:
        settings |= {"rewards": [lambda completions: [0.0] * len(completions)]}
        settings |= {"num_generations": 4, "max_completion_length": 8}
    task.compile(optimizer or keras.optimizers.Adam(1e-2), **settings)
    return task


def data(count=6, seed=0, scale=1.0, **extras):
    """Data of GRPO: pairs that share a prompt, of different lengths."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        if i % 2 == 0:
            prompt = rng.integers(3, 500, rng.integers(3, 9))
        size = int(rng.integers(2, 8))
        found.append(
            kpt.Datum(
                prompt,
                rng.integers(3, 500, size),
                advantages=scale * (-1.0) ** i * (1 + i),
                old_per_token_logps=-rng.uniform(5, 7, size),
                **extras,
            )
        )
    return found


def assert_equal(one, other, tolerance=0.0):
    theirs = weights(other)
    for name, value in weights(one).items():
        np.testing.assert_allclose(
            value, theirs[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def loop_of(task, batches, **kwargs):
    logs = []
    with kpt.Loop(task, **kwargs) as loop:
        for batch in batches:
            loop.forward_backward(batch)
            logs.append({k: float(v) for k, v in loop.optim_step().items()})
    return logs


@pytest.mark.parametrize(
    "lora, settings",
    [(True, {}), (False, {"micro_batch_size": 2, "max_grad_norm": 0.1})],
)
def test_one_call_a_step_is_fit_bit_for_bit(lora, settings, tmp_path):
    by_fit, by_loop = make(lora=lora, **settings), make(lora=lora, **settings)
    log = kpt.callbacks.MetricsLog(tmp_path)
    by_fit.fit(ROWS, 4, 2, shuffle=False, callbacks=[log], verbose=0)
    batches = [ROWS[i : i + 4] for i in range(0, 12, 4)] * 2
    logs = loop_of(by_loop, batches)
    assert_equal(by_fit, by_loop)
    assert by_loop.step == by_fit.step == 6
    for line, found in zip(read_log(tmp_path), logs, strict=True):
        assert line["loss"] == found["loss"]
        assert line["grad_norm"] == found["grad_norm"]


def test_preferences_are_those_of_fit():
    rows = [
        {"prompt": f"{i} + {i}", "chosen": f" = {2 * i}", "rejected": " = 0"}
        for i in range(1, 9)
    ]
    by_fit, by_loop = make(kpt.DPOTask), make(kpt.DPOTask)
    by_fit.fit(rows, 4, shuffle=False, verbose=0)
    loop_of(by_loop, [rows[:4], rows[4:]])
    assert_equal(by_fit, by_loop)


@functools.cache
def one_call():
    """The task and the logs of one call with `data(6, seed=1)`."""
    # Adam turns rounding into steps where a gradient is all but 0.
    task = make(kpt.GRPOTask, optimizer=keras.optimizers.SGD(0.1))
    [log] = loop_of(task, [data(6, seed=1)])
    return task, log


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"packing": True}, marks=pytest.mark.full),
        {"share_prefix": True},
    ],
)
def test_several_calls_add_up(settings):
    """To the update of one call with all data, however they are laid out."""
    whole, log = one_call()
    parts = make(kpt.GRPOTask, optimizer=keras.optimizers.SGD(0.1))
    everything = data(6, seed=1)
    with kpt.Loop(parts, **settings) as loop:
        results = [
            loop.forward_backward(some)
            for some in (everything[:2], everything[2:])
        ]
        found = loop.optim_step()
        losses = [float(result.metrics["loss"]) for result in results]
    assert_equal(whole, parts, 1e-6)
    for name in ("loss", "grad_norm", "num_tokens"):
        if name != "num_tokens" or not settings.get("share_prefix"):
            assert float(found[name]) == pytest.approx(log[name], rel=1e-5)
    assert losses[0] != losses[1]


def test_dropout_of_several_calls_is_that_of_one():
    one, several = (
        make(
            lora=kpt.LoRA(rank=4, dropout=0.5),
            optimizer=keras.optimizers.SGD(1.0),
        )
        for _ in "ab"
    )
    loop_of(one, [ROWS[:6]])
    with kpt.Loop(several) as loop:
        for rows in (ROWS[:1], ROWS[1:4], ROWS[4:6]):
            loop.forward_backward(rows)
            with pytest.raises(ValueError, match="couples"):
                other = kpt.losses.FunctionLoss(negative_mean)
                loop.forward_backward(ROWS[6:], loss=other)
        loop.optim_step()
    assert_equal(one, several, 1e-6)


def test_metrics_can_be_read_before_the_step():
    """They are the step's, whose weights then are those of `fit` to 1e-6."""
    early, late = (
        make(kpt.GRPOTask, optimizer=keras.optimizers.SGD(0.1)) for _ in "ab"
    )
    with kpt.Loop(early) as loop:
        before = loop.forward_backward(data()).metrics
        loop.optim_step()
    with kpt.Loop(late) as loop:
        result = loop.forward_backward(data())
        loop.optim_step()
        after = result.metrics
    assert set(before) == set(after) and "loss" in before
    for name in before:
        assert float(before[name]) == pytest.approx(
            float(after[name]), rel=1e-5, abs=1e-6
        )
    assert_equal(early, late, 1e-6)


class Batches(keras.callbacks.Callback):
    """Keeps the batches of a run that samples."""

    def on_train_batch_begin(self, batch, logs=None):
        self.found = self.model.run.collection.batches


def data_of(batch):
    """The data of a batch of one sequence a row, with what PPO reads."""
    names = ("advantages", "returns", "old_values", "old_per_token_logps")
    for i, count in enumerate((batch["segment_ids"] > 0).sum(axis=1)):
        begin = int(np.argmax(batch["completion_mask"][i] > 0))
        part = slice(begin, count)
        ids = batch["token_ids"][i]
        extras = {name: batch[name][i, part] for name in names}
        yield kpt.Datum(ids[:begin], ids[part], **extras)


def test_an_update_of_ppo_is_that_of_fit():
    settings = {
        "kl_coef": 0,
        "num_iterations": 1,
        "max_completion_length": 6,
        "rewards": [lambda completions: [len(c) for c in completions]],
    }

    def made():
        optimizer = keras.optimizers.SGD(0.1)
        return make(kpt.PPOTask, optimizer=optimizer, **settings)

    by_fit, first = made(), starts_again(made)
    rows = [{"prompt_ids": row["token_ids"][:9]} for row in ROWS[:4]]
    kept = Batches()
    by_fit.fit(rows, 4, shuffle=False, callbacks=[kept], verbose=0)
    [batch] = kept.found
    data = list(data_of(batch))
    by_batch = first()
    loop_of(by_batch, [batch])
    assert_equal(by_fit, by_batch)
    by_data = first()
    with kpt.Loop(by_data) as loop:
        for name, known in (
            (loop.values(data), "old_values"),
            (loop.log_probs(data), "old_per_token_logps"),
        ):
            for found, datum in zip(name, data, strict=True):
                np.testing.assert_allclose(
                    found, datum.extras[known], atol=1e-5
                )
        loop.forward_backward(data)
        loop.optim_step()
        loop.forward_backward(data)
        with pytest.raises(ValueError, match="has several normalizers"):
            loop.forward_backward(data)
        loop._begin_step()
        with pytest.raises(ValueError, match="reads 'advantages'.*lack"):
            loop.forward_backward([kpt.Datum([3], [4])])
            loop.optim_step()
        with pytest.raises(ValueError, match="must be a list of `kpt.Datum`"):
            loop.values(rows)
    assert_equal(by_fit, by_data, 1e-6)


@functools.cache
def teacher():
    """A model of the student's tokens with other weights."""
    task = kpt.SFTTask.from_preset(MODEL)
    for variable in task.trainable_variables:
        variable.assign(1.2 * variable.value)
    return task.causal_lm


def distill(**settings):
    task = kpt.DistillTask.from_preset(
        MODEL,
        teacher=teacher(),
        sequence_length=64,
        lora=kpt.LoRA(rank=4),
    )
    task.compile(keras.optimizers.Adam(1e-2), **settings)
    return task


def test_distillation_is_that_of_fit_and_goes_on(tmp_path):
    by_fit, by_loop, resumed = distill(), distill(), distill()
    by_fit.fit(ROWS[:8], 4, shuffle=False, verbose=0)
    with kpt.Loop(by_loop) as loop:
        loop.forward_backward(ROWS[:4])
        loop.optim_step()
        loop.save_state(tmp_path / "1")
        loop.forward_backward(ROWS[4:8])
        loop.optim_step()
        with pytest.raises(ValueError, match="reads more than a Datum has"):
            loop.forward_backward(data())
        with pytest.raises(ValueError, match="has no value model"):
            loop.values(data())
    with kpt.Loop(resumed) as loop:
        loop.load_state(tmp_path / "1")
        loop.forward_backward(ROWS[4:8])
        loop.optim_step()
    assert_equal(by_fit, by_loop)
    assert_equal(by_fit, resumed)


def test_samples_are_distilled_as_rows():
    task = distill(loss=kpt.losses.ReverseKLLoss())
    divergences = []
    with kpt.Loop(task) as loop:
        [samples] = loop.sample(
            [
                kpt.rollout.Request(
                    [5, 6, 7], num_generations=4, max_tokens=6, seed=1
                )
            ]
        )
        rows = [
            {
                "token_ids": [5, 6, 7, *sample.token_ids],
                "completion_mask": [0] * 3 + [1] * len(sample.token_ids),
            }
            for sample in samples
        ]
        for _ in range(4):
            loop.forward_backward(rows)
            divergences.append(float(loop.optim_step()["divergence"]))
    assert divergences[-1] < 0.9 * divergences[0]


def test_samples_have_the_weights_of_the_last_step():
    task = make(kpt.GRPOTask)
    request = kpt.rollout.Request([5, 6, 7], max_tokens=6, seed=1)
    with kpt.Loop(task) as loop:
        for _ in range(2):
            [[sample]] = loop.sample([request])
            datum = kpt.Datum([5, 6, 7], sample.token_ids, advantages=1.0)
            [logps] = loop.log_probs([datum])
            np.testing.assert_allclose(
                logps, sample.per_token_logps, atol=1e-5
            )
            loop.forward_backward([datum])
            loop.optim_step(learning_rate=0.05)
        [[new]] = loop.sample([request])
    assert float(task.optimizer.learning_rate) == pytest.approx(0.05)
    # What had an advantage became likely.
    assert sum(new.per_token_logps) != pytest.approx(
        sum(sample.per_token_logps)
    )


def test_a_state_that_is_loaded_goes_on(tmp_path):
    begins = starts_again(lambda: make(kpt.GRPOTask))
    resumed = make(kpt.GRPOTask)
    batches = [data(seed=i) for i in range(4)]
    begun = begins()
    loop_of(begun, batches)
    straight = weights(begun)
    with kpt.Loop(begins()) as loop:
        for batch in batches[:2]:
            loop.forward_backward(batch)
            loop.optim_step()
        loop.save_state(tmp_path / "2")
        # The folder is replaced as a whole.
        loop.save_state(tmp_path / "2")
    with kpt.Loop(resumed) as loop:
        loop.load_state(tmp_path / "2")
        assert loop.step == 2
        for batch in batches[2:]:
            loop.forward_backward(batch)
            loop.optim_step()
    for name, value in weights(resumed).items():
        np.testing.assert_array_equal(value, straight[name], err_msg=name)


def blank(state, arrays):
    """Zeros in the numbers of the largest array, as after a loss of power.

    Elsewhere in the file they could make it unreadable, which Orbax notices.
    """
    numbers = max(arrays.values(), key=lambda x: x.size).tobytes()
    files = [path for path in state.rglob("d/*") if path.is_file()]
    [path] = [path for path in files if numbers in path.read_bytes()]
    content = path.read_bytes()
    path.write_bytes(content.replace(numbers, bytes(100) + numbers[100:]))


def test_it_goes_on_from_a_checkpoint_of_fit(tmp_path):
    first, second = make(), make()
    checkpoint = kpt.callbacks.Checkpoint(tmp_path)
    first.fit(ROWS, 4, callbacks=[checkpoint], verbose=0)
    with kpt.Loop(second) as loop:
        loop.load_state(tmp_path / "checkpoints" / "3")
        assert loop.step == 3
        assert_equal(first, second)
        with pytest.raises(ValueError, match="No state can be read from"):
            loop.load_state(tmp_path / "checkpoints" / "4")
        blank(tmp_path / "checkpoints" / "3" / "state", weights(first))
        with pytest.raises(ValueError, match="damaged: .* another checksum"):
            loop.load_state(tmp_path / "checkpoints" / "3")
    other = make(lora=False)
    with kpt.Loop(other) as loop:
        with pytest.raises(ValueError, match="lora"):
            loop.load_state(tmp_path / "checkpoints" / "3")


def negative_mean(batch, outputs):
    mask, logps = batch["completion_mask"], outputs["per_token_logps"]
    return -(mask * logps).sum() / mask.sum(), {"lowest": logps.min()}


def negative_sum(batch, outputs):
    mask, logps = batch["completion_mask"], outputs["per_token_logps"]
    return -(mask * logps).sum(), {}


def test_a_loss_of_ones_own():
    plain, own = (make(optimizer=keras.optimizers.SGD(0.1)) for _ in "ab")
    loss = kpt.losses.FunctionLoss(negative_mean)
    loop_of(plain, [ROWS[:4]])
    with kpt.Loop(own) as loop:
        result = loop.forward_backward(ROWS[:4], loss=loss)
        loop.optim_step()
        assert float(result.metrics["lowest"]) < 0
        # Another object of the same function is the same program.
        loss = kpt.losses.FunctionLoss(negative_mean)
        loop.forward_backward(ROWS[:4], loss=loss)
        with pytest.raises(ValueError, match="FunctionLoss couples"):
            loop.forward_backward(ROWS[4:8], loss=loss)
        loop.optim_step()
        assert len(loop._programs) == 1
    loop_of(plain, [ROWS[:4]])
    assert_equal(plain, own, 1e-6)


def test_sums_are_never_divided():
    loss = kpt.losses.FunctionLoss(negative_sum, is_sum=True)
    norms = []
    for parts in ([ROWS[:6]], [ROWS[:2], ROWS[2:6]]):
        with kpt.Loop(make(loss=loss)) as loop:
            for part in parts:
                loop.forward_backward(part)
            logs = loop.optim_step()
        norms.append([float(logs["grad_norm"]), float(logs["loss"])])
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_eight_devices_are_one(eight_devices):
    alone = make(kpt.GRPOTask, lora=False)
    batches = [data(seed=i) for i in range(2)]
    [first, second] = loop_of(alone, batches)
    del eight_devices
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    spread = make(kpt.GRPOTask, lora=False)
    with kpt.Loop(spread) as loop:
        loop.forward_backward(batches[0])
        loop.optim_step()
        for part in (batches[1][:2], batches[1][2:]):
            loop.forward_backward(part)
        found = loop.optim_step()
    assert float(found["grad_norm"]) == pytest.approx(
        second["grad_norm"], rel=1e-4
    )


def test_what_is_misused_is_explained():
    task = make(kpt.GRPOTask)
    loop = kpt.Loop(task)
    with pytest.raises(ValueError, match="`optim_step` is for the body of"):
        loop.optim_step()
    with loop:
        with pytest.raises(ValueError, match="no gradients to step by"):
            loop.optim_step()
        with pytest.raises(ValueError, match="one Loop at a time"):
            kpt.Loop(task).__enter__()
        with pytest.raises(ValueError, match="`fit` is called while"):
            task.fit([{"prompt": "a"}])
        with pytest.raises(ValueError, match="trains on samples. Pass a list"):
            loop.forward_backward([{"prompt": "a", "completion": "b"}])
        with pytest.raises(ValueError, match="reads 'advantages'.*lack"):
            loop.forward_backward([kpt.Datum([3], [4])])
            loop.optim_step()
        loop._begin_step()
        with pytest.raises(ValueError, match="id 9999 at place 1 of `compl"):
            loop.forward_backward([kpt.Datum([3], [4, 9999])])
        with pytest.raises(ValueError, match="datum 1 with 65 tokens"):
            loop.forward_backward(
                [kpt.Datum([3], [4]), kpt.Datum([3], [4] * 64)]
            )
        with pytest.raises(ValueError, match="same extras.*datum 1"):
            loop.forward_backward(
                [kpt.Datum([3], [4], advantages=1.0), kpt.Datum([3], [4])]
            )
        with pytest.raises(ValueError, match="Datum at 0 and dict at 1"):
            loop.forward_backward([kpt.Datum([3], [4]), {}])
        with pytest.raises(ValueError, match="`loss` must be"):
            loop.forward_backward(data(), loss="grpo")
        loop.forward_backward(data())
        with pytest.raises(ValueError, match="Gradients are not saved"):
            loop.save_state("nowhere")
        with pytest.raises(ValueError, match="another loss"):
            loop.forward_backward(data(), loss=kpt.losses.DAPOLoss())
        with pytest.raises(ValueError, match="positive number.*-1"):
            loop.optim_step(learning_rate=-1)
        loop.optim_step()
    task = make()
    with kpt.Loop(task):
        with pytest.raises(ValueError, match="`compile` is called while"):
            task.compile()
    # Given back.
    task.compile()
    with pytest.raises(ValueError, match="compile"):
        kpt.Loop(kpt.SFTTask.from_preset(MODEL))
    with pytest.raises(ValueError, match="must be a task"):
        kpt.Loop(task.causal_lm)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([3], []), "must have a completion.*1 tokens of a prompt and 0"),
        (([3.5], [4]), "`prompt_ids` of a Datum must be a list of ints"),
        (([3], [4, 5], [1.0]), "`mask`.*each of the 2 tokens"),
        (([3], [4, 5], 1.0), "`mask` must have a number for each token"),
    ],
)
def test_data_that_are_none(arguments, message):
    with pytest.raises(ValueError, match=message):
        kpt.Datum(*arguments)
    with pytest.raises(ValueError, match="`advantages` of a Datum"):
        kpt.Datum([3], [4, 5], advantages=[1.0, 2.0, 3.0])
