"""Rows to batches, on the host: tokens, chat templates, packing, order."""

from keras_posttrain.data.rows.mixture import mix

__all__ = ["mix"]
