"""LG-FedAvg: personal encoders under one shared head, the opposite of FedPer.

Source: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated
Learning with Local and Global Representations", arXiv 2001.01523 (2020), Algorithm 1.
Travels: the head, both ways.
Stays: the encoder, all of it; so there is nothing to export for devices without torch.
Server: mean of the heads, weighted by sample counts.
Differs from the paper: one linear layer is shared. Training starts from scratch, as in the comparisons of DualFed and
FedPAC; the authors' scripts start from a FedAvg checkpoint, for which there is ``--weights``, with the encoder that
``headwater export --state SIMULATION --out encoder.safetensors`` takes out of one of FedAvg; the head starts fresh. A
new device is not answered by an ensemble of all.
"""

from __future__ import annotations

from ..core.task import State, Tensors
from . import Method


class LGFedAvg(Method):
    """FedAvg of the head alone."""

    shared = ("head",)
    source = "Liang et al., LG-FedAvg, arXiv 2001.01523"
    heads = ()

    def global_head(self, state: State) -> Tensors | None:
        """Return None: the shared head means nothing without a personal encoder."""
        return None
