"""KerasHub tokenizers and SentencePiece files as `tokenizers` pipelines.

Legacy: only for presets without a `tokenizer.json`.
"""

import importlib.resources
import re

import tokenizers
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from keras_posttrain.data.chat import sentencepiece

# The families' split patterns before byte-pair encoding.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
)
QWEN_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
QWEN3_5_SPLIT = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words in upper, then in lower case, with their contraction.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_OSS_SPLIT = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)

# Added tokens of the Qwen families that are ordinary text to a decoder.
_QWEN_PLAIN = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_GEMMA_CONTROL = (
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
)
# Such as `<|turn>`, `<turn|>`, `<|think|>` and the quote `<|"|>`.
_GEMMA4_CONTROL = re.compile(r'<\|(?:[a-z_]+|")\|?>|<[a-z_]+\|>')
# Tokens that end a turn or a text, as the families' generation configs list
# them.
_STOPS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
    "<turn|>",
    "<|tool_response>",
)
_CONTROL = re.compile(r"<\|[^|<>]+\|>")
# The published chat template of each family, and a control token of it.
_TEMPLATES = {
    "GemmaTokenizer": ("gemma", "<start_of_turn>"),
    "Gemma3Tokenizer": ("gemma3", "<start_of_turn>"),
    "Gemma4Tokenizer": ("gemma4", "<|turn>"),
    "Llama3Tokenizer": ("llama3", "<|start_header_id|>"),
    "LlamaTokenizer": ("llama2", "<s>"),
    "MistralTokenizer": ("mistral", "<s>"),
    "MixtralTokenizer": ("mistral", "<s>"),
    "QwenTokenizer": ("qwen2_5", "<|im_start|>"),
    "Qwen3Tokenizer": ("qwen3", "<|im_start|>"),
    "Qwen3MoeTokenizer": ("qwen3", "<|im_start|>"),
    "Qwen3_5Tokenizer": ("qwen3_5", "<|im_start|>"),
    "Qwen3_5MoeTokenizer": ("qwen3_5", "<|im_start|>"),
    "GptOssTokenizer": ("gpt_oss", "<|channel|>"),
}
# Tokens by which a family's later template is known: Llama 3.1 added those of
# tools.
_LATER = {
    "llama3": ("llama3_1", "<|eom_id|>"),
    "mistral": ("mistral_v3", "[INST]"),
}


def read_template(name):
    """Reads a built-in chat template, a file of `templates`, by its name."""
    package = importlib.resources.files("keras_posttrain.data.chat")
    return (package / "templates" / f"{name}.jinja").read_text("utf-8")


def _builtin_template(family, vocabulary):
    """Reads the published chat template, if its control tokens are known."""
    name, control = _TEMPLATES.get(family, (None, None))
    if control not in vocabulary:
        return None
    later, token = _LATER.get(name, (None, None))
    return read_template(later if token in vocabulary else name)


def from_keras_hub(tokenizer):
    """Converts a KerasHub tokenizer; see `Tokenizer.from_keras_hub`.

    Returns:
        Tuple as of `tokenizer_files.read`.
    """
    family = type(tokenizer).__name__
    if getattr(tokenizer, "proto", None) is not None:
        model = sentencepiece.parse_model(tokenizer.proto)
        vocabulary = {text: i for i, (text, _, _) in enumerate(model.pieces)}
        names = _names(tokenizer, vocabulary)
        pad, unk = (model.special_ids[n] for n in ("pad", "unk"))
        names.setdefault("unk_token", model.pieces[unk][0])
        if pad >= 0:
            names.setdefault("pad_token", model.pieces[pad][0])
        backend = sentencepiece.convert(
            model,
            special_tokens=_gemma_control(tokenizer, vocabulary),
            bos_token=names.get("bos_token"),
        )
    elif getattr(tokenizer, "merges", None) is not None:
        vocabulary = dict(tokenizer.vocabulary)
        names = _names(tokenizer, vocabulary)
        backend = _byte_level(tokenizer, family, vocabulary, names)
    else:
        raise ValueError(
            "Only KerasHub's byte-pair and SentencePiece tokenizers can be "
            f"used. Received: tokenizer={tokenizer} of type {family}. Load "
            "the model from a directory with a `tokenizer.json`."
        )
    stops = [vocabulary[token] for token in _STOPS if token in vocabulary]
    return backend, names, _builtin_template(family, vocabulary), stops


def _gemma_control(tokenizer, vocabulary):
    family = type(tokenizer).__name__
    if "Gemma" not in family:
        return ()
    if family == "Gemma4Tokenizer":
        return [x for x in vocabulary if _GEMMA4_CONTROL.fullmatch(x)]
    if getattr(tokenizer, "has_vision_tokens", False):
        # A tag of HTML to models without images.
        return (*_GEMMA_CONTROL, "<img>")
    return _GEMMA_CONTROL


def _names(tokenizer, vocabulary):
    names = {}
    for ours, theirs in (
        ("bos_token", "start_token"),
        ("eos_token", "end_token"),
        ("pad_token", "pad_token"),
    ):
        token = getattr(tokenizer, theirs, None)
        if isinstance(token, str) and token in vocabulary:
            names[ours] = token
    return names


def split_words(pattern, add_prefix_space=False):
    """Returns the step that splits a text by a pattern, and into bytes."""
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space, use_regex=False)]
    )


def _byte_level(tokenizer, family, vocabulary, names):
    llama = family in ("Llama3Tokenizer", "SmolLM3Tokenizer")
    gpt_oss = family == "GptOssTokenizer"
    qwen = family.startswith("Qwen")
    pairs = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in tokenizer.merges
        if not (isinstance(merge, str) and merge.startswith("#version:"))
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=pairs,
            ignore_merges=llama or gpt_oss,
            fuse_unk=False,
        )
    )
    split = getattr(tokenizer, "split_pattern", None)
    if gpt_oss:
        split = GPT_OSS_SPLIT
    elif llama:
        split = LLAMA3_SPLIT
    elif qwen:
        split = QWEN3_5_SPLIT if "Qwen3_5" in family else QWEN_SPLIT
        backend.normalizer = normalizers.NFC()
    prefix = bool(getattr(tokenizer, "add_prefix_space", False))
    if split is None:
        # GPT-2's pattern, which the byte-level step has built in.
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=prefix, use_regex=True
        )
    else:
        backend.pre_tokenizer = split_words(split, prefix)
    backend.decoder = decoders.ByteLevel()
    special = set(tokenizer.special_tokens) | set(names.values())
    special |= {token for token in vocabulary if _CONTROL.fullmatch(token)}
    plain = [token for token in _QWEN_PLAIN if token in vocabulary]
    by_id = sorted(special & set(vocabulary), key=vocabulary.get)
    backend.add_special_tokens(by_id)
    if qwen:
        backend.add_tokens(
            [tokenizers.AddedToken(t, normalized=False) for t in plain]
        )
    steps = [processors.ByteLevel(trim_offsets=False)]
    bos = names.get("bos_token")
    # GPT-2 and similar tokenizers have a start token that they do not add.
    if bos is not None and bos != names.get("eos_token"):
        steps.append(sentencepiece.start_with(bos, vocabulary[bos]))
    backend.post_processor = processors.Sequence(steps)
    return backend


def from_sentencepiece_file(path, config, names):
    """Converts the `tokenizer.model` of a Hugging Face directory.

    Args:
        path: `pathlib.Path`, the directory.
        config: dict, its `tokenizer_config.json`.
        names: dict of special token names to strings; those that the model
            file knows are filled in.
    """
    data = (path / "tokenizer.model").read_bytes()
    model = sentencepiece.parse_model(data)
    for name in ("bos", "eos", "unk", "pad"):
        index = model.special_ids[name]
        if index >= 0 and f"{name}_token" not in names:
            names[f"{name}_token"] = model.pieces[index][0]
    extra = config.get("additional_special_tokens") or []
    extra = [t["content"] if isinstance(t, dict) else t for t in extra]
    added = config.get("added_tokens_decoder") or {}
    extra += [t["content"] for t in added.values() if t.get("special")]
    if config.get("add_prefix_space") is False:
        model.add_dummy_prefix = False
    known = {text for text, _, _ in model.pieces}
    adds_bos = config.get("add_bos_token", True)
    backend = sentencepiece.convert(
        model,
        special_tokens=[t for t in extra if t in known],
        bos_token=names.get("bos_token") if adds_bos else None,
        prepend="first" if config.get("legacy") is False else "always",
    )
    # Tokens beyond the model file follow it in the order of their ids.
    beyond = sorted((int(i), t) for i, t in added.items())
    for index, token in beyond:
        if token["content"] not in known:
            backend.add_tokens([tokenizers.AddedToken(**token)])
            if backend.token_to_id(token["content"]) != index:
                raise ValueError(
                    "Added tokens must follow the model's vocabulary without "
                    f"gaps. Received: token {token['content']!r} with "
                    f"id={index}. Save the tokenizer as `tokenizer.json`."
                )
    return backend
