"""Helpers of tests that could hide a failure."""

import pytest

from tests.support import check_most


@pytest.mark.parametrize(
    "passing, ran, holds",
    [
        ({0, 1, 2}, [0, 1], True),
        ({0, 2}, [0, 1, 2], True),
        ({1, 2}, [0, 1, 2], True),
        ({0}, [0, 1, 2], False),
        ({2}, [0, 1], False),
    ],
)
def test_most_seeds_decide(passing, ran, holds):
    seen = []

    def check(seed):
        seen.append(seed)
        assert seed in passing

    if holds:
        check_most(check, (0, 1, 2))
    else:
        with pytest.raises(AssertionError, match="in "):
            check_most(check, (0, 1, 2))
    assert seen == ran
