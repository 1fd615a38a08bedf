import numpy as np

from keras_posttrain.metrics.metric import Metric


class BitsPerByte(Metric):
    """Bits that the model needs for each byte of the rows' completions.

    The negative log-likelihood of all tokens with loss, in bits, over the
    UTF-8 bytes of the text that these tokens stand for. Unlike perplexity it
    can be compared between tokenizers. Control tokens with loss, such as the
    end of a turn, add their bits and no bytes. The text is that of the tokens
    themselves: a token that begins in the prompt counts with all its bytes,
    and the first token of a row, which nothing predicts, counts in neither.
    Weights of rows and tokens are not used. Nothing is sampled.

    Example:

    ```python
    task.evaluate(rows, metrics=[kpt.metrics.BitsPerByte()])
    ```
    """

    reads = "log_probs"
    is_mean = False

    @property
    def name(self):
        return "bits_per_byte"

    def measure_tokens(self, per_token_logps, num_bytes):
        """Measures a row.

        Args:
            per_token_logps: float array `(tokens,)`, of those with loss.
            num_bytes: int array `(tokens,)`, the bytes of their text.

        Returns:
            `[bits, bytes]`.
        """
        logps = np.asarray(per_token_logps, np.float64)
        return [-logps.sum() / np.log(2), num_bytes.sum()]

    def value(self, sums, count):
        bits, size = sums
        return float(bits / size) if size else float("nan")
