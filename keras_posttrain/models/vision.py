"""The images of a batch: what the vision tower of Gemma 3 makes of them.

A batch with images has two more arrays. `pixels`, uint8 of shape
`(rows, images, size, size, 3)`, has the images of each row; those that are
missing are black. `image_tokens`, int32 of shape `(rows, length)`, is 0 at
text. An image token has there 1 plus its number among those of its row's
images, of which each has as many as the tower makes of an image.
"""

import dataclasses

import jax
import jax.numpy as jnp
import keras_hub

from keras_posttrain.data.rows.images import ImageReader


@dataclasses.dataclass(frozen=True)
class ImageBlocks:
    """Tokens that attend to each other in both directions.

    Args:
        ids: int array of shape `(rows, length)`, the image of its row that a
            token is part of, counted from 1; 0 is text.
        size: int, the most tokens of an image.
    """

    ids: jax.Array
    size: int


def tower_of(backbone):
    """Returns the vision tower of a Gemma 3 with its projector, or `None`."""
    if type(backbone) is not keras_hub.models.Gemma3Backbone:
        return None
    return backbone.vision_encoder


def freeze_tower(causal_lm):
    """Freezes the vision tower and its projector, which are not trained.

    Keras thaws them whenever it thaws the model.
    """
    tower = tower_of(causal_lm.backbone)
    for variable in tower.variables if tower is not None else ():
        variable.trainable = False


def image_reader(causal_lm, tokenizer):
    """Makes the `ImageReader` of a model, `None` without a vision tower.

    `tokenizer` is a `Tokenizer` or `None`.
    """
    tower = tower_of(causal_lm.backbone)
    if tower is None:
        return None
    config = getattr(causal_lm, "kpt_outer_config", None) or {}
    return ImageReader.of_model(
        tokenizer,
        tower.image_size,
        tower.num_vision_tokens_per_image,
        config.get("image_token_index"),
    )


def image_blocks(backbone, batch):
    """Returns the `ImageBlocks` of a batch, or `None` without images."""
    if "pixels" not in batch:
        return None
    size = tower_of(backbone).num_vision_tokens_per_image
    return ImageBlocks(-(-batch["image_tokens"] // size), size)


def put_images(backbone, x, batch):
    """Puts the embeddings of images in place of those of image tokens.

    Args:
        x: float array of shape `(rows, length, hidden_dim)`, the embeddings
            of all tokens, scaled. Those of images are not scaled.
        batch: dict with `pixels` and `image_tokens`.
    """
    rows, _, hidden_dim = x.shape
    # Gemma 3's processor: to [0, 1], then with a mean and deviation of 0.5.
    pixels = batch["pixels"].astype("float32") * (1 / 255)
    found = tower_of(backbone)((pixels - 0.5) / 0.5)
    found = found.reshape(rows, -1, hidden_dim).astype(x.dtype)
    at = batch["image_tokens"]
    of_tokens = jnp.take_along_axis(
        found, jnp.maximum(at - 1, 0)[..., None], axis=1
    )
    return jnp.where((at > 0)[..., None], of_tokens, x)
