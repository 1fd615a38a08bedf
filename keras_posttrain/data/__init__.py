"""Rows to batches, on the host: tokens, chat templates, packing, order."""

from typing import TYPE_CHECKING

from keras_posttrain import _lazy_imports

if TYPE_CHECKING:
    from keras_posttrain.data.rows.mixture import mix

__all__ = ["mix"]

__getattr__, __dir__ = _lazy_imports.attach(__name__)
