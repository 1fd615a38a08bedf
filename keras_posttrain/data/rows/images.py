"""The images of a row: their pixels, and the tokens that stand for them."""

import dataclasses
import functools
import hashlib
import io
import math

import numpy as np

from keras_posttrain.data.chat.image_marks import ImageTexts

COLUMNS = ("images", "image")
ACCEPTED = (
    "a Pillow image, a uint8 array of shape (height, width, 3), or a dict "
    "with the 'bytes' of a file"
)


@dataclasses.dataclass(frozen=True)
class Marks:
    """The control tokens of a family's images.

    Args:
        model: string, the family in errors.
        begin, end: strings, the tokens around an image.
        inside: tuple of strings, the names that tokenizers have for the
            token of an image.
        around: string, the text before and after these.
        mark: string, the token that a chat template writes for an image.
        field: string, the field of the model's config with the id of the
            token of an image.
    """

    model: str
    begin: str
    end: str
    inside: tuple
    around: str
    mark: str
    field: str


# Those of `inside` are the names of Hugging Face's and KerasHub's tokenizers.
GEMMA3 = Marks(
    model="Gemma 3",
    begin="<start_of_image>",
    end="<end_of_image>",
    inside=("<image_soft_token>", "<img>"),
    around="\n\n",
    mark="<start_of_image>",
    field="image_token_index",
)
GEMMA4 = Marks(
    model="Gemma 4",
    begin="<|image>",
    end="<image|>",
    inside=("<|image|>",),
    around="",
    mark="<|image|>",
    field="image_token_id",
)


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The images of a row, before their places in a sequence are known.

    Args:
        pixels, grids: as in `Images`.
        counts: list of ints, the tokens of each image.
    """

    pixels: np.ndarray
    grids: np.ndarray | None
    counts: list

    def __len__(self):
        return len(self.counts)


@dataclasses.dataclass(frozen=True)
class Squares:
    """Images of one size, whatever their shape.

    Args:
        size: int, pixels of a side.
        max_tokens: int, the tokens of an image.
    """

    size: int
    max_tokens: int

    @property
    def shape(self):
        """Tuple of ints, the shape of an image's pixels."""
        return self.size, self.size, 3

    def read(self, image):
        """Returns the pixels of an RGB image, and `None` for its grid."""
        square = image.resize(
            (self.size, self.size), _pillow().Resampling.BILINEAR
        )
        return np.asarray(square, np.uint8), None

    def count(self, grid):
        """Returns the number of tokens of an image."""
        return self.max_tokens

    def count_images(self, runs, token_ids, marks):
        """Counts the images in runs of adjacent tokens of images.

        Fewer adjacent tokens than those of an image do not count: a model
        may sample them.
        """
        return sum(len(run) // self.max_tokens for run in runs)


@dataclasses.dataclass(frozen=True)
class Patches:
    """Images of any shape, which keep it, as patches.

    An image has the largest size of its shape that makes at most
    `max_tokens` tokens, each of `pool_size` by `pool_size` patches.

    Args:
        patch_size: int, pixels of a patch's side.
        pool_size: int, patches of a token's side.
        max_tokens: int, the most tokens of an image.
    """

    patch_size: int
    pool_size: int
    max_tokens: int

    @property
    def shape(self):
        """Tuple of ints, the shape of an image's patches: missing ones are 0.

        A patch has its pixels from left to right and from above, and the
        colours of each.
        """
        return self.max_tokens * self.pool_size**2, 3 * self.patch_size**2

    def read(self, image):
        """Returns the patches of an RGB image, and its grid of patches."""
        grid = self._grid(image.height, image.width)
        height, width = (self.patch_size * n for n in grid)
        if image.size != (width, height):
            bicubic = _pillow().Resampling.BICUBIC
            image = image.resize((width, height), bicubic)
        size = self.patch_size
        found = np.asarray(image, np.uint8)
        found = found.reshape(grid[0], size, grid[1], size, 3)
        found = found.transpose(0, 2, 1, 3, 4).reshape(-1, self.shape[1])
        patches = np.zeros(self.shape, np.uint8)
        patches[: len(found)] = found
        return patches, np.array(grid, np.int32)

    def _grid(self, height, width):
        """Returns the patches of a column and of a row of an image."""
        side = self.patch_size * self.pool_size
        scale = math.sqrt(self.max_tokens * side**2 / (height * width))
        rows, columns = (math.floor(scale * n / side) for n in (height, width))
        # One of them at most is zero, of an image that is a strip.
        if not rows:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif not columns:
            rows, columns = min(height // width, self.max_tokens), 1
        return rows * self.pool_size, columns * self.pool_size

    def count(self, grid):
        """Returns the number of tokens of an image of a grid."""
        return int(np.prod(grid)) // self.pool_size**2

    def count_images(self, runs, token_ids, marks):
        """Counts the images in runs of adjacent tokens of images.

        Those that are not between a begin and an end do not count: a model
        may sample them.

        Args:
            runs: list of int arrays, the positions of each run.
            token_ids: int array of shape `(tokens,)`.
            marks: tuple of ints, the ids of a begin and of an end.
        """
        begin, end = marks
        before = np.concatenate([[-1], token_ids])
        after = np.concatenate([token_ids, [-1]])
        return sum(
            before[run[0]] == begin and after[run[-1] + 1] == end
            for run in runs
            if len(run)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """The images of a sequence.

    Args:
        pixels: uint8 array of shape `(images, *shape)`, with the `shape` of
            `Squares` or `Patches`.
        places: int64 array of shape `(images, max_tokens)`, the positions of
            the tokens of each image in the sequence; -1 behind the last one
            of an image that has fewer.
        grids: int32 array of shape `(images, 2)`, the patches of a column
            and of a row of each image; `None` where all have one size.
    """

    pixels: np.ndarray
    places: np.ndarray
    grids: np.ndarray | None = None

    @functools.cached_property
    def digest(self):
        """Bytes that differ between different images."""
        found = hashlib.blake2b(self.pixels.tobytes(), digest_size=16)
        if self.grids is not None:
            found.update(self.grids.tobytes())
        return found.digest()

    @functools.cached_property
    def tokens(self):
        """Int64 array, the positions of the tokens of all images in order."""
        return self.places[self.places >= 0]

    @functools.cached_property
    def token_keys(self):
        """Int32 array like `tokens`, numbers of each image's content.

        They are less than -1, and stand for the ids of the tokens, which are
        equal in all images, where prompts are compared.
        """
        counts = np.sum(self.places >= 0, axis=1)
        found = []
        for i, (pixels, count) in enumerate(zip(self.pixels, counts)):
            content = hashlib.shake_128(pixels.tobytes())
            if self.grids is not None:
                content.update(self.grids[i].tobytes())
            found.append(content.digest(4 * int(count)))
        found = np.frombuffer(b"".join(found), "<i4")
        return np.minimum(found | -(2**31), -2)

    def before(self, stop):
        """Returns the images before a position, or `None` without any."""
        count = int(np.sum(self.places.max(axis=1) < stop))
        if not count:
            return None
        grids = None if self.grids is None else self.grids[:count]
        return Images(self.pixels[:count], self.places[:count], grids)


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows as the processor of a model does.

    Args:
        sizes: `Squares` or `Patches`.
        marks: `Marks`.
        token_id: int, the id of the token of an image.
        token: string, its text, or `None` where the tokenizer lacks it or
            those around an image.
        around_ids: tuple of ints, the ids of a begin and of an end, or `()`.
    """

    sizes: Squares | Patches
    marks: Marks
    token_id: int
    token: str | None
    around_ids: tuple = ()

    @classmethod
    def of_model(cls, tokenizer, sizes, marks, token_id=None):
        """Makes one with the image token of a `Tokenizer`.

        Args:
            tokenizer: `Tokenizer` or `None`.
            sizes, marks: as in the class.
            token_id: int, that of the model's config, or `None`.
        """
        known = tokenizer.control_tokens if tokenizer is not None else {}
        inside = [token for token in marks.inside if token in known]
        around = marks.begin, marks.end
        if not inside or any(token not in known for token in around):
            return cls(sizes, marks, token_id, None)
        found = known[inside[0]]
        return cls(
            sizes,
            marks,
            found if token_id is None else token_id,
            inside[0],
            tuple(known[token] for token in around),
        )

    def texts(self, tokenizer, pictures):
        """Returns what stands in a text for images, as `ImageTexts`.

        Args:
            tokenizer: `Tokenizer`.
            pictures: `Pictures`.

        Raises:
            ValueError: the tokenizer does not have the tokens.
        """
        marks = self.marks
        if self.token is None:
            known = list(tokenizer.control_tokens)
            raise ValueError(
                "Images need a tokenizer with the control tokens "
                f"{marks.begin!r}, {marks.end!r} and one of {marks.inside}. "
                f"Received: one with {known[:12]}. Pass that of a multimodal "
                f"{marks.model}."
            )
        if tokenizer.control_tokens[self.token] != self.token_id:
            raise ValueError(
                "The tokenizer must have the image token of the model's "
                f"config (`{marks.field}`), {self.token_id}. Received: "
                f"{self.token!r} of id {tokenizer.control_tokens[self.token]}."
            )
        texts = [
            f"{marks.around}{marks.begin}{self.token * count}{marks.end}"
            f"{marks.around}"
            for count in pictures.counts
        ]
        return ImageTexts(marks.mark, texts)

    def read(self, row, where):
        """Reads the images of a row.

        Returns:
            `Pictures`, or `None` without images.
        """
        given = images_of(row, where)
        if not given:
            return None
        found = []
        for i, value in enumerate(given):
            image = _rgb(value, f"{where}, image {i}")
            found.append(self.sizes.read(image))
        pixels, grids = zip(*found)
        return Pictures(
            np.stack(pixels),
            None if grids[0] is None else np.stack(grids),
            [self.sizes.count(grid) for grid in grids],
        )

    def count(self, token_ids):
        """Counts the images that a sequence has tokens for.

        See `count_images` of the `sizes`.
        """
        ids = np.asarray(token_ids)
        found = np.flatnonzero(ids == self.token_id)
        runs = np.split(found, np.flatnonzero(np.diff(found) != 1) + 1)
        return self.sizes.count_images(runs, ids, self.around_ids or (-1, -1))

    def place(self, pictures, token_ids, where):
        """Finds the tokens of images in a sequence.

        A model may sample the image token too: the first ones are those of
        the images.

        Args:
            pictures: as `read` returns it.
            token_ids: int array of shape `(tokens,)`.
            where: string, the row in errors.

        Returns:
            `Images`, or `None` without images.
        """
        if pictures is None:
            return None
        found = np.flatnonzero(token_ids == self.token_id)
        places = np.full((len(pictures), self.sizes.max_tokens), -1)
        start, adjacent = 0, True
        for place, count in zip(places, pictures.counts):
            own = found[start : start + count]
            place[: len(own)] = own
            adjacent &= bool(np.all(np.diff(own) == 1))
            start += count
            if pictures.grids is not None and len(own):
                # Tokens of another size of the image would be longer.
                behind = token_ids[own[-1] + 1 : own[-1] + 2]
                adjacent &= self.token_id not in behind
        if len(found) < start or not adjacent:
            raise ValueError(
                f"Each image must have {self._counts(pictures.counts)} "
                f"adjacent tokens of id {self.token_id}. Received: {where} "
                f"with {len(pictures)} images and {len(found)} such tokens."
            )
        return Images(pictures.pixels, places, pictures.grids)

    def _counts(self, counts):
        found = sorted(set(counts)) or [self.sizes.max_tokens]
        return " or ".join(map(str, found))

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
        given, counts, places = 0, [], np.zeros(0, np.int64)
        if images is not None:
            self._check_images(images, where)
            given, places = len(images.pixels), images.tokens
            grids = [None] * given if images.grids is None else images.grids
            counts = [self.sizes.count(grid) for grid in grids]
        known = places[places < len(ids)]
        count = self.count(ids)
        if count != given or np.sum(ids[known] == self.token_id) < sum(counts):
            raise ValueError(
                f"A prompt must have {self._counts(counts)} adjacent tokens "
                f"of id {self.token_id} for each of its images, at their "
                f"`places`. Received: {where} with tokens of {count} images, "
                f"and {given} images. Take both from one prepared row."
            )
        if given and places.max() == len(ids) - 1:
            raise ValueError(
                "A prompt must have a token after its images, from which the "
                f"first new token is predicted. Received: {where}, which ends "
                "with an image."
            )

    def _check_images(self, images, where):
        if not isinstance(images, Images):
            raise ValueError(
                "The images of a prompt must be those of a prepared row, "
                "`task.prepare(rows)[0][0].images`. Received: "
                f"{where} with {images!r:.100} of type "
                f"{type(images).__name__}."
            )
        shape = self.sizes.shape
        if images.pixels.shape[1:] != shape:
            raise ValueError(
                "Images must have the size that the model was made for, "
                f"{shape}. Received: {where} with images of shape "
                f"{images.pixels.shape[1:]}. Prepare the rows with this "
                "model's task."
            )


def _rgb(value, where):
    """Returns an image of a row as one of Pillow's with three colours."""
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
    return value.convert("RGB")


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
            "tower: a multimodal Gemma 3 or 4 "
            "(`from_preset(..., vision=True)`). Received: "
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
