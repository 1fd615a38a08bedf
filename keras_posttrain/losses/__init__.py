from keras_posttrain.losses.language_modeling import DFTLoss
from keras_posttrain.losses.language_modeling import SFTLoss
from keras_posttrain.losses.loss import Loss
from keras_posttrain.losses.loss import TokenLoss

__all__ = ["DFTLoss", "Loss", "SFTLoss", "TokenLoss"]
