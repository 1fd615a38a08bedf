"""
Title: Data formats for supervised fine-tuning
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Every type of row and of dataset, long rows, and bad rows.
Accelerator: None
"""

"""
## Introduction

`task.fit(dataset)` takes rows: dicts whose columns say what they are. The
names of the columns are those of TRL, so that datasets made for it can be
used as they are. This guide shows every type of row, what is trained on in
it, the kinds of dataset that rows come in, and what happens to rows that are
too long or wrong.

Nothing is trained until the end, so that it takes seconds. For the tokens of a
real model change one line: set `preset` to a KerasHub preset such as
`"qwen3_0.6b_en"`, or to `"hf://Qwen/Qwen3-0.6B"`.
"""

import importlib.util
import json
import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import grain
import keras_hub
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/data_formats"
)
folder.mkdir(parents=True, exist_ok=True)

"""
## A tiny preset

With a real preset leave this section out. The tokenizer here knows bytes, a
few words and the control tokens; the chat template shows the tools to the
model before the messages.
"""

text = "system user assistant What is 2 + 3? It is 5. A calculator can add."
bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [text] * 10,
    tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    ),
)
tokenizer = kpt.Tokenizer(
    bpe,
    {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    chat_template="""\
{%- for tool in tools or [] %}
{{- '<|im_start|>system\\nTool: ' + (tool | tojson) + '<|im_end|>\\n' }}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
)
backbone = keras_hub.models.Qwen3Backbone(
    vocabulary_size=tokenizer.vocabulary_size,
    num_layers=1,
    num_query_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    hidden_dim=32,
    intermediate_dim=64,
)
causal_lm = keras_hub.models.Qwen3CausalLM(backbone, preprocessor=None)
preset = folder / "tiny_qwen3"
kpt.SFTTask(causal_lm, tokenizer).export(preset)

task = kpt.SFTTask.from_preset(preset, sequence_length=192)
tokenizer = task.tokenizer

"""
## Types of rows

`task.prepare` does what `fit` does before it trains: it turns rows into
examples, each with `token_ids` and a `completion_mask`, the weight of every
token in the loss.

Here is every type of row. Prompts and completions may be strings or lists of
messages. Columns that end in `_ids` are tokens already, which are taken as
they are: nothing is added, not even an end token.
"""

user = {"role": "user", "content": "What is 2 + 3?"}
assistant = {"role": "assistant", "content": "It is 5."}
row_types = {
    "a text": {"text": "What is 2 + 3? It is 5."},
    "a chat": {"messages": [user, assistant, user, assistant]},
    "prompt and completion": {
        "prompt": "What is 2 + 3?",
        "completion": " It is 5.",
    },
    "the same as messages": {"prompt": [user], "completion": [assistant]},
    "as token ids": {
        "prompt_ids": tokenizer.encode("What is 2 + 3?"),
        "completion_ids": tokenizer.encode(" It is 5."),
    },
    "token ids and a mask": {
        "token_ids": tokenizer.encode("What is 2 + 3? It is 5."),
        "completion_mask": [0] * (len(tokenizer.encode("What is 2 + 3?")))
        + [1] * len(tokenizer.encode(" It is 5.")),
    },
}
for name, row in row_types.items():
    examples, report = task.prepare([row])
    ids, mask = examples[0].token_ids, examples[0].completion_mask
    print(f"{name}: columns {sorted(row)}")
    print("  all:    ", repr(tokenizer.decode(ids, skip_special_tokens=False)))
    trained = tokenizer.decode(ids[mask > 0], skip_special_tokens=False)
    print("  trained:", repr(trained))

"""
Some things to note:

- A text ends with the end token, and all of it is trained on but the first
  token, which nothing predicts.
- In a chat the answers of the assistant are trained on, each with the token
  that ends the turn, so that the model learns to stop.
- The completion of a row of two strings follows the prompt as it is: the space
  between them is part of one of the two, here of the completion. The end token
  is added. No chat template is used.
- What is trained on is found by the tokens' places in the rendered text. A
  control token that somebody wrote in a message stays text: it is not parsed.
"""

injected = {"role": "user", "content": "<|im_end|> What is 2 + 3?"}
examples, _ = task.prepare([{"messages": [injected, assistant]}])
print((examples[0].token_ids == tokenizer.eos_token_id).sum(), "end tokens")

"""
## Which part is trained on

`train_on` chooses: `"completion"` is the last answer of a chat, `"assistant"`
all its answers, `"all"` every token. The default, `"auto"`, is what was shown
above. It is an argument of the task.
"""

for train_on in ("completion", "assistant", "all"):
    task = kpt.SFTTask.from_preset(
        preset, sequence_length=192, train_on=train_on
    )
    examples, report = task.prepare([row_types["a chat"]])
    print(f"train_on={train_on!r}: {report.loss_tokens} of {report.tokens}")

"""
## Weights

A row may have a `weight`, which multiplies the loss of its tokens. A
`completion_mask` may hold weights as well. The loss of a batch is divided by
the sum of all of them.
"""

task = kpt.SFTTask.from_preset(preset, sequence_length=192)
examples, _ = task.prepare([{**row_types["a chat"], "weight": 0.5}])
print("weights:", sorted(set(examples[0].completion_mask.tolist())))

"""
## Tools

The `tools` of a chat, a list of JSON schemas or that list as a JSON string, go
to the chat template.
"""

calculator = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object"}},
}
row = {"messages": [user, assistant], "tools": [calculator]}
examples, _ = task.prepare([row])
print(tokenizer.decode(examples[0].token_ids, skip_special_tokens=False))

"""
## Kinds of datasets

`fit`, `evaluate` and `prepare` take a list of dicts or the path of a file: one
JSON object a line in a `.jsonl`, a list in a `.json`, or a `.parquet`.
"""

rows = [
    {"prompt": f"What is {a} + {b}?", "completion": f" It is {a + b}."}
    for a in range(8)
    for b in range(8)
]
file = folder / "sums.jsonl"
file.write_text("".join(json.dumps(row) + "\n" for row in rows))
print(task.prepare(file)[1])

"""
A Hugging Face `Dataset` works as it is, where that library is installed.
"""

if importlib.util.find_spec("datasets"):
    import datasets

    print(task.prepare(datasets.Dataset.from_list(rows))[1])

"""
[Grain](https://google-grain.readthedocs.io) pipelines are for rows that have
to be filtered, mapped or mixed. A `MapDataset` has random access, and is
shuffled and resumed like a list.
"""

dataset = grain.MapDataset.source(rows).filter(
    lambda row: "7" not in row["prompt"]
)
print(task.prepare(dataset)[1])

"""
An `IterDataset` is read while training goes on, for data that does not fit
into memory. It is shuffled and packed in windows, and its position is saved
with a checkpoint. Since rows are prepared as they are read, a bad row is
found when its turn comes, and the report fills as training goes on.
"""

stream = grain.MapDataset.source(rows).to_iter_dataset()
task.compile()
task.fit(stream, batch_size=4, packing=True, verbose=0)
print(task.data_report)

"""
## Rows that are too long

`sequence_length` is the most tokens a row may have. By default a longer row is
an error, so that nothing is lost unseen. `truncation="drop"` leaves such rows
out and `truncation="cut"` cuts their ends off. The report counts both, and
also rows that have no token left to learn from.
"""

for truncation in ("error", "drop", "cut"):
    task = kpt.SFTTask.from_preset(
        preset, sequence_length=14, truncation=truncation
    )
    try:
        print(f"{truncation}: {task.prepare(rows)[1]}")
    except ValueError as error:
        print(f"{truncation}: ValueError: {error}")

"""
## Rows that are wrong

A row that cannot be used is an error that names the row and the column, and
says what to do. It is raised before anything is compiled.
"""

task = kpt.SFTTask.from_preset(preset, sequence_length=192)
bad_datasets = {
    "a misspelt column": [{"promt": "2 + 3", "completion": "5"}],
    "a missing column": [{"prompt": "2 + 3"}],
    "columns of two types": [{"text": "2", "messages": [user, assistant]}],
    "two types of rows": [{"text": "2 + 3"}, {"messages": [user, assistant]}],
    "a wrong type": [{"text": 5}],
    "an id outside the vocabulary": [
        {"prompt_ids": [1], "completion_ids": [10**6]}
    ],
    "lengths that differ": [{"token_ids": [1, 2], "completion_mask": [1]}],
    "a weight that is no number": [{"text": "2 + 3", "weight": float("nan")}],
    "nothing to learn": [{"messages": [user]}],
    "no rows": [],
    "no file": folder / "missing.jsonl",
}
for name, dataset in bad_datasets.items():
    try:
        task.prepare(dataset)
    except ValueError as error:
        print(f"{name}:\n    {error}")

"""
## Next

- `sft.py`: a whole run with LoRA, packing, callbacks and resuming.
- `custom_train_step.py`: a training step of your own.
"""
