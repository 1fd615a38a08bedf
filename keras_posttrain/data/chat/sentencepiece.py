"""SentencePiece models as `tokenizers` pipelines, with offsets.

Legacy: only for presets without a `tokenizer.json`.

The model file is a protocol buffer with a handful of fields that matter here,
so it is read directly: the generated protobuf module that the `sentencepiece`
package ships registers a file name that other packages register too.
"""

import dataclasses
import struct

import tokenizers
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2


@dataclasses.dataclass
class SentencePieceModel:
    """The fields of a SentencePiece model file.

    Args:
        pieces: list of `(text, score, kind)`, by token id.
        model_type: int, `UNIGRAM` or `BPE`.
        charsmap: bytes, the compiled character normalisation, or empty.
        add_dummy_prefix: bool, whether a space is put before the text.
        remove_extra_whitespaces: bool, whether runs of spaces are folded.
        special_ids: dict of `unk`, `bos`, `eos` and `pad` to a token id, or
            to -1.
    """

    pieces: list
    model_type: int = UNIGRAM
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    special_ids: dict = dataclasses.field(default_factory=dict)


def _varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _fields(data):
    """Yields `(field number, value)` of a serialized protocol buffer."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            # Negative int32 values are written as 64-bit two's complement.
            value = value - (1 << 64) if value >= 1 << 63 else value
        elif wire_type == 1:
            value, at = data[at : at + 8], at + 8
        elif wire_type == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif wire_type == 5:
            value, at = struct.unpack("<f", data[at : at + 4])[0], at + 4
        else:
            raise ValueError(
                "A SentencePiece model must be a serialized protocol buffer. "
                f"Received: data with wire_type={wire_type} at byte {at}."
            )
        if at > len(data):
            raise ValueError(
                "A SentencePiece model must be complete. Received: data that "
                f"ends at byte {len(data)} within a field up to byte {at}."
            )
        yield number, value


def parse_model(data):
    """Reads a `SentencePieceModel` from the bytes of a `tokenizer.model`."""
    model = SentencePieceModel(
        pieces=[], special_ids={"unk": 0, "bos": 1, "eos": 2, "pad": -1}
    )
    found = set()
    for number, value in _fields(data):
        found.add(number)
        if number == 1:
            piece = {1: b"", 2: 0.0, 3: NORMAL} | dict(_fields(value))
            model.pieces.append((piece[1].decode(), piece[2], piece[3]))
        elif number == 2:
            trainer = dict(_fields(value))
            model.model_type = trainer.get(3, UNIGRAM)
            for field, name in ((40, "unk"), (41, "bos"), (42, "eos")):
                model.special_ids[name] = trainer.get(
                    field, model.special_ids[name]
                )
            model.special_ids["pad"] = trainer.get(43, -1)
        elif number == 3:
            normalizer = dict(_fields(value))
            model.charsmap = normalizer.get(2, b"")
            model.add_dummy_prefix = bool(normalizer.get(3, 1))
            model.remove_extra_whitespaces = bool(normalizer.get(4, 1))
    # They follow the pieces.
    if not found >= {1, 2, 3}:
        raise ValueError(
            "A SentencePiece model must be complete: pieces and the "
            "specifications of the trainer and of the normalizer. Received: "
            f"data of {len(data)} bytes with {len(model.pieces)} pieces and "
            f"fields {sorted(found)} of [1, 2, 3]."
        )
    return model


def _merges(pieces):
    """Lists the BPE merges that lead to the pieces, best score first.

    SentencePiece merges the neighbours whose union scores best; `tokenizers`
    merges by rank, so every split of a piece into two pieces is listed under
    the score of the whole.
    """
    ids = {
        text: i for i, (text, _, kind) in enumerate(pieces) if kind == NORMAL
    }
    ranked = []
    for text, i in ids.items():
        rank = (-pieces[i][1], i)
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                ranked.append((rank, left, right))
    ranked.sort()
    return [(pieces[left][0], pieces[right][0]) for _, left, right in ranked]


def _core(model):
    unk = model.pieces[model.special_ids["unk"]][0]
    has_bytes = any(kind == BYTE for _, _, kind in model.pieces)
    if model.model_type == BPE:
        return models.BPE(
            vocab={text: i for i, (text, _, _) in enumerate(model.pieces)},
            merges=_merges(model.pieces),
            unk_token=unk,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    if model.model_type == UNIGRAM:
        return models.Unigram(
            [(text, score) for text, score, _ in model.pieces],
            model.special_ids["unk"],
            has_bytes,
        )
    raise ValueError(
        "Only SentencePiece models of type unigram (1) and BPE (2) can be "
        f"converted. Received: model_type={model.model_type}. Save the "
        "tokenizer as a `tokenizer.json` and use that."
    )


def convert(model, *, special_tokens=(), bos_token=None, prepend="always"):
    """Turns a model into a `tokenizers.Tokenizer` with the same token ids.

    Args:
        model: a `SentencePieceModel`.
        special_tokens: strings in the vocabulary that are control tokens
            although the model file calls them user-defined.
        bos_token: string that opens a text encoded with special tokens, or
            `None`.
        prepend: `"always"` puts the dummy prefix after every special token in
            the text, as tokenizers of the Llama and Mistral families were
            published; `"first"` only at the start of the text.
    """
    backend = tokenizers.Tokenizer(_core(model))
    steps = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Strip(left=True, right=True))
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    prefix = model.add_dummy_prefix
    if prefix and prepend == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme="first", split=False
        )
    else:
        if prefix:
            steps.append(normalizers.Prepend(SPACE))
        steps.append(normalizers.Replace(" ", SPACE))
    if steps:
        backend.normalizer = (
            steps[0] if len(steps) == 1 else normalizers.Sequence(steps)
        )
    undo = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(undo)
    _add_tokens(backend, model, set(special_tokens))
    if bos_token is not None:
        index = backend.token_to_id(bos_token)
        backend.post_processor = start_with(bos_token, index)
    return backend


def start_with(token, index):
    """Returns the step that puts a token, of this id, before each text."""
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token} $B",
        special_tokens=[(token, index)],
    )


def _add_tokens(backend, model, special_tokens):
    special, plain = [], []
    for text, _, kind in model.pieces:
        if kind in (CONTROL, UNKNOWN) or text in special_tokens:
            special.append(
                tokenizers.AddedToken(text, special=True, normalized=False)
            )
        elif kind == USER_DEFINED:
            # SentencePiece looks for these after normalisation, where a
            # space is already written as a mark.
            plain.append(
                tokenizers.AddedToken(
                    text, special=False, normalized=SPACE in text
                )
            )
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
