"""A task under lm-evaluation-harness equals its `hf` backend."""

import json
import sys

import keras
import numpy as np
import pytest
import tokenizers
import transformers

import keras_posttrain as kpt
from keras_posttrain.data.chat import conversion
from tests.models.tiny_checkpoints import make_checkpoint

lm_eval = pytest.importorskip("lm_eval")

WORDS = "the cat sat on a mat. A dog ran; does it run? yes it does\n\n no "
PAIRS = [
    ("the cat", " sat"),
    ("the cat ", "sat on"),
    ("a do", "g ran"),
    ("", "the mat"),
    ("a dog ran " * 40, "yes it does"),
    ("it", " does. A dog"),
    ("the cat", " sat"),
]
PROMPTS = ["the cat", "does it run?", "a dog ran " * 40, "the cat", "mat."]
ARGUMENTS = [
    {"until": ["a"], "max_gen_toks": 40},
    {"until": ["\n\n", "do"], "max_gen_toks": 33, "do_sample": False},
    {"until": "e", "max_new_tokens": 12, "temperature": 0.0},
]


def make_tokenizer(directory, with_bos):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = conversion.split_words(conversion.QWEN_SPLIT)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [WORDS] * 4,
        tokenizers.trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, show_progress=False
        ),
    )
    backend.add_special_tokens(["<eos>", "<bos>"])
    names = {"eos_token": "<eos>", "pad_token": "<eos>"}
    if with_bos:
        names["bos_token"] = "<bos>"
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A",
            special_tokens=[("<bos>", backend.token_to_id("<bos>"))],
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **names
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return backend.get_vocab_size()


def make_task(directory, family, with_bos, layers=1, **settings):
    source = directory / "source"
    if not source.exists():
        vocabulary = make_tokenizer(directory / "tokenizer", with_bos)
        make_checkpoint(
            source,
            family,
            num_hidden_layers=layers,
            vocab_size=vocabulary + 2,
            bos_token_id=None,
            eos_token_id=vocabulary - 2,
        )
    return kpt.SFTTask.from_preset(
        source,
        tokenizer=str(directory / "tokenizer"),
        sequence_length=64,
        **settings,
    )


def instances(pairs):
    from lm_eval.api.instance import Instance

    return [
        Instance("loglikelihood", {}, args, i) for i, args in enumerate(pairs)
    ]


def reference(path):
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(path), dtype="float32", batch_size=1, device="cpu")


def check_equal(found, wanted):
    values = [x[0] for x in found], [x[0] for x in wanted]
    np.testing.assert_allclose(*values, atol=1e-4, rtol=0)
    assert [x[1] for x in found] == [x[1] for x in wanted]


CASES = [
    pytest.param("llama", True, None, id="llama"),
    pytest.param("qwen3", False, 4, id="qwen3-lora"),
    pytest.param("gemma2", True, None, id="gemma2", marks=pytest.mark.full),
    pytest.param(
        "gemma3_text", True, None, id="gemma3", marks=pytest.mark.full
    ),
]


@pytest.mark.parametrize("family, with_bos, rank", CASES)
def test_results_are_those_of_the_hf_backend(tmp_path, family, with_bos, rank):
    lora = None if rank is None else kpt.LoRA(rank=rank)
    layers = 2 if family in ("llama", "qwen3") else 3
    task = make_task(tmp_path, family, with_bos, layers, lora=lora)
    rng = np.random.default_rng(0)
    for b in task.adapter.b if lora else ():
        b.assign(rng.normal(0, 0.2, b.shape).astype("float32"))
    task.export(tmp_path / "export")
    ours, theirs = kpt.evaluation.lm_eval(task), reference(tmp_path / "export")
    assert ours.max_length == theirs.max_length == 128
    wanted = theirs.loglikelihood(instances(PAIRS))
    check_equal(ours.loglikelihood(instances(PAIRS)), wanted)
    check_equal(ours.loglikelihood(instances(PAIRS[::-1])), wanted[::-1])
    texts = instances([("the cat",), ("a dog ran; " * 60,)])
    np.testing.assert_allclose(
        ours.loglikelihood_rolling(texts),
        theirs.loglikelihood_rolling(texts),
        atol=5e-4,
        rtol=1e-6,
    )
    asked = [(p, dict(a)) for a in ARGUMENTS for p in PROMPTS]
    answers = ours.generate_until(instances(asked))
    assert answers == theirs.generate_until(instances(asked))
    # What the model says of its own words is greedy.
    own = [(p, a) for (p, _), a in zip(asked, answers) if a][:2]
    wanted = theirs.loglikelihood(instances(own))
    check_equal(ours.loglikelihood(instances(own)), wanted)
    history = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat on"},
    ]
    for begins in (True, False):
        assert ours.apply_chat_template(
            history, begins
        ) == theirs.apply_chat_template(history, begins)


def test_eight_devices_are_one(tmp_path, eight_devices):
    one = kpt.evaluation.lm_eval(make_task(tmp_path, "llama", True))
    asked = [(p, {"until": ["a"], "max_gen_toks": 40}) for p in PROMPTS]
    wanted = one.loglikelihood(instances(PAIRS))
    answers = one.generate_until(instances(asked))
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    eight = kpt.evaluation.lm_eval(make_task(tmp_path, "llama", True))
    check_equal(eight.loglikelihood(instances(PAIRS)), wanted)
    assert eight.generate_until(instances(asked)) == answers


def test_a_local_task_runs_before_and_after_training(tmp_path):
    task = make_task(tmp_path, "qwen3", False)
    rows = [
        {"q": "the cat", "choices": [" sat", " ran"], "answer": i % 2}
        for i in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    data = {"test": str(tmp_path / "rows.jsonl")}
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": data},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choice = common | {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }
    answer = common | {
        "task": "answer",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean"}],
    }
    model = kpt.evaluation.lm_eval(task)
    assert model.tokenizer_name == "tokenizer"

    # Without the harness's own tasks, thousands of files that it would read.
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)

    def run():
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=[choice, answer],
            task_manager=manager,
            bootstrap_iters=100,
        )
        return found["results"]

    before = run()
    assert before["choice"]["acc,none"] == 0.5
    assert before["choice"]["acc_stderr,none"] == pytest.approx(0.2236, 1e-3)
    assert before["answer"]["exact_match,none"] == 0.0
    task.compile(keras.optimizers.Adam(0.01))
    text = [{"prompt": "the cat", "completion": " sat"}] * 8
    first = task.fit(text, batch_size=8, epochs=10, verbose=0)
    after = run()
    assert after["answer"]["exact_match,none"] == 0.5
    second = task.fit(text, batch_size=8, epochs=1, verbose=0)
    assert second.history["loss"][-1] < first.history["loss"][0]


def test_weights_are_sent_once(tmp_path):
    task = make_task(tmp_path, "llama", True)
    engine = kpt.rollout.NativeRollout()
    model = kpt.evaluation.lm_eval(task, engine=engine)
    before = model.loglikelihood(instances(PAIRS))
    model.loglikelihood(instances(PAIRS[:1]))
    assert engine.weight_version == 1
    kernel = task.trainable_variables[0]
    kernel.assign(kernel.value * 1.5)
    assert model.loglikelihood(instances(PAIRS)) != before
    assert engine.weight_version == 2


def test_samples_hang_on_the_harnesss_seed(tmp_path):
    model = kpt.evaluation.lm_eval(make_task(tmp_path, "llama", True))
    arguments = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 40}
    asked = instances([("the cat", arguments)] * 3)
    found = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        found.append(model.generate_until(asked))
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) == 3


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"num_beams": 4}, "num_beams"),
        ({"do_sample": True}, "needs a positive `temperature`"),
        ({"max_gen_toks": 500}, "must leave room"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path, arguments, words):
    model = kpt.evaluation.lm_eval(make_task(tmp_path, "llama", True))
    with pytest.raises(ValueError, match=words):
        model.generate_until(instances([("the cat", arguments)]))


def test_bad_arguments(tmp_path, monkeypatch):
    task = make_task(tmp_path, "llama", True)
    for arguments in (
        {"max_length": 1000},
        {"max_length": 0},
        {"engine": "vllm"},
        {"think_end_token": 3},
    ):
        with pytest.raises(ValueError, match="Received"):
            kpt.evaluation.lm_eval(task, **arguments)
    with pytest.raises(ValueError, match="token of its own"):
        kpt.evaluation.lm_eval(task).loglikelihood(instances([("the", "")]))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ImportError, match="lm-eval"):
        kpt.evaluation.lm_eval(task)
