"""Metrics of rows in `Task.evaluate`."""

from keras_posttrain.data.chat.byte_counts import byte_counts
from keras_posttrain.data.rows import datasets
from keras_posttrain.data.rows.columns import MixedRow
from keras_posttrain.metrics.metric import (
    as_metrics,
    measure_texts,
    summarize,
)
from keras_posttrain.training import checks


class RowMetrics:
    """The metrics of one call of `evaluate`, checked before anything runs.

    Args:
        metrics: what the user passed.
        tokenizer: that of the task.
        dataset: what the user passed; its rows are read once, and their
            column `references` is kept apart.
    """

    def __init__(self, metrics, tokenizer, dataset):
        self.metrics = as_metrics(metrics)
        checks.need_tokenizer(tokenizer, "metrics")
        self.of_text = [m for m in self.metrics if m.reads == "text"]
        self.of_tokens = [m for m in self.metrics if m.reads == "log_probs"]
        self.num_bytes = byte_counts(tokenizer) if self.of_tokens else None
        self.rows, self.references = _without_references(dataset)

    def results(self, samples, tokens):
        """Computes the results, a dict of floats.

        Args:
            samples: list of what `complete_rows` returned; empty without
                metrics of text.
            tokens: list of `(Example, per_token_logps)`; empty without
                metrics of log-probabilities.
        """
        found = {}
        for metric in self.of_text:
            found |= summarize(metric, measure_texts(metric, samples))
        if self.of_text:
            found["max_tokens_reached"] = float(
                sum(sample["is_cut"] for sample in samples)
            )
        for metric in self.of_tokens:
            measured = []
            for example, logps in tokens:
                trained = example.completion_mask != 0
                sizes = self.num_bytes[example.token_ids[trained]]
                measured.append(metric.measure_tokens(logps[trained], sizes))
            found |= summarize(metric, measured)
        return found

    def with_references(self, samples, examples):
        """Returns the samples with all references of their rows."""
        return [
            {
                **sample,
                "references": [
                    sample["reference"],
                    *self.references.get(example.row, ()),
                ],
            }
            for sample, example in zip(samples, examples)
        ]


def _without_references(dataset):
    """Returns the rows of a dataset, and `references` by row."""
    opened = datasets.open_dataset(dataset, "dataset")
    stream = datasets.is_stream(opened)
    rows = list(opened) if stream else [opened[i] for i in range(len(opened))]
    references = {}
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or row.get("references") is None:
            continue
        given = row["references"]
        is_list = isinstance(given, (list, tuple))
        if not is_list or not all(isinstance(x, str) for x in given):
            raise ValueError(
                "The column 'references' must be a list of strings, further "
                f"texts that count as right. Received: row {i} with "
                f"references={given!r:.200}"
            )
        references[i] = list(given)
        kept = {k: v for k, v in row.items() if k != "references"}
        if hasattr(row, "source"):
            kept = MixedRow(kept, row.source)
        rows[i] = kept
    return rows, references
