import pytest
from tests.distribution import runs
pytestmark = pytest.mark.usefixtures("eight_devices")

@pytest.mark.parametrize("case",["sft:llama3:full:2x4x1","sft:llama3:full:2x2x2"])
def test_same(case):
    *case, meshes = case.split(":")
    runs.check_same_numbers(*case, meshes.split(","))
