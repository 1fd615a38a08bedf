"""Real vLLM in the trainer's process (`make test-vllm`)."""

import importlib.util

import keras
import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import Request, VLLMRollout
from keras_posttrain.rollout.vllm_local import LocalEngine
from keras_posttrain.rollout.vllm_worker import RolloutWorkerExtension
from tests.rollout import contract
from tests.support import REFERENCE, read_log

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
    ),
    # What vLLM's and torch's own files warn of.
    pytest.mark.filterwarnings("ignore"),
]


def llama(tied):
    """A Llama with heads of a size that vLLM's CPU kernels know."""
    keras.utils.set_random_seed(3)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=512,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=64,
        intermediate_dim=96,
        tie_word_embeddings=tied,
    )
    return noisy(keras_hub.models.Llama3CausalLM(backbone))


def qwen2():
    keras.utils.set_random_seed(4)
    backbone = keras_hub.models.QwenBackbone(
        vocabulary_size=512,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=64,
        intermediate_dim=96,
        tie_word_embeddings=True,
    )
    return noisy(keras_hub.models.QwenCausalLM(backbone))


def noisy(causal_lm):
    """Weights so large that their order in a tensor shows in the logits."""
    rng = np.random.default_rng(5)
    for variable in causal_lm.trainable_variables:
        noise = rng.normal(0, 0.1, variable.shape)
        variable.assign_add(noise.astype("float32"))
    return causal_lm


MODELS = {
    "llama": lambda: llama(False),
    "llama_tied": lambda: llama(True),
    "qwen2": qwen2,
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}


def make(model, lora=False, task=kpt.GRPOTask, **kwargs):
    settings = {"sequence_length": 64, **kwargs}
    if lora:
        settings["lora"] = kpt.LoRA(rank=4)
    made = MODELS[model]
    if callable(made):
        return task(made(), None, **settings)
    made = task.from_preset(REFERENCE / "models" / made, **settings)
    made.tokenizer = None
    return made


def odd(completions):
    return [sum(x % 2 for x in ids) / len(ids) for ids in completions]


def prompts(count):
    rng = np.random.default_rng(0)
    return [
        {"prompt_ids": rng.integers(3, 500, 4 + i % 3).tolist()}
        for i in range(count)
    ]


class Compared(keras.callbacks.Callback):
    """After each step: the engine's log-probs are the trainer's."""

    def __init__(self, engine):
        super().__init__()
        self.engine, self.gaps, self.logps, self.logs = engine, [], [], []

    def compare(self):
        requests = [
            Request([7, 100, 5, 20 + i], 2, max_tokens=20, seed=i)
            for i in range(2)
        ]
        out = self.engine.generate(requests)
        rows = []
        for request, samples in zip(requests, out):
            for c in samples:
                ids = [*request.token_ids, *c.token_ids]
                mask = [1] * len(ids)
                rows.append({"token_ids": ids, "completion_mask": mask})
        found = np.concatenate(
            [c.per_token_logps for samples in out for c in samples]
        )
        expected = np.concatenate(
            [logps[4:] for logps in self.model.log_probs(rows)]
        )
        self.gaps.append(float(np.abs(found - expected).max()))
        [score] = self.engine.score([[7, 100, 5, 20, 300]])
        self.logps.append(score.per_token_logps)

    def on_epoch_begin(self, epoch, logs=None):
        if not self.gaps:
            self.compare()

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))
        self.compare()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("model", MODELS)
def test_the_weights_are_the_trainers(model, lora):
    """At step 0 and after each of 5 steps of GRPO: 1e-4, measured 3e-5."""
    task, engine = make(model, lora), VLLMRollout(timeout=120)
    task.compile(
        optimizer=keras.optimizers.SGD(3.0 if lora else 0.3),
        loss=kpt.losses.GRPOLoss(beta=0.0),
        rewards=[odd],
        rollout=engine,
        num_generations=4,
        max_completion_length=6,
        max_grad_norm=None,
    )
    compared = Compared(engine)
    task.fit(prompts(10), batch_size=2, callbacks=[compared], verbose=0)
    assert len(compared.gaps) == 6
    assert max(compared.gaps) < 1e-4
    # The steps were no empty ones.
    for before, after in zip(compared.logps, compared.logps[1:]):
        assert np.abs(after - before).max() > 1e-4
    assert compared.logs[0]["vllm/restarts"] == 0
    sizes = {logs["vllm/sync_bytes"] for logs in compared.logs}
    if lora:
        variables = task.trainable_variables
        adapter = sum(4 * int(np.prod(v.shape)) for v in variables)
        [moved] = sizes
        # Names and shapes are in the file too.
        assert adapter < moved < adapter + 20_000
    else:
        assert sizes == {4.0 * task.causal_lm.backbone.count_params()}
    assert engine._engine is None
