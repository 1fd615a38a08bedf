"""Hidden states and attention weights recorded during a forward pass."""

import dataclasses


@dataclasses.dataclass
class ActivationCapture:
    """The activations to record in a forward pass, and their values.

    Attributes:
        hidden: dict, from the layer's index to a float array of shape
            `(rows, length, hidden_dim)`, before the last norm; of Gemma 3n
            the first hidden state of each token.
        attentions: dict, from the layer's index to a float32 array of shape
            `(rows, heads, length, length)`, a row for each query. A weight
            is 0 where the query does not see the key; all weights of a
            padding token are 0.
    """

    hidden_layers: tuple = ()
    attention_layers: tuple = ()
    hidden: dict = dataclasses.field(default_factory=dict)
    attentions: dict = dataclasses.field(default_factory=dict)

    def check(self, policy):
        """Raises a `ValueError` if a policy cannot provide these."""
        name = type(policy.backbone).__name__
        if not policy.packable:
            raise ValueError(
                f"{name} runs by KerasHub's own call, which shows neither "
                "hidden states nor attention weights of its layers. Use a "
                "loss of the final distribution alone, or a family of "
                "Gemma 1-4, Llama, Mistral or Qwen 2-3.5."
            )
        count = len(policy.backbone.transformer_layers)
        for field in ("hidden_layers", "attention_layers"):
            layers = tuple(getattr(self, field))
            if any(not 0 <= layer < count for layer in layers):
                raise ValueError(
                    f"Layers must be numbers from 0 to {count - 1}: {name} "
                    f"has {count} decoder layers. Received: "
                    f"{field}={layers}"
                )
        linear = sorted(set(self.attention_layers) - set(policy.attending))
        if linear:
            raise ValueError(
                f"Layers {linear} of {name} have linear attention, which has "
                f"no weights of its tokens. Use {policy.attending}, or match "
                "hidden states instead. Received: attention_layers="
                f"{tuple(self.attention_layers)}"
            )
        if self.attention_layers and policy.remat != "none":
            raise ValueError(
                "Attention weights cannot be read from rematerialised "
                "layers: they would be computed twice and stored anyway. "
                "Use remat='none', or match hidden states instead. "
                f"Received: remat={policy.remat!r}, attention_layers="
                f"{tuple(self.attention_layers)}"
            )
