"""KerasHub pools images of Gemma 4 with the width of a batch's widest one."""

import keras_hub
import numpy as np

tower = keras_hub.models.Gemma4VisionEncoder(
    image_size=24,
    patch_size=2,
    num_heads=2,
    hidden_dim=8,
    num_layers=1,
    intermediate_dim=8,
    head_dim=4,
    output_dim=8,
    pool_size=2,
)
rng = np.random.default_rng(0)
pixels = rng.uniform(size=(1, 2, 24, 12)).astype("float32")


def places(height, width):
    found = np.full((24, 2), -1, "int32")
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    found[: height * width] = np.stack([x, y], -1).reshape(-1, 2)
    return found


def run(images):
    return tower(
        {
            "pixel_values": pixels[:, : len(images)],
            "pixel_position_ids": np.stack(images)[None],
        }
    )


# 4 x 4 patches are 4 tokens, whatever other images there are.
alone = run([places(4, 4)])[0, 0, :4]
other = run([places(4, 4), places(2, 12)])[0, 0, :4]
difference = abs(np.asarray(alone) - np.asarray(other)).max()
print(f"expected a difference of 0.0, found {difference:.2f}")
