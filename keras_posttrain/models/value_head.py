"""A value head: the expected return before each token."""

import jax.numpy as jnp
import keras

from keras_posttrain.models import context, guards
from keras_posttrain.models.hf import loading
from keras_posttrain.models.hf.rope import set_sequence_length
from keras_posttrain.models.linear import flatten_linear_layers
from keras_posttrain.models.lora import Adapter
from keras_posttrain.models.policy import Policy


class ValueHead(keras.layers.Layer):
    """A linear map from hidden states to values, in float32.

    The weights start at 0, so that the first values are 0 and the first
    advantages are the returns. The hidden states are the policy's, or those
    of a separate model.

    Args:
        hidden_dim: int, features of a hidden state.
        causal_lm: a KerasHub `CausalLM` that computes the hidden states, or
            `None` to use the policy's. Its language model head is neither
            used nor trained.
        lora: `LoRA`, to train an adapter of that model instead of its
            weights, or `None`.
        sequence_length: int, the most tokens of a row.
        remat, chooser: as of `Policy`, for that model.
    """

    def __init__(
        self,
        hidden_dim,
        causal_lm=None,
        *,
        lora=None,
        sequence_length=1024,
        remat="none",
        chooser=None,
        name="value_model",
    ):
        super().__init__(name=name, dtype="float32")
        self.kernel = self.add_weight(
            name="kernel", shape=(hidden_dim,), initializer="zeros"
        )
        self.bias = self.add_weight(name="bias", shape=(), initializer="zeros")
        self.causal_lm = causal_lm
        self.adapter = self.policy = None
        if causal_lm is not None:
            self._take_model(lora, sequence_length)
            self.policy = Policy(
                causal_lm, self.adapter, remat, chooser=chooser
            )
        self.built = True

    def _take_model(self, lora, sequence_length):
        causal_lm = self.causal_lm
        guards.check_model(causal_lm, sequence_length)
        loading.repair(causal_lm)
        set_sequence_length(causal_lm, sequence_length)
        flatten_linear_layers(causal_lm.backbone)
        for variable in causal_lm.variables:
            # Optimizer state is keyed by a variable's path, and the policy's
            # variables usually have the same paths. Keras has no public way
            # to rename a variable.
            variable._path = f"{self.name}/{variable.path}"
        embedding = causal_lm.backbone.token_embedding
        if not embedding.tie_weights:
            embedding.reverse_embeddings.trainable = False
        if lora is not None:
            self.adapter = Adapter(causal_lm, lora, name=f"{self.name}_lora")

    def values(self, batch, hidden, dropout_key=None):
        """Computes the expected return before each token is sampled.

        Args:
            batch: as in `Policy.hidden_states`, and `predicted_by` where
                sequences share a prompt.
            hidden: float array, the policy's `hidden_states`. Unused with
                a separate model.

        Returns:
            A float32 array of shape `(rows, length)`, aligned with the
            tokens as `per_token_logps` is; 0 at the first token of a
            sequence.
        """
        if self.policy is not None:
            # Its experts are not those of the policy.
            batch = {k: x for k, x in batch.items() if k != "routed_experts"}
            hidden = self.policy.hidden_states(batch, dropout_key)
        kernel = self.kernel.value
        values = jnp.einsum("rth,h->rt", hidden.astype("float32"), kernel)
        pieces = context.pieces_of(batch["token_ids"].shape)
        values = pieces.join(values + self.bias.value)
        # The value before a token comes from the hidden state that predicts
        # the token.
        if "predicted_by" in batch:
            values = jnp.take_along_axis(values, batch["predicted_by"], axis=1)
        else:
            values = jnp.roll(values, 1, axis=1)
        begun = (batch["positions"] > 0) & (batch["segment_ids"] > 0)
        return jnp.where(begun, values, 0.0)
