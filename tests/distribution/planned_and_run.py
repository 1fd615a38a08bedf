"""On eight CPU devices: what a plan says is there is what a run allocates."""

import keras

import keras_posttrain as kpt
from tests.support import REFERENCE, random_rows

LLAMA = REFERENCE / "models" / "llama3"


def on_first_device(variables):
    return sum(v.value.addressable_shards[0].data.nbytes for v in variables)


def main():
    for lora in (None, kpt.LoRA(rank=4)):
        settings = {"sequence_length": 64, "lora": lora, "dtype": "bfloat16"}
        keras.distribution.set_distribution(None)
        with kpt.distribution.shapes_only():
            planned = kpt.SFTTask.from_preset(
                LLAMA, load_weights=False, **settings
            )
        planned.compile(keras.optimizers.AdamW(1e-3))
        plan = planned.plan("cpu:8", batch_size=8)
        keras.distribution.set_distribution(kpt.distribution.fsdp())
        task = kpt.SFTTask.from_preset(LLAMA, **settings)
        task.compile(keras.optimizers.AdamW(1e-3))
        task.fit(random_rows(8), batch_size=8, verbose=0)
        for name, variables in (
            ("weights", task.variables),
            ("optimizer", task.optimizer.variables),
        ):
            expected = on_first_device(variables)
            assert plan.arguments[name] == expected, (name, plan, expected)
    print("equal")


main()
