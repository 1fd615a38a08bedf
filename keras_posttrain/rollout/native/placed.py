"""A task's weights on the devices of a sampler."""

import weakref

from keras_posttrain.distribution.transfer import copy_to


class PlacedWeights:
    """Copies of variables' arrays, in the layouts of a distribution.

    An array is copied again only once the variable has another one.

    Args:
        distribution: Keras distribution that gives every
            variable its layout, as of `models/placing.py`.
    """

    def __init__(self, distribution):
        self.distribution, self._copies = distribution, {}

    def __call__(self, variables, values=None):
        """Returns the copies, a list of arrays.

        Args:
            variables: list of `keras.Variable`s.
            values: list of arrays to copy in place of the variables' own.
        """
        if values is None:
            values = [variable.value for variable in variables]
        return [self._copy(*pair) for pair in zip(variables, values)]

    def _copy(self, variable, value):
        source, copied = self._copies.get(id(variable), (None, None))
        if source is None or source() is not value:
            layout = self.distribution.get_variable_layout(variable)
            copied = copy_to(value, layout.backend_layout)
            self._copies[id(variable)] = weakref.ref(value), copied
        return copied
