"""Plans of fine-tuning on TPU pods, from the TPU's compiler.

    python benchmarks/scale.py                  # all, some hours
    python benchmarks/scale.py --only 'llama.*full.*v5e' --list

Nothing is trained and no TPU is needed. Each run is a `task.plan` in a
separate process, whose time and memory are recorded too. Every chip has one
row of 4,096 tokens per step; with a model axis, two chips have one. The table
is written to `results/scale.md` and the figures to `results/scale.json`;
figures of runs that are not selected are kept.
"""

import argparse
import functools
import json
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).parent
LENGTH = 4096
SHARED = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Sizes from the models' `config.json` files.
MODELS = {
    "llama3-8b": {
        **SHARED,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
    },
    "gemma2-9b": {
        **SHARED,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "vocab_size": 256000,
        "num_hidden_layers": 42,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 16,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **SHARED,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
    },
    "qwen3-32b": {
        **SHARED,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
    },
    "llama3-70b": {
        **SHARED,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
    },
}
# Mixtures.
MODELS |= {
    "qwen3-30b-a3b": {
        **MODELS["qwen3-8b"],
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
MODELS["qwen3-235b-a22b"] = {
    **MODELS["qwen3-30b-a3b"],
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
}
V5E = ("v5e:4x4", "v5e:8x8", "v5e:16x16")
V5P = ("v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8")


def all_runs():
    """Returns names `model/mode/topology`, some with `/exact`."""
    runs = [
        f"{model}/{mode}/{topology}"
        for model in ("llama3-8b", "gemma2-9b", "qwen3-8b")
        for mode in ("full", "lora")
        for topology in V5E + V5P
    ]
    runs += ["llama3-8b/lora/v5e:2x2", "qwen3-32b/lora/v5e:4x8"]
    # All layers are compiled here; the other runs extrapolate from two depths.
    exact = [
        *(f"llama3-8b/full/{topology}/exact" for topology in V5E[:2]),
        "llama3-8b/full/v5p:2x2x4/exact",
        "gemma2-9b/full/v5e:4x4/exact",
    ]
    # Adapters on bases in eight or four bits.
    quantized = [
        "llama3-8b/int8/v5e:1x1",
        "llama3-8b/int4/v5e:1x1",
        "llama3-8b/nf4/v5e:1x1",
        "llama3-8b/int4/v5e:1x1/exact",
        "qwen3-32b/int4/v5e:2x2/exact",
        "qwen3-32b/int8/v5e:2x4/exact",
        "qwen3-32b/int4/v5e:2x4/exact",
        "llama3-70b/int4/v5e:4x4/exact",
    ]
    # Experts over groups of chips, and as FSDP alone has them.
    mixtures = [
        "qwen3-30b-a3b/full/v5p:2x4x4",
        "qwen3-30b-a3b/full-experts8/v5p:2x4x4",
        "qwen3-30b-a3b/full-experts8/v6e:4x8",
        "qwen3-235b-a22b/full-experts16/v5p:4x4x8",
        "qwen3-235b-a22b/full-experts16/v6e:16x16",
    ]
    # With a model axis, which splits the work and the tokens of each layer.
    tensor = [
        "llama3-70b/lora-model4/v6e:8x8",
        "llama3-70b/lora-model4-selective/v6e:8x8",
    ]
    return runs + exact + quantized + mixtures + tensor


def chips(topology):
    """Returns the number of chips of a topology."""
    sizes = topology.split(":")[1].split("x")
    count = 1
    for size in sizes:
        count *= int(size)
    return count


def plan(name):
    """Plans a run in this process; returns its figures."""
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    import keras_posttrain as kpt

    model, mode, topology, *exact = name.split("/")
    mode, *settings = mode.split("-")
    remat, rows = "full", chips(topology)
    strategy = kpt.distribution.fsdp
    for setting in settings:
        if setting.startswith("experts"):
            experts = int(setting.removeprefix("experts"))
            strategy = functools.partial(strategy, experts=experts)
        elif setting.startswith("model"):
            rows //= 2
            strategy = functools.partial(
                kpt.distribution.fsdp_tensor_parallel,
                model=int(setting.removeprefix("model")),
            )
        else:
            remat = setting
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps(MODELS[model]))
        with kpt.distribution.shapes_only():
            task = kpt.SFTTask.from_preset(
                folder,
                load_weights=False,
                dtype="bfloat16",
                sequence_length=LENGTH,
                remat=remat,
                lora=None if mode == "full" else kpt.LoRA(rank=16),
                quantize=None if mode in ("full", "lora") else mode,
            )
    task.compile(keras.optimizers.AdamW(1e-5))
    found = task.plan(topology, strategy, batch_size=rows, exact=bool(exact))
    print(found, file=sys.stderr)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "run": name,
        "chips": chips(topology),
        "parameters": found.parameters,
        "trainable": found.trainable_parameters,
        "fits": found.fits,
        "needed_bytes": found.needed,
        "capacity_bytes": found.capacity,
        "state_bytes": sum(found.arguments.values()),
        "flops": found.flops,
        "model_flops": found.model_flops,
        "collective_bytes": found.collective_bytes,
        "ideal_bytes": found.ideal_bytes,
        "tokens": found.tokens,
        "step_seconds": found.step_seconds,
        "tokens_per_second": found.tokens_per_second,
        "plan_seconds": time.perf_counter() - start,
        "plan_rss_bytes": usage.ru_maxrss * 1024,
    }


HEAD = (
    "run | chips | GiB per chip | of which state | fits | "
    "bytes sent / ideal | model FLOPs | step, s | tokens/s | "
    "tokens/s per chip | plan, s | plan, GiB"
)


def table(records):
    """Returns a Markdown table with a line per run."""
    lines = [f"| {HEAD} |", "|" + "---|" * (HEAD.count("|") + 1)]
    for r in records:
        gib = 2.0**30
        cells = [
            r["run"],
            str(r["chips"]),
            f"{r['needed_bytes'] / gib:.2f} of "
            f"{r['capacity_bytes'] / gib:.2f}",
            f"{r['state_bytes'] / gib:.2f}",
            "yes" if r["fits"] else "no",
        ]
        if r["step_seconds"] is None:
            cells += ["-"] * 5
        else:
            cells += [
                f"{r['collective_bytes'] / r['ideal_bytes']:.2f}"
                if r["ideal_bytes"]
                else "-",
                f"{r['model_flops'] / r['flops']:.0%}",
                f"{r['step_seconds']:.2f}",
                f"{r['tokens_per_second']:,.0f}",
                f"{r['tokens_per_second'] / r['chips']:,.0f}",
            ]
        cells += [
            f"{r['plan_seconds']:.0f}",
            f"{r['plan_rss_bytes'] / gib:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="regex of runs")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "results")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(plan(arguments.run)))
        return
    names = [n for n in all_runs() if re.search(arguments.only, n)]
    if arguments.list:
        print("\n".join(names))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    kept = arguments.out / "scale.json"
    records = {}
    if kept.exists():
        records = {r["run"]: r for r in json.loads(kept.read_text())}
    for name in names:
        print(f"== {name}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, __file__, "--run", name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        records[name] = json.loads(done.stdout.splitlines()[-1])
        # Written after each run, so that stopping the script loses nothing.
        found = [records[n] for n in all_runs() if n in records]
        kept.write_text(json.dumps(found, indent=1) + "\n")
        (arguments.out / "scale.md").write_text(table(found))
    print(table([records[name] for name in names]))


if __name__ == "__main__":
    main()
