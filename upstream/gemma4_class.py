"""Which class loads a Gemma 4 depends on the process."""

import subprocess
import sys

CODE = """
import keras_hub
from keras_hub.src.utils.preset_utils import find_subclass
models = keras_hub.models
found = find_subclass("x", models.CausalLM, models.Gemma4Backbone)
print(found.__name__)
"""
found = [
    subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True
    ).stdout.strip()
    for _ in range(6)
]
print(f"expected Gemma4CausalLM six times, found {found}")
