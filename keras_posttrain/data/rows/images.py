"""The images of a row: their pixels, and the tokens that stand for them."""

import dataclasses
import functools
import hashlib
import io

import numpy as np

COLUMNS = ("images", "image")
# The tokens around an image and the one of an image, under the names of
# Hugging Face's and of KerasHub's tokenizers of Gemma 3.
BEGIN, END = "<start_of_image>", "<end_of_image>"
INSIDE = ("<image_soft_token>", "<img>")
ACCEPTED = (
    "a Pillow image, a uint8 array of shape (height, width, 3), or a dict "
    "with the 'bytes' of a file"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """The images of a sequence.

    Args:
        pixels: uint8 array of shape `(images, size, size, 3)`.
        places: int64 array of shape `(images, tokens)`, the positions of the
            tokens of each image in the sequence.
    """

    pixels: np.ndarray
    places: np.ndarray

    @functools.cached_property
    def digest(self):
        """Bytes that differ between different images."""
        found = hashlib.blake2b(self.pixels.tobytes(), digest_size=16)
        return found.digest()

    @functools.cached_property
    def token_keys(self):
        """Int32 array like `places`, numbers of each image's content.

        They are less than -1, and stand for the ids of the tokens, which are
        equal in all images, where prompts are compared.
        """
        count = self.places.shape[1]
        found = [
            hashlib.shake_128(pixels.tobytes()).digest(4 * count)
            for pixels in self.pixels
        ]
        found = np.frombuffer(b"".join(found), "<i4")
        return np.minimum(found | -(2**31), -2).reshape(-1, count)

    def before(self, stop):
        """Returns the images before a position, or `None` without any."""
        count = int(np.sum(self.places[:, -1] < stop))
        if not count:
            return None
        return Images(self.pixels[:count], self.places[:count])


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows as the processor of Gemma 3 does.

    Each is resized bilinearly to a square, whatever its shape.

    Args:
        size: int, pixels of a side.
        num_tokens: int, the tokens of an image.
        token_id: int, the id of these tokens.
        token: string, their text, or `None` where the tokenizer lacks it.
    """

    size: int
    num_tokens: int
    token_id: int
    token: str | None

    @classmethod
    def of_model(cls, tokenizer, size, num_tokens, token_id=None):
        """Makes one with the image token of a `Tokenizer`.

        Args:
            tokenizer: `Tokenizer` or `None`.
            size, num_tokens: as in the class.
            token_id: int, that of the model's config, or `None`.
        """
        known = tokenizer.control_tokens if tokenizer is not None else {}
        inside = [token for token in INSIDE if token in known]
        if not inside or BEGIN not in known or END not in known:
            return cls(size, num_tokens, token_id, None)
        found = known[inside[0]]
        return cls(
            size,
            num_tokens,
            found if token_id is None else token_id,
            inside[0],
        )

    def text(self, tokenizer):
        """Returns what stands in a text for an image.

        Raises:
            ValueError: the tokenizer does not have the tokens.
        """
        if self.token is None:
            known = list(tokenizer.control_tokens)
            raise ValueError(
                "Images need a tokenizer with the control tokens "
                f"{BEGIN!r}, {END!r} and one of {INSIDE}. Received: one with "
                f"{known[:12]}. Pass that of a multimodal Gemma 3."
            )
        if tokenizer.control_tokens[self.token] != self.token_id:
            raise ValueError(
                "The tokenizer must have the image token of the model's "
                f"config (`image_token_index`), {self.token_id}. Received: "
                f"{self.token!r} of id {tokenizer.control_tokens[self.token]}."
            )
        return f"\n\n{BEGIN}{self.token * self.num_tokens}{END}\n\n"

    def read(self, row, where):
        """Reads the images of a row.

        Returns:
            A uint8 array of shape `(images, size, size, 3)`, or `None`
            without images.
        """
        given = images_of(row, where)
        if not given:
            return None
        return np.stack(
            [self._read(x, f"{where}, image {i}") for i, x in enumerate(given)]
        )

    def _read(self, value, where):
        pil = _pillow()
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            value = pil.open(io.BytesIO(value["bytes"]))
        if isinstance(value, np.ndarray):
            is_image = value.ndim == 3 and value.shape[2] == 3 and value.size
            if not is_image or value.dtype != np.uint8:
                raise ValueError(
                    f"An image must be {ACCEPTED}. Received: {where}, an "
                    f"array of shape {value.shape} and dtype {value.dtype}."
                )
            value = pil.fromarray(value)
        if not isinstance(value, pil.Image):
            raise ValueError(
                f"An image must be {ACCEPTED}. Received: {where}, "
                f"{value!r:.100} of type {type(value).__name__}."
            )
        # As the processor does: transparent pixels keep their own colour.
        square = value.convert("RGB").resize(
            (self.size, self.size), pil.Resampling.BILINEAR
        )
        return np.asarray(square, np.uint8)

    def count(self, token_ids):
        """Counts the images that a sequence has tokens for.

        Fewer adjacent tokens than those of an image do not count: a model
        may sample them.
        """
        found = np.flatnonzero(np.asarray(token_ids) == self.token_id)
        runs = np.split(found, np.flatnonzero(np.diff(found) != 1) + 1)
        return sum(len(run) // self.num_tokens for run in runs)

    def place(self, pixels, token_ids, where):
        """Finds the tokens of images in a sequence.

        A model may sample the image token too: the first ones are those of
        the images.

        Args:
            pixels: as `read` returns it.
            token_ids: int array of shape `(tokens,)`.
            where: string, the row in errors.

        Returns:
            `Images`, or `None` without images.
        """
        if pixels is None:
            return None
        found = np.flatnonzero(token_ids == self.token_id)
        needed = len(pixels) * self.num_tokens
        places = np.resize(found[:needed], (len(pixels), self.num_tokens))
        if len(found) < needed or np.any(np.diff(places, axis=1) != 1):
            raise ValueError(
                f"Each image must have {self.num_tokens} adjacent tokens of "
                f"id {self.token_id}. Received: {where} with {len(pixels)} "
                f"images and {len(found)} such tokens."
            )
        return Images(pixels, places)

    def check(self, token_ids, images, where):
        """Checks the images of a prompt.

        Args:
            token_ids: ints, those of the prompt.
            images: `Images` or `None`.
            where: string, the prompt in errors.

        Raises:
            ValueError: they are no images of this model, or not those that
                the prompt has tokens for.
        """
        ids = np.asarray(token_ids)
        given, places = 0, np.zeros(0, np.int64)
        if images is not None:
            if not isinstance(images, Images):
                raise ValueError(
                    "The images of a prompt must be those of a prepared row, "
                    "`task.prepare(rows)[0][0].images`. Received: "
                    f"{where} with {images!r:.100} of type "
                    f"{type(images).__name__}."
                )
            given, places = len(images.pixels), images.places.reshape(-1)
            shape = (self.size, self.size, 3)
            if images.pixels.shape[1:] != shape:
                raise ValueError(
                    "Images must have the size that the model was made for, "
                    f"{shape}. Received: {where} with images of shape "
                    f"{images.pixels.shape[1:]}. Prepare the rows with this "
                    "model's task."
                )
        known = places[(places >= 0) & (places < len(ids))]
        count = self.count(ids)
        if count != given or np.sum(ids[known] == self.token_id) < (
            given * self.num_tokens
        ):
            raise ValueError(
                f"A prompt must have {self.num_tokens} adjacent tokens of id "
                f"{self.token_id} for each of its images, at their `places`. "
                f"Received: {where} with tokens of {count} images, and "
                f"{given} images. Take both from one prepared row."
            )
        if given and places.max() == len(ids) - 1:
            raise ValueError(
                "A prompt must have a token after its images, from which the "
                f"first new token is predicted. Received: {where}, which ends "
                "with an image."
            )


def _pillow():
    # Only rows with images need it.
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "Rows with images need Pillow: "
            "`pip install 'keras_posttrain[vision]'`."
        ) from error
    return Image


def images_of(row, where):
    """Returns the images of a row as they were given, a list."""
    given = {c: row[c] for c in COLUMNS if row.get(c) is not None}
    if len(given) > 1:
        raise ValueError(
            "A row must have the column 'images', a list, or 'image', a "
            f"single one. Received: {where} with both."
        )
    if "image" in given:
        return [given["image"]]
    found = given.get("images", [])
    if isinstance(found, np.ndarray) and found.ndim == 4:
        return list(found)
    if not isinstance(found, (list, tuple)):
        raise ValueError(
            f"The column 'images' must be a list, each item {ACCEPTED}. "
            f"Received: {where}, images={found!r:.100} of type "
            f"{type(found).__name__}."
        )
    return list(found)


def refuse_images(row, where):
    """Raises where a row has images and nothing reads them.

    A column `image` of anything else, such as a name, is a column that
    nothing reads.
    """
    if not isinstance(row, dict):
        return
    if row.get("images") is None and not _is_picture(row.get("image")):
        return
    if images_of(row, where):
        raise ValueError(
            "Images are read by SFTTask, DPOTask, GRPOTask, and PPOTask "
            "without a separate `value_model`, of a model with a vision "
            "tower: a multimodal Gemma 3 (`from_preset(..., vision=True)`). "
            "Received: "
            f"{where} with the columns {list(map(str, row))}. Load such a "
            "model, or remove the images to train on the text alone."
        )


def _is_picture(value):
    return (isinstance(value, np.ndarray) and value.ndim == 3) or hasattr(
        value, "convert"
    )


def with_parts(messages, count, where):
    """Returns messages whose image parts are those of a row's images.

    Where all contents are strings, the images come before the text of the
    first message of the user, as in TRL.

    Args:
        messages: list of dicts.
        count: int, the images of the row.
        where: string, the row in errors.

    Raises:
        ValueError: there are not as many image parts as images.
    """
    if not isinstance(messages, (list, tuple)) or not all(
        isinstance(message, dict) for message in messages
    ):
        # What reads messages says so.
        return messages
    parts = count_parts(messages)
    if parts == count:
        return messages
    contents = [m.get("content") for m in messages]
    users = [i for i, m in enumerate(messages) if m.get("role") == "user"]
    strings = all(isinstance(x, (str, type(None))) for x in contents)
    if not parts and strings and users:
        messages, first = list(messages), users[0]
        text = messages[first]["content"]
        messages[first] = {
            **messages[first],
            "content": [{"type": "image"}] * count
            + [{"type": "text", "text": text}],
        }
        return messages
    raise ValueError(
        "A row must have a part {'type': 'image'} in the content of its "
        f"messages for each of its images. Received: {where} with "
        f"{parts} such parts and {count} images."
    )


def count_parts(messages):
    """Counts the image parts in the contents of messages."""
    found = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else ()
        for part in content if isinstance(content, (list, tuple)) else ():
            found += isinstance(part, dict) and part.get("type") == "image"
    return found
