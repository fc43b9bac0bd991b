"""FedProx-FT: FedProx, and before each test every device fine-tunes a copy of the shared model on its own data.

Source: the baseline FedProx+FT of "A Closer Look at Personalization in Federated Image Classification" (RepPer);
FedProx is of Li et al., MLSys 2020.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: the tuned copy.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: as ``fedprox`` and ``fedavg_ft``. Fine-tuning knows no spring.
"""

from __future__ import annotations

from typing import ClassVar

from .base import Exactness
from .fedavg_ft import Method as FedAvgFT
from .fedavg_ft import Params as TuneParams
from .fedprox import Method as FedProx
from .fedprox import Params as ProxParams


class Params(TuneParams, ProxParams):
    """FedProx's and those of fine-tuning."""


class Method(FedAvgFT, FedProx):
    """FedProx whose devices test a fine-tuned copy."""

    Params = Params
    source = "Li et al., FedProx, MLSys 2020, with local fine-tuning"
    exactness: ClassVar[Exactness] = FedAvgFT.exactness
