"""Every task through the contract: one update, one run, one model."""

import pytest

from tests.support import in_ci
from tests.tasks import contract

# KTO is `DPOTask` with other rows, and `distill_on_policy` has parts of two.
MORE = ("kto", "distill_on_policy")
ONE_EACH = in_ci(
    *(x for x in contract.TASKS if x not in MORE), of=contract.TASKS
)
# With what one layer gives the next.
UPDATES = [
    *(x for x in contract.TASKS if x not in ("dpo", "sft")),
    "dpo_two_layers",
    # `test_invariance.py` has its settings, in every family.
    pytest.param("sft", marks=pytest.mark.full),
]


@pytest.mark.parametrize("name", UPDATES)
def test_the_same_update_however_it_is_run(name):
    contract.check_same_update(name, together=True)


@pytest.mark.full
@pytest.mark.parametrize("name", contract.CASES)
def test_the_same_update_in_every_way(name):
    contract.check_same_update(name)


# `test_killed.py` kills a process of GRPO, with the same rows and settings.
RESUMED = [x for x in contract.TASKS if x not in (*MORE, "grpo")]


@pytest.mark.parametrize("name", in_ci(*RESUMED, of=contract.TASKS))
def test_a_killed_and_resumed_run_is_the_straight_one(name, tmp_path):
    contract.check_resumed_run(name, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", contract.TASKS)
def test_a_run_that_also_stops_is_the_straight_one(name, tmp_path):
    contract.check_resumed_run(name, tmp_path, stops=True)


@pytest.mark.parametrize("name", ONE_EACH)
def test_what_is_exported_is_the_model(name, tmp_path):
    contract.check_export(name, tmp_path)


@pytest.mark.parametrize("name", ONE_EACH)
def test_eight_devices_are_one(name, eight_devices):
    contract.check_eight_devices(name)
