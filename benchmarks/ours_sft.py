"""keras_posttrain: `SFTTask`, from a Hugging Face directory."""

import json
import pathlib
import tempfile
import time

import keras_posttrain as kpt  # sets the backend

# isort: split
import keras
import report
import workloads
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers


def write_preset(model, folder):
    """The model as a directory that transformers would load as well."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model.vocab,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": 2048,
        "pad_token_id": workloads.PAD,
        "bos_token_id": workloads.BOS,
        "eos_token_id": workloads.EOS,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model.weights(), folder / "model.safetensors", {"format": "pt"})
    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    words.update((f"t{i}", i) for i in range(workloads.FIRST, model.vocab))
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


class Clock(keras.callbacks.Callback):
    """The first step's loss and end, and the end of every epoch.

    Reading a loss waits for its step, which JAX only has begun.
    """

    def __init__(self):
        super().__init__()
        self.ends, self.steps = [], 0
        self.first_loss = None

    def on_train_batch_end(self, batch, logs=None):
        if self.first_loss is None:
            self.first_loss = float(logs["loss"])
            self.first_end = time.perf_counter()
        self.steps = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        float(logs["loss"])
        self.ends.append(time.perf_counter())


def main():
    args = report.arguments()
    with tempfile.TemporaryDirectory() as folder:
        write_preset(args.shape.model, pathlib.Path(folder))
        lora = kpt.LoRA(rank=workloads.LORA_RANK, alpha=workloads.LORA_ALPHA)
        task = kpt.SFTTask.from_preset(
            folder,
            lora=lora if args.lora else None,
            sequence_length=args.shape.length,
        )
    task.compile(
        optimizer=keras.optimizers.AdamW(
            workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
        )
    )
    rows = [
        {
            "token_ids": ids,
            "completion_mask": [0] * prompt + [1] * (len(ids) - prompt),
        }
        for ids, prompt in args.rows
    ]
    clock = Clock()
    start = time.perf_counter()
    # The first epoch is the warm-up.
    task.fit(
        rows,
        batch_size=args.shape.batch,
        epochs=1 + args.passes,
        packing=args.packing,
        shuffle=False,
        callbacks=[clock],
        verbose=0,
    )
    report.emit(
        args,
        ("keras", "keras-hub", "jax"),
        first_loss=clock.first_loss,
        first_step_s=clock.first_end - start,
        pass_s=[
            b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)
        ],
        steps=clock.steps,
    )


if __name__ == "__main__":
    main()
