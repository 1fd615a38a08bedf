"""A number for each token: what is to be expected from it on."""

import jax.numpy as jnp
import keras

from keras_posttrain.models import guards
from keras_posttrain.models.hf import loading
from keras_posttrain.models.linear import flatten_linear_layers
from keras_posttrain.models.lora import Adapter
from keras_posttrain.models.policy import Policy


class ValueHead(keras.layers.Layer):
    """A linear map from hidden states to values, in float32.

    It starts at 0: until it has learned, nothing is expected, and an
    advantage is what was earned. The hidden states are those that the policy
    has anyway, or those of a model of its own.

    Args:
        hidden_dim: int, features of a hidden state.
        causal_lm: a KerasHub `CausalLM` whose hidden states are read, or
            `None` for the policy's. Its own head is neither used nor
            trained.
        lora: `LoRA`, to train an adapter of that model in place of its
            weights, or `None`.
        sequence_length, remat: of the task.
    """

    def __init__(
        self,
        hidden_dim,
        causal_lm=None,
        *,
        lora=None,
        sequence_length=1024,
        remat="none",
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
            self._take_model(lora, sequence_length, remat)
        self.built = True

    def _take_model(self, lora, sequence_length, remat):
        causal_lm = self.causal_lm
        guards.check_model(causal_lm, sequence_length)
        loading.repair(causal_lm)
        flatten_linear_layers(causal_lm.backbone)
        for variable in causal_lm.variables:
            # The policy's variables most often have the same paths, and
            # Optax tells variables apart by them.
            variable._path = f"{self.name}/{variable.path}"
        embedding = causal_lm.backbone.token_embedding
        if not embedding.tie_weights:
            embedding.reverse_embeddings.trainable = False
        if lora is not None:
            self.adapter = Adapter(causal_lm, lora, name=f"{self.name}_lora")
        self.policy = Policy(causal_lm, adapter=self.adapter, remat=remat)

    def values(self, batch, hidden, dropout_key=None):
        """What is expected before each token is drawn.

        Args:
            batch: as in `Policy.hidden_states`, and `predicted_by` where
                sequences share a prompt.
            hidden: float array of shape `(rows, length, hidden_dim)`, the
                policy's hidden states. Not read by a model of its own.
            dropout_key: as in `Policy.hidden_states`.

        Returns:
            A float32 array of shape `(rows, length)`, in line with the
            tokens as `per_token_logps` is; 0 where a sequence begins.
        """
        if self.policy is not None:
            hidden = self.policy.hidden_states(batch, dropout_key)
        kernel = self.kernel.value
        values = jnp.einsum("rth,h->rt", hidden.astype("float32"), kernel)
        values = values + self.bias.value
        # What is known before a token lies where it is predicted.
        if "predicted_by" in batch:
            values = jnp.take_along_axis(values, batch["predicted_by"], axis=1)
        else:
            values = jnp.roll(values, 1, axis=1)
        begun = (batch["positions"] > 0) & (batch["segment_ids"] > 0)
        return jnp.where(begun, values, 0.0)
