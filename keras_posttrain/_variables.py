"""Variables that have a shape, a dtype and a layout before a value."""

import contextlib

import keras


@contextlib.contextmanager
def without_values():
    """Variables made inside are not initialized.

    Keras has that for a stateless scope alone, which makes no optimizer,
    knows no layouts and initializes such a variable at the next chance. So
    the method is replaced here that calls a variable's initializer; a test
    pins it.

    Yields:
        A list, to which each variable is added that is made inside. It must
        be given a value before it is used.
    """
    plain, made = keras.Variable._initialize_with_initializer, []

    def defer(variable, initializer):
        variable._initialize_layout()
        # While a model is built, its layers are traced with what the
        # initializers would give.
        variable._value, variable._initializer = None, initializer
        made.append(variable)

    keras.Variable._initialize_with_initializer = defer
    try:
        yield made
    finally:
        keras.Variable._initialize_with_initializer = plain
