"""The losses that the Tinker API names, as functions of arrays.

Each is a sum over tokens. Formulas and defaults are those of
https://tinker-docs.thinkingmachines.ai/losses.
"""

import dataclasses
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp

from keras_posttrain.losses import ppo_loss
from keras_posttrain.serve.refused import Refused


def cross_entropy(logps, inputs, config):
    return -logps * inputs["weights"]


def importance_sampling(logps, inputs, config):
    ratios = jnp.exp(logps - inputs["logprobs"])
    return -ratios * inputs["advantages"]


def ppo(logps, inputs, config):
    return ppo_loss(
        logps - inputs["logprobs"],
        inputs["advantages"],
        1 - config["clip_low_threshold"],
        config["clip_high_threshold"] - 1,
    )


def cispo(logps, inputs, config):
    ratios = jnp.exp(jax.lax.stop_gradient(logps) - inputs["logprobs"])
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    return -jnp.clip(ratios, low, high) * logps * inputs["advantages"]


def dro(logps, inputs, config):
    distance = jnp.square(logps - inputs["logprobs"])
    return -logps * inputs["advantages"] + config["beta"] / 2 * distance


@dataclasses.dataclass(frozen=True)
class NamedLoss:
    """A loss of the API.

    Attributes:
        function: function `(logps, inputs, config)` to the loss of each
            token, arrays of one shape.
        needs: dict of the names of the inputs that it reads, besides
            `target_tokens`, to their default value or `None`.
        defaults: dict of the settings that `loss_fn_config` may replace.
    """

    function: Callable
    needs: dict
    defaults: dict = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({})
    )

    def config(self, given):
        """Returns all settings; a `Refused` names one that is unknown."""
        for name, value in given.items():
            if name not in self.defaults:
                raise Refused(
                    "`loss_fn_config` has an unknown setting. Known are "
                    f"{sorted(self.defaults)}. Received: {name}={value!r}"
                )
            if isinstance(value, str):
                raise Refused(
                    f"`{name}` of `loss_fn_config` must be a number. "
                    f"Received: {name}={value!r}"
                )
        return {k: float(v) for k, v in {**self.defaults, **given}.items()}


POLICY = {"logprobs": None, "advantages": None}
LOSSES = {
    "cross_entropy": NamedLoss(cross_entropy, {"weights": 1.0}),
    "importance_sampling": NamedLoss(importance_sampling, POLICY),
    "ppo": NamedLoss(
        ppo, POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    ),
    "cispo": NamedLoss(
        cispo, POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    ),
    "dro": NamedLoss(dro, POLICY, {"beta": 0.05}),
}


def named(name):
    """Returns the `NamedLoss` of a name."""
    if name not in LOSSES:
        raise Refused(
            f"`loss_fn` must be one of {sorted(LOSSES)}. For another loss use "
            f"`forward_backward_custom`. Received: loss_fn={name!r}"
        )
    return LOSSES[name]
