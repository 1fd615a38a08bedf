"""Every bad input of the table is answered before anything is compiled."""

import types

import pytest

import keras_posttrain as kpt
from tests.bad_inputs import BAD, MODEL, reward


def answer_reward(completions, answer):
    return [float(a in c) for c, a in zip(completions, answer)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    def make(kind, lora=False, **kwargs):
        lora = kpt.LoRA(rank=2) if lora else None
        return kind.from_preset(MODEL, sequence_length=64, lora=lora, **kwargs)

    found = types.SimpleNamespace(
        sft=make(kpt.SFTTask),
        fresh=make(kpt.SFTTask),
        dpo=make(kpt.DPOTask, lora=True),
        kto=make(kpt.DPOTask, lora=True),
        reward=make(kpt.RewardTask, lora=True),
        grpo=make(kpt.GRPOTask, lora=True),
        blank=make(kpt.GRPOTask, lora=True),
        answers=make(kpt.GRPOTask, lora=True),
        ppo=make(kpt.PPOTask, lora=True),
        distill=make(kpt.DistillTask, lora=True, teacher=MODEL),
        path=tmp_path_factory.mktemp("bad"),
    )
    found.sft.compile()
    found.dpo.compile()
    found.kto.compile(loss=kpt.losses.KTOLoss())
    found.reward.compile()
    found.grpo.compile(rewards=[reward], max_completion_length=4)
    found.answers.compile(rewards=[answer_reward], max_completion_length=4)
    found.distill.compile()
    found.model = make(kpt.SFTTask).causal_lm
    found.engine = kpt.rollout.NativeRollout()
    found.engine.set_model(found.sft)
    return found


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused(tasks, name):
    call, error, words = BAD[name]
    with pytest.raises(error) as caught:
        call(tasks)
    own = type(caught.value).__module__.startswith("keras_posttrain")
    assert own or type(caught.value) is error
    for word in words:
        assert word in str(caught.value), str(caught.value)
    for task in vars(tasks).values():
        program = getattr(task, "_compiled_train_step", None)
        assert program is None or program._cache_size() == 0


def test_there_are_many():
    assert len(BAD) >= 250
