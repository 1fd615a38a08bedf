from typing import TYPE_CHECKING

from keras_posttrain import _lazy_imports

if TYPE_CHECKING:
    from keras_posttrain.rewards.answers import (
        ExactMatchReward,
        MathReward,
        NumericReward,
    )
    from keras_posttrain.rewards.formats import RegexReward, ThinkFormatReward
    from keras_posttrain.rewards.isolated import Isolated
    from keras_posttrain.rewards.judges import JudgeReward, ModelReward
    from keras_posttrain.rewards.lengths import (
        CosineLengthReward,
        LengthReward,
        RepetitionReward,
        SoftOverlongReward,
    )
    from keras_posttrain.rewards.reward import Reward, completion_text
    from keras_posttrain.rewards.run import check_rewards, run_rewards

__all__ = [
    "CosineLengthReward",
    "ExactMatchReward",
    "Isolated",
    "JudgeReward",
    "LengthReward",
    "MathReward",
    "ModelReward",
    "NumericReward",
    "RegexReward",
    "RepetitionReward",
    "Reward",
    "SoftOverlongReward",
    "ThinkFormatReward",
    "check_rewards",
    "completion_text",
    "run_rewards",
]

__getattr__, __dir__ = _lazy_imports.attach(__name__)
