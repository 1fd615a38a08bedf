from keras_posttrain.losses.language_modeling import DFTLoss, SFTLoss
from keras_posttrain.losses.loss import Loss, TokenLoss

__all__ = ["DFTLoss", "Loss", "SFTLoss", "TokenLoss"]
