"""Every task through the contract: one update, one run, one model."""

import pytest

from tests.tasks import contract

# KTO is `DPOTask` with other rows.
ONE_EACH = [
    pytest.param(x, marks=pytest.mark.full if x == "kto" else ())
    for x in contract.TASKS
]


@pytest.mark.parametrize(
    "name",
    [
        *contract.TASKS,
        *(pytest.param(x, marks=pytest.mark.full) for x in contract.VARIANTS),
    ],
)
def test_the_same_update_however_it_is_run(name):
    contract.check_same_update(name)


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_killed_and_resumed_run_is_the_straight_one(name, tmp_path):
    contract.check_resumed_run(name, tmp_path)


@pytest.mark.parametrize("name", contract.TASKS)
def test_what_is_exported_is_the_model(name, tmp_path):
    contract.check_export(name, tmp_path)


@pytest.mark.parametrize("name", ONE_EACH)
def test_eight_devices_are_one(name, eight_devices):
    contract.check_eight_devices(name)
