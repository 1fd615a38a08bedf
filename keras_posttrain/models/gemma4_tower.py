"""Gemma 4's vision tower: patches of images to the embeddings of tokens.

The layers and weights are those of KerasHub's `Gemma4VisionEncoder`. Its
pooling is replaced: in KerasHub 0.32 all images of a batch have the width of
the widest one, so that the patches of others are added to wrong tokens.
"""

import jax
import jax.numpy as jnp

# The tokens of an image at most, as the published processors have it.
MAX_TOKENS = 280


def max_tokens(tower):
    """Returns the most tokens that a tower makes of an image."""
    return getattr(tower, "kpt_max_tokens", MAX_TOKENS)


def features(tower, batch):
    """Computes the embeddings of images' tokens.

    Args:
        tower: `Gemma4VisionEncoder`.
        batch: dict with `pixels` and `image_grids`; see `vision.py`.

    Returns:
        A float array of shape `(rows, images * max_tokens, hidden_dim)`;
        behind the tokens of an image it has arbitrary values.
    """
    pixels, grids = batch["pixels"], batch["image_grids"]
    places = patch_places(grids, pixels.shape[2])
    encoder = tower.get_layer("image_encoder")
    x = encoder(
        pixels.astype("float32") * (1 / 255), pixel_position_ids=places
    )
    x = pooled(x, places, grids, tower.pool_size)
    # One axis of images: linear layers take a second axis of one for tokens.
    x = tower.get_layer("vision_output_encoder")(x.reshape(-1, *x.shape[2:]))
    return x.reshape(pixels.shape[0], -1, x.shape[-1])


def patch_places(grids, count):
    """Returns the column and the row of each patch in its image.

    Args:
        grids: int array of shape `(..., 2)`, the patches of a column and of
            a row of an image.
        count: int, the patches that there is room for.

    Returns:
        An int32 array of shape `(..., count, 2)`, -1 behind the last patch.
    """
    height, width = grids[..., :1], grids[..., 1:]
    index = jnp.arange(count, dtype="int32")
    columns = jnp.maximum(width, 1)
    places = jnp.stack([index % columns, index // columns], axis=-1)
    used = index < height * width
    return jnp.where(used[..., None], places, -1).astype("int32")


def pooled(x, places, grids, size):
    """Averages squares of patches, and scales the results.

    Args:
        x: float array of shape `(..., patches, features)`.
        places: result of `patch_places`.
        grids: its argument.
        size: int, patches of a square's side.

    Returns:
        A float32 array of shape `(..., patches // size**2, features)`, the
        squares of each image row by row.
    """
    squares = places // size
    index = squares[..., 0] + squares[..., 1] * (grids[..., 1:] // size)
    used = places[..., 0] >= 0
    weights = jax.nn.one_hot(
        jnp.where(used, index, -1), x.shape[-2] // size**2
    )
    scale = x.shape[-1] ** 0.5 / size**2
    x = jnp.where(used[..., None], x.astype("float32"), 0.0)
    return jnp.einsum("...pt,...pf->...tf", weights, x) * scale
