"""The images of a batch: what the vision towers of Gemma 3 and 4 make of them.

A batch with images has two more arrays. `pixels`, uint8 of shape
`(rows, images, size, size, 3)` for Gemma 3, has the images of each row; those
that are missing are black. `image_tokens`, int32 of shape `(rows, length)`, is
0 at text. An image token has there 1 plus its number among those of its row's
images, of which each has room for as many as the tower makes of an image at
most.

Gemma 4 reads images of any shape: `pixels` has their patches, of shape
`(rows, images, patches, 3 * patch_size**2)`, and a third array `image_grids`,
int32 of shape `(rows, images, 2)`, the patches of a column and of a row of
each image, 0 of one that is missing.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import keras_hub

from keras_posttrain.data.rows.images import (
    GEMMA3,
    GEMMA4,
    ImageReader,
    Marks,
    Patches,
    Squares,
)
from keras_posttrain.models import gemma4_tower


@dataclasses.dataclass(frozen=True)
class ImageBlocks:
    """Tokens that attend to each other in both directions.

    Args:
        ids: int array of shape `(rows, length)`, the image of its row that a
            token is part of, counted from 1; 0 is text.
        size: int, the most tokens of an image.
        needs_window: bool, whether they do so only in layers with a sliding
            window.
    """

    ids: jax.Array
    size: int
    needs_window: bool = False

    def seen_by(self, window):
        """Returns the blocks of a layer with a sliding window or `None`."""
        return self if window is not None or not self.needs_window else None


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the towers of a class read images.

    Args:
        marks: `Marks` of the tokens of images.
        sizes: function of a tower to `Squares` or `Patches`.
        features: function of a tower and a batch to the embeddings of images'
            tokens, a float array of shape `(rows, tokens, hidden_dim)`.
        blocks: function of the backbone to the arguments of `ImageBlocks`
            but `ids` and `size`, or `None` where all attention is causal.
        placeholders: tuple of strings, fields of the model's config: tokens
            of these ids are embedded as padding.
    """

    marks: Marks
    sizes: typing.Callable
    features: typing.Callable
    blocks: typing.Callable
    placeholders: tuple = ()


def _features_of_gemma3(tower, batch):
    pixels = batch["pixels"]
    # Gemma 3's processor: to [0, 1], then with a mean and deviation of 0.5.
    pixels = pixels.astype("float32") * (1 / 255)
    found = tower((pixels - 0.5) / 0.5)
    return found.reshape(pixels.shape[0], -1, found.shape[-1])


def _blocks_of_gemma4(backbone):
    attends = backbone.use_vision_bidirectional_attention
    return {"needs_window": True} if attends else None


_KINDS = {
    keras_hub.models.Gemma3VisionEncoder: Kind(
        marks=GEMMA3,
        sizes=lambda tower: Squares(
            tower.image_size, tower.num_vision_tokens_per_image
        ),
        features=_features_of_gemma3,
        blocks=lambda backbone: {},
    ),
    keras_hub.models.Gemma4VisionEncoder: Kind(
        marks=GEMMA4,
        sizes=lambda tower: Patches(
            tower.patch_size, tower.pool_size, gemma4_tower.max_tokens(tower)
        ),
        features=gemma4_tower.features,
        blocks=_blocks_of_gemma4,
        placeholders=("image_token_id", "audio_token_id", "video_token_id"),
    ),
}
_BACKBONES = (
    keras_hub.models.Gemma3Backbone,
    keras_hub.models.Gemma4Backbone,
)


def tower_of(backbone):
    """Returns the vision tower of a backbone with its projector, or `None`."""
    if type(backbone) not in _BACKBONES:
        return None
    return backbone.vision_encoder


def sizes_of(tower):
    """Returns the `Squares` or `Patches` of the images that a tower reads."""
    return _KINDS[type(tower)].sizes(tower)


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
    marks = _KINDS[type(tower)].marks
    return ImageReader.of_model(
        tokenizer, sizes_of(tower), marks, config.get(marks.field)
    )


def image_blocks(backbone, batch):
    """Returns the `ImageBlocks` of a batch, or `None` without images."""
    if "pixels" not in batch:
        return None
    tower = tower_of(backbone)
    settings = _KINDS[type(tower)].blocks(backbone)
    if settings is None:
        return None
    size = sizes_of(tower).max_tokens
    return ImageBlocks(-(-batch["image_tokens"] // size), size, **settings)


def embedded_ids(causal_lm, ids, batch=None):
    """Returns the ids whose embeddings tokens have.

    Those of images, where something is put in their place, and the other
    `placeholders` of a family are embedded as padding, which is not trained.

    Args:
        ids: int array of shape `(tokens,)`.
        batch: dict of a batch of these tokens, or `None`.

    Returns:
        Tuple `(ids, is_padding)`: an array like `ids`, and a bool array like
        it, or `None` where all ids are their own.
    """
    tower = tower_of(causal_lm.backbone)
    fields = _KINDS[type(tower)].placeholders if tower is not None else ()
    if not fields:
        return ids, None
    config = getattr(causal_lm, "kpt_outer_config", None) or {}
    found = [config[name] for name in fields if config.get(name) is not None]
    replaced = jnp.isin(ids, jnp.array(found, ids.dtype))
    if batch is not None and "pixels" in batch:
        replaced |= batch["image_tokens"].reshape(ids.shape) > 0
    padding = config.get("text_config", {}).get("pad_token_id") or 0
    return jnp.where(replaced, padding, ids), replaced


def put_images(backbone, x, batch):
    """Puts the embeddings of images in place of those of image tokens.

    Args:
        x: float array of shape `(rows, length, hidden_dim)`, the embeddings
            of all tokens, scaled. Those of images are not scaled.
        batch: dict with the arrays of images.
    """
    tower = tower_of(backbone)
    found = _KINDS[type(tower)].features(tower, batch).astype(x.dtype)
    at = batch["image_tokens"]
    of_tokens = jnp.take_along_axis(
        found, jnp.maximum(at - 1, 0)[..., None], axis=1
    )
    return jnp.where((at > 0)[..., None], of_tokens, x)
