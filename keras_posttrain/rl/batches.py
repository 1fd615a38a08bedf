"""The layout of a rollout's minibatches."""

from keras_posttrain.data.batches.layout import MAX_SEQUENCES, BatchLayout
from keras_posttrain.data.batches.packing import most_sequences


def rollout_layout(
    *, num_generations, share_prefix=False, token_budget=None, **settings
):
    """Makes the layout of sampled completions.

    With `share_prefix` a packed row holds a prompt once for the completions
    of it that it holds. `settings` are the other ones of `BatchLayout`.
    """
    most = most_sequences(token_budget, MAX_SEQUENCES)
    if share_prefix:
        # Room for a prompt and all of its completions.
        most = max(most, 1 << num_generations.bit_length())
    return BatchLayout(
        share_prefix=share_prefix,
        max_sequences=most,
        token_budget=token_budget,
        **settings,
    )
