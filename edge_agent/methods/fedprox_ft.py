"""FedProx-FT: FedProx, and before each test every device fine-tunes a copy of the shared model on its own data.

Source: the baseline FedProx+FT of "A Closer Look at Personalization in Federated Image Classification" (RepPer);
FedProx is of Li et al., MLSys 2020.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: the tuned copy.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: as ``fedprox`` and ``fedavg_ft``. Fine-tuning has no proximal term.
"""

from __future__ import annotations

from .fedavg_ft import FedAvgFT, FedAvgFTParams
from .fedprox import FedProx, FedProxParams


class FedProxFTParams(FedAvgFTParams, FedProxParams):
    """FedProx's and those of fine-tuning."""


class FedProxFT(FedAvgFT, FedProx):
    """FedProx whose devices test a fine-tuned copy."""

    Params = FedProxFTParams
    source = "Li et al., FedProx, MLSys 2020, with local fine-tuning"
