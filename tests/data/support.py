"""Random groups of sequences, settings of rows, and chat tokenizers."""

import dataclasses
import pathlib

import numpy as np
import tokenizers

from keras_posttrain.data.batches.layout import Group
from keras_posttrain.data.chat.conversion import read_template
from keras_posttrain.data.chat.tokenizer import Tokenizer
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.data.rows.preparation import RowSettings
from tests.support import REFERENCE

HERE = pathlib.Path(__file__).parent
SIZES = [(30, [5, 9, 1, 12]), (1, [7, 3]), (12, [20, 21]), (40, [2])]


def random_groups(sizes, seed=0):
    """Groups of `(prompt length, [completion lengths])`."""
    rng = np.random.default_rng(seed)
    return [
        Group.of_completions(
            rng.integers(3, 500, prompt).astype("int32"),
            [rng.integers(3, 500, n).astype("int32") for n in lengths],
            [rng.integers(0, 2, n).astype("float32") for n in lengths],
            row,
        )
        for row, (prompt, lengths) in enumerate(sizes)
    ]


def random_trajectories(seed, units=4, vocabulary=500):
    """A group of trajectories that fork, of one to three segments each."""
    rng = np.random.default_rng(seed)

    def tokens(low, high):
        return rng.integers(3, vocabulary, rng.integers(low, high))

    prompt = tokens(1, 7)
    sequences, numbers = [], []
    for unit in range(units):
        for _ in range(rng.integers(1, 4)):
            ids, mask = [prompt], [np.zeros(len(prompt))]
            if sequences and rng.random() < 0.7:
                other = sequences[rng.integers(len(sequences))]
                stop = rng.integers(1, len(other.token_ids) + 1)
                ids = [other.token_ids[:stop]]
                # It forks, or it happens to sample the same tokens.
                mask = [other.completion_mask[:stop] * rng.integers(0, 2)]
            for _ in range(rng.integers(0, 4)):
                for part, weight in ((tokens(1, 5), 1), (tokens(0, 4), 0)):
                    ids.append(part)
                    mask.append(np.full(len(part), weight))
            sequences.append(
                Example(
                    np.concatenate(ids).astype("int32"),
                    np.concatenate(mask).astype("float32"),
                    unit,
                )
            )
            numbers.append(unit)
    return Group(sequences, None, numbers)


def split_settings(arguments):
    """`(those of RowSettings, the others)`."""
    names = {field.name for field in dataclasses.fields(RowSettings)}
    ours = {k: v for k, v in arguments.items() if k in names}
    return ours, {k: v for k, v in arguments.items() if k not in names}


# The official chat templates, each with a reference model whose tokenizer
# gets the control tokens that it lacks. Templates that the package has are
# taken from there.
TEMPLATES = {
    "qwen2_5": ("qwen2", ()),
    "qwen3": ("qwen3", ()),
    "qwen3_2507": ("qwen3", ()),
    "qwen3_5": ("qwen3", ()),
    "llama3_1": ("llama3", ()),
    "llama3_2": ("llama3", ()),
    "gemma3": ("gemma3_text", ()),
    "gemma3_tools": ("gemma3_text", ()),
    "mistral_v3": ("mistral", ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS")),
    "mistral_v7": (
        "llama3",
        ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS", "SYSTEM_PROMPT"),
    ),
    "gpt_oss": ("llama3", ()),
    "gemma4": ("gemma3_text", ()),
    "olmo3_1": ("qwen3", ()),
    "phi4_mini": ("llama3", ()),
}
GEMMA4 = ("turn", "tool_call", "tool_response", "channel", "tool")
PHI = ("system", "user", "assistant", "tool", "end", "tool_response")
HARMONY = ("start", "end", "message", "channel", "return", "call", "constrain")


def chat_tokenizer(name):
    """The tokenizer of a tiny model, with an official chat template."""
    model, pairs = TEMPLATES[name]
    path = HERE / "templates" / f"{name}.jinja"
    template = path.read_text() if path.is_file() else read_template(name)
    tokenizer = Tokenizer.from_directory(REFERENCE / "models" / model)
    names = dict(tokenizer.special_tokens)
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    if pairs:
        names |= {"bos_token": "<s>", "eos_token": "</s>"}
        pairs = [f"[{sign}{pair}]" for pair in pairs for sign in ("", "/")]
        backend.add_special_tokens(["<s>", "</s>", "[TOOL_CALLS]", *pairs])
    stops = ()
    if name == "gpt_oss":
        backend.add_special_tokens([f"<|{token}|>" for token in HARMONY])
        names["eos_token"] = "<|return|>"
        stops = [backend.token_to_id("<|call|>")]
    if name == "gemma4":
        pairs = [(f"<|{token}>", f"<{token}|>") for token in GEMMA4]
        backend.add_special_tokens(['<|"|>', "<|think|>", *sum(pairs, ())])
        names["eos_token"] = "<turn|>"
        stops = [backend.token_to_id("<|tool_response>")]
    if name == "phi4_mini":
        backend.add_special_tokens([f"<|{token}|>" for token in PHI])
        backend.add_tokens(["<|tool_call|>", "<|/tool_call|>"])
        names["eos_token"] = "<|end|>"
    if name == "qwen2_5":
        # As in the published files: parsed, but not special.
        backend.add_tokens(["<tool_call>", "</tool_call>"])
    return Tokenizer(
        backend, names, chat_template=template, stop_token_ids=stops
    )
