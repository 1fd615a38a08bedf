"""Every bad input of the table is answered before anything is compiled."""

import types

import pytest

import keras_posttrain as kpt
from tests.bad_inputs import BAD, OPEN
from tests.support import REFERENCE


@pytest.fixture(scope="module")
def tasks():
    def make(kind):
        return kind.from_preset(REFERENCE / "models/qwen3", sequence_length=64)

    found = types.SimpleNamespace(
        sft=make(kpt.SFTTask), dpo=make(kpt.DPOTask), grpo=make(kpt.GRPOTask)
    )
    found.sft.compile()
    found.dpo.compile()
    found.model = make(kpt.SFTTask).causal_lm
    return found


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused(tasks, name, request):
    if name in OPEN:
        request.applymarker(pytest.mark.xfail(strict=True))
    call, error, words = BAD[name]
    with pytest.raises(error) as caught:
        call(tasks)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value), str(caught.value)
    for task in (tasks.sft, tasks.dpo, tasks.grpo):
        program = getattr(task, "compiled_train_step", None)
        assert program is None or program._cache_size() == 0
