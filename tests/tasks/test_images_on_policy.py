"""Reinforcement learning and `generate` on prompts with images."""

import functools

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.rows.prompt_encoder import PromptEncoder
from keras_posttrain.data.rows.records import Part
from keras_posttrain.models.vision import tower_of
from tests import vision
from tests.support import weights

MANY, NEW = 4, 5


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    return vision.directory_of(request, tmp_path_factory)


def prompts(counts=(1, 2, 0, 1), seed=5):
    return [
        {"prompt": row["messages"][:1], "images": row.get("images")}
        for row in vision.random_rows(counts, seed)
    ]


def sums_of_ids(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def make(directory, kind=kpt.GRPOTask, *, compiled=None, **settings):
    """A task with SGD whose adapter is not zero."""
    settings = {"sequence_length": 160, "dtype": "float32"} | settings
    task = kind.from_preset(
        directory, vision=True, lora=kpt.LoRA(rank=4), **settings
    )
    rng = np.random.default_rng(0)
    for b in task.adapter.b:
        b.assign(rng.normal(0, 0.05, b.shape).astype("float32"))
    task.compile(
        optimizer=keras.optimizers.SGD(0.1),
        rewards=[sums_of_ids],
        num_generations=MANY,
        max_completion_length=NEW,
        stop_token_ids=None,
        max_grad_norm=None,
        **compiled or {},
    )
    return task


class Batches(keras.callbacks.Callback):
    """Keeps the batches of the last rollout."""

    def on_train_batch_end(self, batch, logs=None):
        self.batches = self.model.run.collection.batches


def step(directory, compiled=None, kind=kpt.GRPOTask, **fit):
    """Returns the batches of one rollout, and the update of its steps.

    It is cut into two steps, so that the trainer's log-probabilities are
    computed before the first one.
    """
    compiled = {"num_minibatches": 2, "num_iterations": 1} | (compiled or {})
    task, seen = make(directory, kind, compiled=compiled), Batches()
    tower = [np.array(v.value) for v in tower_of(task.policy.backbone).weights]
    before = weights(task)
    task.fit(
        prompts(), 4, shuffle=False, verbose=0, callbacks=[seen], seed=1, **fit
    )
    after = weights(task)
    for old, new in zip(tower, tower_of(task.policy.backbone).weights):
        np.testing.assert_array_equal(old, new.value)
    return seen.batches, {k: after[k] - before[k] for k in after}


def gaps(batches):
    """Differences of the engine's log-probabilities and the trainer's."""
    found = []
    for batch in batches:
        used = batch["completion_mask"] != 0
        ours, theirs = (
            np.asarray(batch[f"{name}_per_token_logps"])[used]
            for name in ("old", "rollout")
        )
        found.append(np.abs(ours - theirs))
    return np.concatenate(found)


@functools.cache
def expected(directory):
    return step(directory, {"loss": kpt.losses.GRPOLoss(beta=0.1)})


WAYS = {
    "packed": {"packing": True},
    "shared prompts": {"share_prefix": True},
    "micro-batches": {"compiled": {"micro_batch_size": 2}},
}


@vision.GEMMA4_IN_CI
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(w, marks=() if "shared" in w else pytest.mark.full)
        for w in WAYS
    ],
)
def test_the_same_update_however_it_is_run(directory, way):
    """Packed or not, the trainer computes what the engine sampled from."""
    given = dict(WAYS[way])
    loss = {"loss": kpt.losses.GRPOLoss(beta=0.1)}
    given["compiled"] = loss | given.pop("compiled", {})
    batches, update = step(directory, **given)
    plain, wanted = expected(directory)
    for found in (batches, plain):
        assert any("pixels" in batch for batch in found)
        differences = gaps(found)
        assert len(differences) == 4 * MANY * NEW
        assert np.median(differences) < 1e-5 and differences.max() < 1e-4
    largest = max(np.abs(x).max() for x in wanted.values())
    assert update.keys() == wanted.keys() and largest > 1e-4
    for name, value in wanted.items():
        np.testing.assert_allclose(
            update[name], value, rtol=0, atol=5e-5 * largest, err_msg=name
        )


def test_eight_devices_are_one(directory, eight_devices):
    loss = {"loss": kpt.losses.GRPOLoss(beta=0.1)}
    _, wanted = expected(directory)
    keras.distribution.set_distribution(
        kpt.distribution.fsdp_tensor_parallel(2)
    )
    batches, update = step(directory, loss, packing=True)
    assert np.median(gaps(batches)) < 1e-5
    largest = max(np.abs(x).max() for x in wanted.values())
    for name, value in wanted.items():
        np.testing.assert_allclose(
            update[name], value, rtol=0, atol=5e-5 * largest, err_msg=name
        )


def test_a_ppo_step(directory):
    """With a value head on the policy's backbone."""
    batches, update = step(directory, kind=kpt.PPOTask)
    assert np.median(gaps(batches)) < 1e-5
    assert all(np.abs(x).max() > 0 for x in update.values())
    value_model = kpt.GRPOTask.from_preset(directory, dtype="float32")
    task = make(
        directory,
        kpt.PPOTask,
        compiled={"value_model": value_model.causal_lm},
    )
    with pytest.raises(ValueError, match="without a separate `value_model`"):
        task.fit(prompts(), 4, verbose=0)


@pytest.mark.full
def test_rollouts_that_overlap_with_training(directory):
    """An interrupted sample continues with its prompt's images."""
    task = make(directory)
    seen = Batches()
    task.fit(
        prompts() * 3, 4, epochs=2, verbose=0, callbacks=[seen],
        max_staleness=1,
    )  # fmt: skip
    assert any("pixels" in batch for batch in seen.batches)


def test_rewards_get_the_images(directory):
    """And so does `evaluate`; the prompts of a row without are `None`."""
    task = make(directory)
    seen = []

    def reward(completions, images, **columns):
        seen.extend(images)
        return [0.0] * len(completions)

    task.compile(rewards=[reward], max_completion_length=2)
    rows = prompts()
    found = task.evaluate(rows, num_generations=2, verbose=0)
    assert found["reward"] == 0.0 and len(seen) == 8
    for i, row in enumerate(rows):
        assert seen[2 * i] is row["images"]


def test_other_images_are_other_prompts(directory):
    task = make(directory)
    found, _ = task.prepare_prompts(prompts())
    rows = prompts()
    rows[0]["images"] = [255 - rows[0]["images"][0]]
    others, _ = task.prepare_prompts(rows)
    assert found[0].token_ids == others[0].token_ids
    assert found[0].hashed != others[0].hashed
    assert found[1].hashed == others[1].hashed
    # As they are kept on the disk.
    encoder = PromptEncoder(task.row_settings("dataset"))
    stored = Part.of(others).examples()
    for example, row, prompt in zip(stored, rows, others):
        restored = encoder.restore(example, row)
        assert restored.token_ids == prompt.token_ids
        assert restored.hashed == prompt.hashed


def test_generate(directory):
    """All forms of a prompt with images are the engine's samples of it."""
    task = kpt.SFTTask.from_preset(
        directory, vision=True, sequence_length=160, dtype="float32"
    )
    settings = {
        "max_tokens": 4, "temperature": 0, "return_token_ids": True,
        "stop_token_ids": None,
    }  # fmt: skip
    rows = prompts((1, 0, 2))
    chats = [
        {"messages": row["prompt"], "images": row["images"]} for row in rows
    ]
    found = task.generate(chats, **settings)
    assert found == task.generate(rows, **settings)
    [single] = rows[0]["images"]
    one = {"messages": rows[0]["prompt"], "image": single}
    assert task.generate(one, **settings) == found[0]
    ids = task.prepare(vision.random_rows((1, 0, 2), 5))[0][0].token_ids
    end = ids.tolist().index(vision.TOKEN_ID) + vision.NUM_TOKENS + 2
    tokens = {"prompt_ids": ids[:end], "images": [single]}
    mirrored = {**tokens, "images": [255 - single]}
    assert task.generate(tokens, **settings) != task.generate(
        mirrored, **settings
    )
    # The completions of rows are those of their prompts.
    task.compile()
    whole = vision.random_rows((1, 0, 2), 5)
    logs = task.evaluate(whole, num_samples=3, max_tokens=4, verbose=0)
    texts = task.generate(chats, max_tokens=4, temperature=0)
    assert [sample["completion"] for sample in logs["samples"]] == texts


BAD_PROMPTS = {
    "fewer parts": (
        lambda row: {"images": row["images"] * 2},
        "prompt 0 with 1 such parts and 2 images",
    ),
    "no list": (lambda row: {"images": 3}, "must be a list"),
    "text": (lambda row: {"messages": "a"}, "Images are a part of messages"),
    "other columns": (
        lambda row: {"answer": 1},
        r"'images': \[...\]}. Received: prompt 0, a dict with the keys",
    ),
    "no prompt": (lambda row: {"messages": None}, "either the column"),
    "tokens": (
        lambda row: {"prompt_ids": [2, *[vision.TOKEN_ID] * 4]},
        "must have a token after its images",
    ),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(directory, name):
    change, message = BAD_PROMPTS[name]
    task = kpt.SFTTask.from_preset(directory, vision=True, dtype="float32")
    [row] = prompts((1,))
    row = {"messages": row["prompt"], "images": row["images"]}
    changes = change(row)
    if "prompt_ids" in changes:
        del row["messages"]
    with pytest.raises(ValueError, match=message):
        task.generate(row | changes)


def test_bad_rows(directory):
    task, [row] = make(directory), prompts((1,))
    bad = [
        ({"images": row["images"] * 2}, "row 0 of `dataset` with 1 such part"),
        ({"prompt": "a"}, "Images are a part of messages"),
        (
            {"prompt": None, "prompt_ids": [2, *[vision.TOKEN_ID] * 4]},
            "must have a token after its images",
        ),
        (
            {"prompt": None, "prompt_ids": [2, *[vision.TOKEN_ID] * 4, 2],
             "images": None},
            "row 0 of `dataset` with tokens of 1 images, and 0 images",
        ),
    ]  # fmt: skip
    for changes, message in bad:
        with pytest.raises(ValueError, match=message):
            task.fit([row | changes], 1, verbose=0)
    text = kpt.GRPOTask.from_preset(directory, dtype="float32")
    text.compile(rewards=[sums_of_ids], max_completion_length=2)
    with pytest.raises(ValueError, match="GRPOTask, and PPOTask without a"):
        text.fit([row], 1, verbose=0)
    with pytest.raises(ValueError, match="GRPOTask, and PPOTask without a"):
        text.generate({"messages": row["prompt"], "images": row["images"]})
    with pytest.raises(ValueError, match="a dict with the keys"):
        text.generate({"prompt_ids": [2], "image": "cat.png"})


def test_long_prompts_keep_their_images(directory):
    """A prompt that is cut keeps its end, and no image is cut in two."""
    task = make(directory, sequence_length=60, truncation="cut")
    [row] = prompts((1,))
    before = "what is left of the red house? " * 8
    first = {"role": "user", "content": [{"type": "text", "text": before}]}
    first["content"] += row["prompt"][0]["content"]
    kept, report = task.prepare_prompts(
        [row | {"prompt": [first]}, *prompts((1,))]
    )
    assert report.cut == 1 and len(kept[0].token_ids) == 60 - NEW
    ids = np.array(kept[0].token_ids)
    assert (ids[kept[0].images.places] == vision.TOKEN_ID).all()
