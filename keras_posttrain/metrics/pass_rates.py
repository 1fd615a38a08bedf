"""The probability that one of k samples is right."""

import numpy as np


def pass_at_k(num_samples, num_right, k):
    """Estimates the probability that at least one of `k` samples is right.

    The estimate from `n` samples, of which `c` are right, is
    `1 - C(n - c, k) / C(n, k)`: the share of the sets of `k` of them that
    have a right one. It is unbiased; that of the first `k` samples has a
    larger variance, and `1 - (1 - c / n)**k` is biased.

    Source: Chen et al., 2021, https://arxiv.org/abs/2107.03374

    Args:
        num_samples: int, `n`, the samples of a prompt.
        num_right: int or ints of any shape, `c`, of each prompt.
        k: int, at most `num_samples`.

    Returns:
        A float64 array of the shape of `num_right`.

    Raises:
        ValueError: `k` is not in `1 ... num_samples`, or `num_right` not in
            `0 ... num_samples`.

    Example:

    ```python
    kpt.metrics.pass_at_k(4, [0, 1, 4], k=2)  # array([0. , 0.5, 1. ])
    ```
    """
    right = np.asarray(num_right)
    if not 1 <= k <= num_samples:
        raise ValueError(
            "`k` must be between 1 and the number of samples. Received: "
            f"k={k}, num_samples={num_samples}"
        )
    if np.any((right < 0) | (right > num_samples)):
        raise ValueError(
            f"`num_right` must be between 0 and num_samples={num_samples}. "
            f"Received: num_right={num_right!r:.200}"
        )
    # C(n - c, k) / C(n, k), of which each factor is at most 1.
    i = np.arange(k)
    wrong = np.maximum(num_samples - right[..., None] - i, 0)
    return 1.0 - np.prod(wrong / (num_samples - i), axis=-1)
