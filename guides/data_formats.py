"""
Title: Data formats for supervised fine-tuning
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: Every type of row and of dataset, long rows, and bad rows.
Accelerator: None
"""

"""
## Introduction

`task.fit(dataset)` takes rows: dicts whose columns say what they hold. The
names of the columns are those of TRL, so datasets made for TRL can be used
unchanged. This guide shows every type of row and which of its tokens are
trained on, the kinds of datasets, and what happens to rows that are too long
or invalid.

It trains for a few steps only and takes seconds. For the tokens of a real
model change one line: set `preset` to a KerasHub preset such as
`"qwen3_0.6b_en"`, or to `"hf://Qwen/Qwen3-0.6B"`.
"""

import importlib.util
import json
import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import grain

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/data_formats"
)

text = "What is 2 + 3? It is 5. A calculator can add."
preset = kpt.examples.tiny_preset(folder / "tiny", [text])

task = kpt.SFTTask.from_preset(preset, sequence_length=192)
tokenizer = task.tokenizer

"""
## Types of rows

`task.prepare` does what `fit` does before it trains: it turns rows into
examples. Each has `token_ids` and a `completion_mask`, the weight of every
token in the loss.

Below is every type of row. Prompts and completions may be strings or lists of
messages. Columns that end in `_ids` hold tokens. Nothing is added to them, not
even an end token.
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
Note that:

- A text is followed by the end token. All of it is trained on except the first
  token, which has no context to be predicted from.
- In a chat the assistant's answers are trained on, each with the token that
  ends the turn, so that the model learns to stop.
- In a row of two strings the completion directly follows the prompt, so the
  space between them must be part of one of them, here of the completion. The
  end token is added. No chat template is applied.
- Which tokens are trained on is decided by their positions in the rendered
  text. A control token that appears in the content of a message is encoded as
  ordinary text.
"""

injected = {"role": "user", "content": "<|im_end|> What is 2 + 3?"}
examples, _ = task.prepare([{"messages": [injected, assistant]}])
print((examples[0].token_ids == tokenizer.eos_token_id).sum(), "end tokens")

"""
## Which part is trained on

`train_on` is an argument of the task: `"completion"` trains on the last answer
of a chat, `"assistant"` on all its answers, `"all"` on every token. The
default, `"auto"`, is what was shown above.
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

The `tools` of a chat are a list of JSON schemas, or that list as a JSON
string. They are passed to the chat template.
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
JSON object a line in a `.jsonl`, a list in a `.json`, or a `.csv` or
`.parquet`. Files may be compressed (`.gz`, `.bz2`, `.xz`, `.zst`). A list of
paths, or a pattern such as `"data/*.jsonl"`, is read as one dataset. Addresses
such as `"gs://bucket/rows-*.jsonl"` are copied to the cache first.
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
A dict of columns is a dataset too, and so are the tables of pandas, Polars and
PyArrow, and the datasets of torch, `tf.data` and Keras (`PyDataset`). A
Hugging Face `Dataset` can be passed directly, where that library is installed.
"""

print(task.prepare({"text": ["2 + 3 = 5", "1 + 1 = 2"]})[1])

if importlib.util.find_spec("datasets"):
    import datasets

    print(task.prepare(datasets.Dataset.from_list(rows))[1])

"""
[Grain](https://google-grain.readthedocs.io) pipelines filter, map or mix rows.
A `MapDataset` has random access, and is shuffled and resumed like a list.

Rows with random access are tokenized before training, many of them by one
process per core (the environment variable `KERAS_POSTTRAIN_WORKERS` sets
another number). What takes more than a second is kept in
`~/.cache/keras_posttrain/rows`, or in the directory that
`KERAS_POSTTRAIN_CACHE` names (`off` for none, of compiled programs too):
another run on the same rows, with the same tokenizer, template and settings,
reads it there. Lengths and labels are kept with the rows, so that it plans its
batches without reading each row.

The rows of `.parquet` files, and of `.jsonl` files of 32 MiB and more, are not
held in memory. A row group of Parquet is decoded once, to a temporary file in
that directory. Other files are held whole, compressed ones (`.jsonl.gz`) too:
decompress large ones, or write them as Parquet.
"""

dataset = grain.MapDataset.source(rows).filter(
    lambda row: "7" not in row["prompt"]
)
print(task.prepare(dataset)[1])

"""
An `IterDataset` is read during training, for data that does not fit into
memory. It is shuffled and packed in windows, and its position is saved with a
checkpoint. A thread prepares rows ahead of the steps, over the ends of epochs,
so an invalid row raises its error during training, and the report is filled
meanwhile. Only the first step of a run waits for a window of 2,048 rows, which
are shuffled together, unless rows take longer to prepare than to train on.
Every task takes streams.

Other iterables of dicts are streams as well: a Hugging Face `IterableDataset`,
a Grain `DataLoader`, or a function that returns a generator. A run that
resumes reads them again up to its position, without tokenizing. A generator
itself can be read only once, for one epoch. A dataset must have an end.

A run resumes on the same stream. A checkpoint holds a hash of the rows that
follow: up to 64 in the middle of a window, one between two windows. A stream
that has others there is refused; where an epoch begins, it is a warning.
Nothing more is read for this, and later rows are not compared. A stream that
gives another order each time it is read cannot be resumed within an epoch. The
next epoch is begun before the last one ends, so a function that gives each
epoch rows of its own must count its calls itself, and not rely on a callback.
"""

stream = grain.MapDataset.source(rows).to_iter_dataset()
task.compile()
task.fit(stream, batch_size=4, packing=True, verbose=0)
print(task.data_report)

"""
## Rows of ShareGPT and Alpaca

Rows with `conversations` of `from` and `value`, and rows with `instruction`,
`input` and `output`, are converted to messages. Where the tokenizer has no
chat template, Alpaca's rows become text with Alpaca's own prompt. The report
counts them, and names columns that nothing reads.
"""

turns = [
    {"from": "human", "value": "What is 2 + 3?"},
    {"from": "gpt", "value": "It is 5."},
]
print(task.prepare([{"conversations": turns, "id": 1}])[1])
alpaca = {"instruction": "Add.", "input": "2 + 3", "output": "5"}
print(task.prepare([alpaca])[1])

"""
## Mixtures

`kpt.data.mix` makes one dataset of several, each with its share of the rows
and with a row type of its own. It ends with the first dataset that ends;
`repeat=True` repeats the others until every row was read.
"""

mixture = kpt.data.mix(
    {"sums": file, "alpaca": [alpaca] * 20},
    weights={"sums": 0.75, "alpaca": 0.25},
)
print(task.prepare(mixture)[1])

"""
## Rows that are too long

`sequence_length` is the maximum number of tokens in a row. By default a longer
row is an error, so that no data is lost unnoticed. `truncation="drop"` leaves
such rows out, and `truncation="cut"` cuts off their ends. The report counts
both, and also rows that have no token left with loss.
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
## Invalid rows

A row that cannot be used raises an error that names the row and the column,
and says what to do. It is raised before anything is compiled.
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

- `sft.py`: a full run with LoRA, packing, callbacks and resuming.
- `custom_train_step.py`: custom training steps.
"""
