"""Training on rows with images, against transformers."""

import functools
import json

import keras
import numpy as np
import peft
import pytest
import torch

import keras_posttrain as kpt
from keras_posttrain.callbacks import Checkpoint
from keras_posttrain.models.hf.tensors import model_tensors
from keras_posttrain.models.vision import tower_of
from tests import vision
from tests.support import in_ci, starts_again, weights

ROWS = vision.random_rows((1, 2, 0, 1, 3, 1, 0, 2), seed=7)
RATE = 0.1


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    return vision.directory_of(request, tmp_path_factory, tower_layers=1)


def make(directory, kind=kpt.SFTTask, lora=None, micro_batch_size=None, **own):
    """A task whose adapter is not zero, with SGD."""
    settings = {"sequence_length": 160, "dtype": "float32"} | own
    task = kind.from_preset(directory, vision=True, lora=lora, **settings)
    if lora:
        rng = np.random.default_rng(0)
        for b in task.adapter.b:
            b.assign(rng.normal(0, 0.05, b.shape).astype("float32"))
    task.compile(
        optimizer=keras.optimizers.SGD(RATE),
        micro_batch_size=micro_batch_size,
        max_grad_norm=None,
    )
    return task


def step(directory, rows=ROWS, batch_size=8, packing=False, **settings):
    """Returns the loss and the update of one step on all rows."""
    task = make(directory, **settings)
    before = weights(task)
    history = task.fit(
        rows, batch_size, shuffle=False, packing=packing, verbose=0
    )
    after = weights(task)
    return history.history["loss"], {k: after[k] - before[k] for k in after}


@functools.cache
def plain_step(directory):
    return step(directory, lora=kpt.LoRA(rank=4))


def same(got, want, bound=2e-5):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    largest = max(np.abs(x).max() for x in want[1].values())
    assert got[1].keys() == want[1].keys() and largest > 1e-3
    for name, value in want[1].items():
        np.testing.assert_allclose(
            got[1][name], value, rtol=0, atol=bound * largest, err_msg=name
        )


def inputs(model, row):
    """What transformers' processor of a model makes of a row."""
    if isinstance(model, peft.PeftModel):
        model = model.get_base_model()
    return vision.inputs(row, model.config.model_type)


def reference_loss(model, task, rows):
    """transformers' mean loss of the tokens with loss."""
    total, count = 0.0, 0.0
    examples, _ = task.prepare(rows)
    for row, example in zip(rows, examples):
        given = inputs(model, row)
        logps = torch.log_softmax(model(**given).logits[0, :-1], -1)
        logps = logps.gather(1, given["input_ids"][0, 1:, None])[:, 0]
        mask = torch.tensor(example.completion_mask[1:])
        total, count = total - (logps * mask).sum(), count + mask.sum()
    return total / count


@vision.OF_ALL_KINDS
def test_a_step_is_transformers(directory):
    """Loss, and the gradient of every weight of the text model."""
    task, model = make(directory), vision.load(directory)
    tensors = {x.name: x for x in model_tensors(task.causal_lm)}
    before = {n: x.to_hf(lambda v: v.value) for n, x in tensors.items()}
    tower = [np.array(v.value) for v in tower_of(task.policy.backbone).weights]
    history = task.fit(ROWS, 8, shuffle=False, verbose=0)
    loss = reference_loss(model, task, ROWS)
    loss.backward()
    np.testing.assert_allclose(history.history["loss"], loss.item(), rtol=1e-5)
    theirs = dict(model.model.language_model.named_parameters())
    largest = max(p.grad.abs().max().item() for p in theirs.values())
    # Numbers that scale Gemma 4's layers are no parameters.
    buffers = {x for x in tensors if x.endswith("layer_scalar")}
    assert len(theirs) == len(tensors) - len(buffers)
    for name, tensor in tensors.items():
        update = tensor.to_hf(lambda v: v.value) - before[name]
        gradient = np.zeros(1)
        if name not in buffers:
            gradient = theirs[name.removeprefix("model.")].grad.numpy()
        np.testing.assert_allclose(
            -update / RATE,
            gradient,
            rtol=0,
            atol=2e-5 * largest,
            err_msg=name,
        )
    # The tower is frozen.
    for old, new in zip(tower, tower_of(task.policy.backbone).weights):
        np.testing.assert_array_equal(old, new.value)


WAYS = {
    "packed": {"packing": True, "batch_size": 6},
    "packed, micro-batches, remat": {
        "packing": True,
        "batch_size": 6,
        "micro_batch_size": 2,
        "remat": "full",
    },
    "micro-batches": {"micro_batch_size": 2},
}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=() if "remat" in way else pytest.mark.full)
        for way in WAYS
    ],
)
@vision.GEMMA4_IN_CI
def test_the_same_update_however_it_is_run(directory, way):
    found = step(directory, lora=kpt.LoRA(rank=4), **WAYS[way])
    same(found, plain_step(directory))


@vision.GEMMA4_IN_CI
def test_eight_devices_are_one(directory, eight_devices):
    want = plain_step(directory)
    keras.distribution.set_distribution(
        kpt.distribution.fsdp_tensor_parallel(2)
    )
    same(step(directory, lora=kpt.LoRA(rank=4), packing=True), want)


@vision.OF_ALL_KINDS
def test_the_adapter_is_pefts(directory, tmp_path):
    """PEFT loads it into the whole model, and leaves the tower alone."""
    task = make(directory, lora=kpt.LoRA(rank=4))
    task.save_adapter(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(
        vision.load(directory), tmp_path / "adapter"
    ).eval()
    names = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert names and all("language_model" in name for name in names)
    with torch.no_grad():
        loss = reference_loss(model, task, ROWS).item()
    assert task.evaluate(ROWS, verbose=0)["loss"] == pytest.approx(loss, 2e-5)
    again = make(directory)
    plain = again.evaluate(ROWS, verbose=0)["loss"]
    again = kpt.SFTTask.from_preset(directory, vision=True, dtype="float32")
    again.load_adapter(tmp_path / "adapter")
    again.compile()
    found = again.evaluate(ROWS, verbose=0)["loss"]
    assert found == pytest.approx(loss, 2e-5) and abs(plain - loss) > 1e-3
    # What is exported has the adapter and the tower.
    task.export(tmp_path / "out")
    with torch.no_grad():
        merged = reference_loss(vision.load(tmp_path / "out"), task, ROWS)
    assert merged.item() == pytest.approx(loss, 2e-5)


@pytest.mark.parametrize(
    "is_stream", [pytest.param(False, marks=pytest.mark.full), True]
)
def test_a_resumed_run_is_the_straight_one(directory, tmp_path, is_stream):
    """The position in a stream holds the images of rows left over."""
    given = vision.random_rows((1,) * 10, seed=2)
    rows = (lambda: iter(given)) if is_stream else given

    def made():
        return make(directory, lora=kpt.LoRA(rank=4, dropout=0.1))

    def run(task, folder, steps):
        callbacks = [Checkpoint(folder), Stop(steps)]
        task.fit(rows, 1, 2, packing=True, callbacks=callbacks, verbose=0)
        return weights(task)

    begins = starts_again(made)
    straight = run(begins(), tmp_path / "straight", None)
    run(begins(), tmp_path / "resumed", 2)
    resumed = run(made(), tmp_path / "resumed", None)
    for name, value in straight.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


@vision.OF_GEMMA4
def test_a_reference_that_reads_other_images(directory, tmp_path):
    path = vision.copied(directory, tmp_path / "other")
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({"max_soft_tokens": vision.MAX_TOKENS + 1}))
    task = make(directory, kpt.DPOTask, reference=str(path))
    with pytest.raises(ValueError, match="that reads the same images"):
        task.fit(pairs((1,)), 1, verbose=0)


class Stop(keras.callbacks.Callback):
    """Ends a run after some steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.steps:
            self.model.stop_training = True


def test_other_images_are_other_data(directory):
    """A run is not resumed on the same words with other images."""
    task = make(directory)
    found = []
    for change in (0, 1):
        rows = vision.random_rows((1, 1))
        rows[1]["images"][0][:] += change
        examples, _ = task.prepare(rows)
        found.append(task.make_batches(examples, 2).fingerprint["tokens"])
    assert found[0] != found[1]


def pairs(counts=(1, 2, 0, 1), seed=5):
    """Preferences with the images in the prompt."""
    others = vision.random_rows(counts, seed + 1)
    for other in others:
        # A pair of equal sides is dropped.
        other["messages"][1]["content"] += " no"
    return [
        {
            "prompt": row["messages"][:1],
            "chosen": row["messages"][1:],
            "rejected": other["messages"][1:],
            **({"images": row["images"]} if "images" in row else {}),
        }
        for row, other in zip(vision.random_rows(counts, seed), others)
    ]


def side_logps(model, row, side):
    """transformers' sum of a completion's log-probabilities."""
    whole = {**row, "messages": row["prompt"] + row[side]}
    given = inputs(model, whole)
    before = inputs(model, {**row, "messages": row["prompt"]})
    logps = torch.log_softmax(model(**given).logits[0, :-1], -1)
    ids = given["input_ids"][0]
    logps = logps.gather(1, ids[1:, None])[:, 0]
    # Behind the header of the answer; the newline after it has no loss.
    kind = model.config.model_type
    header = vision.HEADERS[kind]
    header = vision.make_processor(kind).tokenizer(
        header, add_special_tokens=False
    )
    first = before["input_ids"].shape[1] + len(header["input_ids"])
    return logps[first - 1 : -1].sum()


@vision.GEMMA4_IN_CI
def test_a_dpo_step_is_transformers(directory, tmp_path):
    """The loss, with the model without its adapter as the reference."""
    rows = pairs()
    task = make(directory, kpt.DPOTask)
    loss = task.fit(rows, 4, shuffle=False, verbose=0).history["loss"]
    assert loss[0] == pytest.approx(np.log(2), abs=1e-6)
    task.export(tmp_path / "out")
    again = make(tmp_path / "out", kpt.DPOTask, reference=str(directory))
    moved = again.fit(rows, 4, shuffle=False, verbose=0).history["loss"]
    model, base = vision.load(tmp_path / "out"), vision.load(directory)
    losses = []
    for row in rows:
        with torch.no_grad():
            margins = [
                side_logps(m, row, "chosen") - side_logps(m, row, "rejected")
                for m in (model, base)
            ]
        margin = 0.1 * (margins[0] - margins[1])
        losses.append(-torch.nn.functional.logsigmoid(margin).item())
    assert moved[0] == pytest.approx(np.mean(losses), rel=2e-5)
    assert abs(moved[0] - np.log(2)) > 1e-3


DPO_WAYS = {
    "packed, shared prompts": {"packing": True, "share_prefix": True},
    "micro-batches, cached": {"micro_batch_size": 1, "cached": True},
    "shared prompts": {"share_prefix": True},
}
ALL = "all at once"
DPO_WAYS[ALL] = {k: v for way in DPO_WAYS.values() for k, v in way.items()}


@pytest.mark.parametrize("way", in_ci(ALL, of=DPO_WAYS))
def test_the_same_preferences_however_they_are_run(
    directory, way, tmp_path, preferences
):
    settings = dict(DPO_WAYS[way])
    if settings.pop("cached", False):
        settings["reference_cache"] = tmp_path
    same(dpo_step(directory, **settings), preferences)


@pytest.fixture(scope="module")
def preferences(directory):
    return dpo_step(directory)


def dpo_step(directory, micro_batch_size=None, reference_cache=None, **fit):
    """As `step`, with another model as the reference."""
    task = kpt.DPOTask.from_preset(
        directory, vision=True, lora=kpt.LoRA(rank=4), dtype="float32",
        sequence_length=160, reference=str(directory),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for b in task.adapter.b:
        b.assign(rng.normal(0, 0.05, b.shape).astype("float32"))
    task.compile(
        optimizer=keras.optimizers.SGD(RATE),
        micro_batch_size=micro_batch_size,
        max_grad_norm=None,
        reference_cache=reference_cache,
    )
    before = weights(task)
    # The words of both halves are equal, the images are not.
    rows = pairs((1, 2)) + pairs((1, 2))
    rows[2]["images"] = [255 - x for x in rows[2]["images"]]
    history = task.fit(rows, 4, shuffle=False, verbose=0, **fit)
    after = weights(task)
    return history.history["loss"], {k: after[k] - before[k] for k in after}


def image_row(**changes):
    [row] = vision.random_rows((1,))
    return row | changes


PART = {"type": "image"}
BAD_ROWS = {
    "fewer parts": (
        lambda row: {"images": row["images"] * 2},
        "row 0 of `dataset` with 1 such parts and 2 images",
    ),
    "parts without images": (
        lambda row: {"images": []},
        "1 such parts and 0 images",
    ),
    "no list": (lambda row: {"images": 3}, "must be a list"),
    "both columns": (
        lambda row: {"image": row["images"][0]},
        "'images', a list, or 'image'",
    ),
    "floats": (
        lambda row: {"images": [row["images"][0] / 255]},
        "image 0, an array of shape .* and dtype float64",
    ),
    "no channels": (
        lambda row: {"images": [row["images"][0][..., 0]]},
        "must be a Pillow image, a uint8 array",
    ),
    "a path": (lambda row: {"images": ["cat.png"]}, "'cat.png' of type str"),
    "too long": (
        lambda row: {"images": row["images"] * 40, "messages": 40},
        "sequence_length=160",
    ),
    "misspelt": (
        lambda row: {"images": None, "imagess": row["images"]},
        "Did you mean the column 'images'",
    ),
    "text": (
        lambda row: {"messages": None, "prompt": "a", "completion": "b"},
        "Images are a part of messages",
    ),
    "sound": (
        lambda row: {
            "messages": [
                {"role": "user", "content": [PART, {"type": "audio"}]},
                row["messages"][1],
            ]
        },
        "row 0 of `dataset`: Sound and videos are not read",
    ),
    "tokens": (
        lambda row: {
            "messages": None,
            "token_ids": [2, 9, vision.TOKEN_ID, 9],
        },
        "must have 4 adjacent tokens of id 512",
    ),
}


@pytest.fixture(scope="module")
def task(directory):
    return make(directory)


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(task, name):
    change, message = BAD_ROWS[name]
    row = image_row()
    changes = change(row)
    if changes.get("messages") == 40:
        user = {"role": "user", "content": [PART] * 40}
        changes["messages"] = [user, row["messages"][1]]
    with pytest.raises(ValueError, match=message):
        task.fit([row | changes], 1, verbose=0)


@pytest.mark.parametrize("truncation", ["drop", "cut"])
def test_long_rows_are_dropped_and_counted(task, truncation):
    """No image is cut in two."""
    [long] = vision.random_rows((3,))
    rows = [image_row(), long]
    lengths = [len(x.token_ids) for x in task.prepare(rows)[0]]
    # In the last image of the longer row.
    examples, report = task.prepare(
        rows, truncation=truncation, sequence_length=lengths[0] + 2
    )
    assert len(examples) == 1 and report.dropped == {"too long": 1}
    assert report.longest == lengths[1]


def test_what_takes_no_images(directory):
    text = kpt.SFTTask.from_preset(directory, dtype="float32")
    text.compile()
    with pytest.raises(ValueError, match="vision=True"):
        text.fit([image_row()], 1, verbose=0)
    [row] = vision.random_rows((1,))
    messages = {"messages": row["messages"]}
    with pytest.raises(ValueError, match="1 such parts and 0 images"):
        text.fit([messages], 1, verbose=0)
    with pytest.raises(ValueError, match="parts of type 'image'"):
        text.generate(row["messages"][:1])
    # A column of names is one that nothing reads.
    named = {"prompt": "a", "completion": "b", "image": "cat.png"}
    assert text.prepare([named])[1].unused == {"image": 1}
    with pytest.raises(ValueError, match="RewardTask takes no model with"):
        kpt.RewardTask.from_preset(directory, vision=True)
    rollout = kpt.GRPOTask.from_preset(
        directory, vision=True, sequence_length=160
    )
    distill = kpt.DistillTask.from_preset(
        directory, vision=True, sequence_length=160, teacher=str(directory)
    )
    with pytest.raises(ValueError, match="read by SFTTask, DPOTask, GRPOTas"):
        distill.prepare([row])
    engine = kpt.rollout.VLLMRollout()
    engine.set_model(rollout)
    with pytest.raises(ValueError, match="vLLM as a rollout engine takes no"):
        engine.start()
    dpo = make(directory, kpt.DPOTask, reference=text)
    with pytest.raises(ValueError, match="must have a tower that reads"):
        dpo.fit(pairs(), 1, verbose=0)
    late = pairs((1,))
    late[0]["prompt"], parts = (
        [{"role": "user", "content": "a"}],
        [{"role": "assistant", "content": [PART]}],
    )
    late[0] |= {"chosen": parts, "rejected": late[0]["rejected"]}
    with pytest.raises(ValueError, match="row 0 of `dataset`"):
        make(directory, kpt.DPOTask).fit(late, 1, verbose=0)
