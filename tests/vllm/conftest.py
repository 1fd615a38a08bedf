"""Settings that make these tests faster with equal results."""

import gc

import pytest


@pytest.fixture(autouse=True)
def frozen_imports():
    """Excludes the objects of libraries from garbage collection.

    vLLM collects garbage several times as an engine starts, most of a second
    each time where torch, TensorFlow, Keras and vLLM are in one process. As
    one stops, vLLM thaws what was frozen: hence at each test.
    """
    gc.freeze()
