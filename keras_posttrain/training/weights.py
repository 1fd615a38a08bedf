"""The variables of a model and their values, as pure functions see them."""

import contextlib

from keras_posttrain._tracing import TRACING
from keras_posttrain.models.quantized import values_of


class ModelWeights:
    """A model's variables, in the order of a step's lists of arrays."""

    def __init__(self, trainable, frozen):
        self.trainable, self.frozen = list(trainable), list(frozen)

    @classmethod
    def of(cls, model):
        """Returns the weights of a `keras.Model`."""
        return cls(model.trainable_variables, model.non_trainable_variables)

    def values(self):
        """Returns the values: `(trainable, frozen)`, two lists of arrays."""
        return (
            [v.value for v in self.trainable],
            [v.value for v in self.frozen],
        )

    def state(self):
        """Returns the present values as the part of a step's `state`."""
        return dict(zip(("trainable", "frozen"), self.values()))

    @contextlib.contextmanager
    def scope(self, trainable, frozen):
        """Gives the variables these values. One thread at a time enters."""
        mapping = list(zip(self.trainable, trainable))
        mapping += list(zip(self.frozen, frozen))
        with TRACING, values_of(mapping):
            yield
