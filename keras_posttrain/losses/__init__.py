from keras_posttrain.losses.advantages import (
    GDPOAdvantages,
    GroupAdvantages,
    LeaveOneOutAdvantages,
    PassAtKAdvantages,
    ReinforcePlusPlusAdvantages,
)
from keras_posttrain.losses.corrections import (
    ImportanceCorrection,
    OffPolicyMask,
    TopEntropyMask,
)
from keras_posttrain.losses.language_modeling import DFTLoss, SFTLoss
from keras_posttrain.losses.loss import Loss, TokenLoss
from keras_posttrain.losses.policy import (
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    GSPOTokenLoss,
    LUSPOLoss,
    PPOLoss,
    ReinforceLoss,
    SAPOLoss,
    VESPOLoss,
)
from keras_posttrain.losses.policy_loss import PolicyLoss
from keras_posttrain.losses.value import (
    ValueLoss,
    generalized_advantages,
    token_rewards,
    whiten,
)

__all__ = [
    "BNPOLoss",
    "CISPOLoss",
    "DAPOLoss",
    "DFTLoss",
    "DrGRPOLoss",
    "GDPOAdvantages",
    "GRPOLoss",
    "GSPOLoss",
    "GSPOTokenLoss",
    "GroupAdvantages",
    "ImportanceCorrection",
    "LUSPOLoss",
    "LeaveOneOutAdvantages",
    "Loss",
    "OffPolicyMask",
    "PPOLoss",
    "PassAtKAdvantages",
    "PolicyLoss",
    "ReinforceLoss",
    "ReinforcePlusPlusAdvantages",
    "SAPOLoss",
    "SFTLoss",
    "TokenLoss",
    "TopEntropyMask",
    "VESPOLoss",
    "ValueLoss",
    "generalized_advantages",
    "token_rewards",
    "whiten",
]
