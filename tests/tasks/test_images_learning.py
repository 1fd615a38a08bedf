"""Reinforcement learning with a reward that depends on the images alone."""

import keras
import numpy as np

import keras_posttrain as kpt
from tests import vision

COLOURS = {"red": (220, 40, 40), "blue": (50, 70, 220)}


def picture(rng, colour):
    noise = rng.normal(0, 20, (vision.SIZE, vision.SIZE, 3))
    return np.clip(COLOURS[colour] + noise, 0, 255).astype("uint8")


def rows_of(rng, count):
    prompt = [{"role": "user", "content": "What colour?"}]
    return [
        {"prompt": prompt, "images": [picture(rng, colour)], "colour": colour}
        for colour in rng.choice(list(COLOURS), count)
    ]


def answers_the_colour(completion_ids, colour, **columns):
    """Even tokens are the answer to red, odd ones to blue: chance is 1/2."""
    return [
        float(ids[0] % 2 == (c == "blue"))
        for ids, c in zip(completion_ids, colour)
    ]


def test_the_colour_of_an_image_is_learnt(tmp_path):
    """The words of all prompts are equal; the held-out pictures are new."""
    keras.utils.set_random_seed(0)
    directory = vision.make_directory(tmp_path / "model")
    task = kpt.GRPOTask.from_preset(
        directory, vision=True, sequence_length=64, dtype="float32"
    )
    task.compile(
        keras.optimizers.Adam(1e-2),
        rewards=[answers_the_colour],
        num_generations=8,
        max_completion_length=1,
        stop_token_ids=None,
    )
    rng = np.random.default_rng(0)
    held_out = rows_of(rng, 32)
    settings = {"num_generations": 4, "verbose": 0}
    before = task.evaluate(held_out, 32, **settings)["reward"]
    task.fit(rows_of(rng, 480), 16, share_prefix=True, verbose=0)
    after = task.evaluate(held_out, 32, **settings)["reward"]
    assert before < 0.7 and after > 0.9
