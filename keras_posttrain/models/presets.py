import keras_hub

from keras_posttrain.data.tokenizer import Tokenizer
from keras_posttrain.models import huggingface


def load_tokenizer(preset):
    """The tokenizer of a preset.

    Args:
        preset: as in KerasHub's `from_preset`.

    Returns:
        `Tokenizer`: the directory's own `tokenizer.json` where there is one,
        else KerasHub's tokenizer in its form.
    """
    directory = huggingface.resolve(preset)
    if directory is not None:
        return Tokenizer.from_directory(directory)
    return Tokenizer.from_keras_hub(
        keras_hub.models.Tokenizer.from_preset(str(preset))
    )
