"""A model for several files, which takes some seconds to train."""

import pytest

from tests.episodes.support import learn_by_heart


@pytest.fixture(scope="session")
def knows_a_call(tmp_path_factory):
    """The directory of a model that knows one call of a tool by heart."""
    return learn_by_heart(tmp_path_factory.mktemp("knows"))
