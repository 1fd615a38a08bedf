"""The UTF-8 bytes of the text that each token of a vocabulary stands for."""

import json
import re

import numpy as np

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def byte_counts(tokenizer):
    """Counts the bytes of each token id, an int array `(vocabulary,)`.

    Control tokens have none. The space that a SentencePiece tokenizer puts
    before a whole text, and removes when it decodes, is counted.

    Raises:
        ValueError: the tokens of this kind of tokenizer have no bytes of
            their own, such as those of WordPiece.
    """
    decoder = json.loads(tokenizer.backend.to_str())["decoder"] or {}
    kinds = {d["type"] for d in decoder.get("decoders", [decoder])}
    is_bytes = "ByteLevel" in kinds
    is_spaced = bool(kinds & {"Replace", "Metaspace"})
    if not is_bytes and not is_spaced:
        raise ValueError(
            "Bytes are counted for byte-level and SentencePiece tokenizers. "
            f"Received: one with the decoder {sorted(kinds)}. Leave "
            "`kpt.metrics.BitsPerByte` out."
        )
    counts = np.zeros(tokenizer.vocabulary_size, np.int64)
    for token, i in tokenizer.backend.get_vocab().items():
        if is_bytes:
            # Each character of such a token stands for a byte.
            counts[i] = len(token)
        elif _BYTE.fullmatch(token):
            counts[i] = 1
        else:
            counts[i] = len(token.replace("\u2581", " ").encode())
    for i, added in tokenizer.backend.get_added_tokens_decoder().items():
        counts[i] = len(added.content.encode()) * (not added.special)
    return counts
