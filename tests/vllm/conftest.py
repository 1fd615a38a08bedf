"""What makes these tests quicker, and changes none of their results."""

import gc

import pytest


@pytest.fixture(autouse=True)
def frozen_imports():
    """What libraries leave in memory is not searched for garbage.

    vLLM collects garbage several times as an engine starts, most of a second
    each time where torch, TensorFlow, Keras and vLLM are in one process. As
    one stops, vLLM thaws what was frozen: hence at each test.
    """
    gc.freeze()
