"""The tiny preset loads like a downloaded one, and trains and generates."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt

ROWS = [
    {"prompt": f"{a} + {b} =", "completion": f" {a + b}"}
    for a in range(5)
    for b in range(5)
]
CHAT = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
]
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    return kpt.examples.tiny_preset(
        tmp_path_factory.mktemp("tiny") / "some" / "folder", ROWS, epochs=20
    )


def test_the_same_arguments_give_the_same_files(tmp_path):
    keras.utils.set_random_seed(0)
    first = kpt.examples.tiny_preset(tmp_path / "first", ROWS, epochs=2)
    keras.utils.set_random_seed(1)
    second = kpt.examples.tiny_preset(tmp_path / "second", ROWS, epochs=2)
    assert first == tmp_path / "first"
    assert set(contents(first)) == FILES
    assert contents(first) == contents(second)
    other = contents(kpt.examples.tiny_preset(tmp_path / "o", ROWS, seed=1))
    assert other["tokenizer.json"] == contents(first)["tokenizer.json"]
    assert other["model.safetensors"] != contents(first)["model.safetensors"]


def test_models_of_two_sizes_share_their_tokens(tmp_path):
    small = kpt.examples.tiny_preset(
        tmp_path / "small", ROWS, num_layers=1, hidden_dim=32
    )
    large = kpt.examples.tiny_preset(tmp_path / "large", ROWS)
    files = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
    for name in files:
        assert contents(small)[name] == contents(large)[name]
    tasks = [kpt.SFTTask.from_preset(path) for path in (small, large)]
    counts = [task.causal_lm.count_params() for task in tasks]
    assert counts[0] < 30_000 and 100_000 < counts[1] < 200_000


def test_tokenizer(preset):
    tokenizer = kpt.SFTTask.from_preset(preset).tokenizer
    assert tokenizer.vocabulary_size <= 515
    for text in ("3 + 4 = 7", "Grüße, 世界!", "  two\n\nlines\t", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # Digits are tokens of their own, as in Qwen3.
    assert len(tokenizer.encode("1234")) == 4
    (end,) = tokenizer.encode("<|im_end|>")
    assert tokenizer.eos_token_id == end
    assert end in tokenizer.stop_token_ids
    assert tokenizer.pad_token_id != end


def test_chat_template(preset):
    task = kpt.SFTTask.from_preset(preset)
    tool = {"type": "function", "function": {"name": "add"}}
    (example,), _ = task.prepare([{"messages": CHAT, "tools": [tool]}])
    ids, mask = example.token_ids, example.completion_mask
    decode = task.tokenizer.decode
    system, *chat = decode(ids, skip_special_tokens=False).split("<|im_end|>")
    assert system.startswith("<|im_start|>system\nTool: {")
    assert '"name": "add"' in system
    assert "<|im_end|>".join(chat) == (
        "\n<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n"
        "<|im_start|>assistant\nIt is 5.<|im_end|>\n"
    )
    trained = decode(ids[mask > 0], skip_special_tokens=False)
    assert trained == "It is 5.<|im_end|>"


def test_a_model_trained_on_its_rows_answers(preset):
    task = kpt.SFTTask.from_preset(preset, sequence_length=32)
    prompts = [row["prompt"] for row in ROWS]
    answers = task.generate(prompts, max_tokens=4, temperature=0)
    right = [a == row["completion"] for a, row in zip(answers, ROWS)]
    assert sum(right) > 20


def test_it_trains_and_exports(preset, tmp_path):
    task = kpt.SFTTask.from_preset(
        preset, lora=kpt.LoRA(rank=4), sequence_length=64
    )
    task.compile(optimizer=keras.optimizers.AdamW(1e-2))
    history = task.fit([{"messages": CHAT}], 1, epochs=60, verbose=0).history
    assert history["loss"][-1] < 1 < history["loss"][0]
    answer = task.generate(CHAT[:1], max_tokens=16, temperature=0)
    assert answer == "It is 5."
    task.export(tmp_path / "model")
    again = kpt.SFTTask.from_preset(tmp_path / "model")
    assert again.generate(CHAT[:1], max_tokens=16, temperature=0) == answer


def test_transformers_loads_it(preset):
    import torch
    import transformers

    task = kpt.SFTTask.from_preset(preset, sequence_length=32)
    text = "2 + 3 = 5, Grüße"
    theirs = transformers.AutoTokenizer.from_pretrained(preset)
    ids = theirs(text)["input_ids"]
    assert ids == task.tokenizer.encode(text)
    assert theirs.apply_chat_template(CHAT, tokenize=False).endswith(
        "assistant\nIt is 5.<|im_end|>\n"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(preset)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    expected = torch.log_softmax(logits.float(), -1)[0, :-1]
    expected = expected.gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()
    row = {"token_ids": ids, "completion_mask": [1] * len(ids)}
    found = task.log_probs([row])[0][1:]
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_rows_of_any_type_are_text(tmp_path):
    rows = [
        "lemon lemon",
        {"messages": [{"role": "user", "content": "apple apple"}]},
        {"prompt": "plum plum", "answer": 7, "accepted": ["pear", "pear"]},
    ]
    preset = kpt.examples.tiny_preset(tmp_path / "tiny", rows)
    tokenizer = kpt.Tokenizer.from_directory(preset)
    for word in ("lemon", "apple", "plum", "pear", "user"):
        assert len(tokenizer.encode(word)) == 1
    assert len(tokenizer.encode("grape")) > 1


def test_strings_are_texts_to_train_on(tmp_path):
    preset = kpt.examples.tiny_preset(
        tmp_path / "tiny", ["one two three", "one two four"], epochs=20
    )
    task = kpt.SFTTask.from_preset(preset, sequence_length=16)
    task.compile()
    assert task.evaluate([{"text": "one two three"}])["loss"] < 1


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"rows": []}, r"must hold text.*Received: rows=\[\]"),
        ({"rows": [{"prompt_ids": [1]}]}, "must hold text"),
        ({"rows": ROWS, "hidden_dim": 48}, "multiple of 32.*hidden_dim=48"),
        ({"rows": ROWS, "hidden_dim": 0}, "multiple of 32"),
    ],
)
def test_errors(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        kpt.examples.tiny_preset(tmp_path / "tiny", **kwargs)
    assert not (tmp_path / "tiny").exists()
