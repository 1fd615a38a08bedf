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
from keras_posttrain.losses.f_divergences import (
    AlphaDivergence,
    ForwardKL,
    JensenShannon,
    ReverseKL,
)
from keras_posttrain.losses.language_modeling import DFTLoss, SFTLoss
from keras_posttrain.losses.loss import Loss, TokenLoss
from keras_posttrain.losses.pair_loss import (
    MarginLoss,
    PairLoss,
    ReferenceLoss,
)
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
from keras_posttrain.losses.preference import (
    AOTLoss,
    APODownLoss,
    APOZeroLoss,
    BCOPairLoss,
    DiscoPOPLoss,
    DPOLoss,
    ExoPairLoss,
    HingeLoss,
    IPOLoss,
    NCAPairLoss,
    RobustDPOLoss,
    SPPOHardLoss,
)
from keras_posttrain.losses.reference_free import (
    ChosenSFTLoss,
    CPOHingeLoss,
    CPOIPOLoss,
    CPOLoss,
    ORPOLoss,
    SimPOLoss,
)
from keras_posttrain.losses.reward_modeling import (
    BradleyTerryLoss,
)
from keras_posttrain.losses.sum_loss import (
    SumLoss,
)
from keras_posttrain.losses.unpaired import (
    APOZeroUnpairedLoss,
    KTOLoss,
    LabelledLoss,
)
from keras_posttrain.losses.value import (
    ValueLoss,
    generalized_advantages,
    token_rewards,
    whiten,
)

__all__ = [
    "AOTLoss",
    "APODownLoss",
    "APOZeroLoss",
    "APOZeroUnpairedLoss",
    "AlphaDivergence",
    "BCOPairLoss",
    "BNPOLoss",
    "BradleyTerryLoss",
    "CISPOLoss",
    "CPOHingeLoss",
    "CPOIPOLoss",
    "CPOLoss",
    "ChosenSFTLoss",
    "DAPOLoss",
    "DFTLoss",
    "DPOLoss",
    "DiscoPOPLoss",
    "DrGRPOLoss",
    "ExoPairLoss",
    "ForwardKL",
    "GDPOAdvantages",
    "GRPOLoss",
    "GSPOLoss",
    "GSPOTokenLoss",
    "GroupAdvantages",
    "HingeLoss",
    "IPOLoss",
    "ImportanceCorrection",
    "JensenShannon",
    "KTOLoss",
    "LUSPOLoss",
    "LabelledLoss",
    "LeaveOneOutAdvantages",
    "Loss",
    "MarginLoss",
    "NCAPairLoss",
    "ORPOLoss",
    "OffPolicyMask",
    "PPOLoss",
    "PairLoss",
    "PassAtKAdvantages",
    "PolicyLoss",
    "ReferenceLoss",
    "ReinforceLoss",
    "ReinforcePlusPlusAdvantages",
    "ReverseKL",
    "RobustDPOLoss",
    "SAPOLoss",
    "SFTLoss",
    "SPPOHardLoss",
    "SimPOLoss",
    "SumLoss",
    "TokenLoss",
    "TopEntropyMask",
    "VESPOLoss",
    "ValueLoss",
    "generalized_advantages",
    "token_rewards",
    "whiten",
]
