"""Rows to batches, on the host: tokens, chat templates, packing, order."""
