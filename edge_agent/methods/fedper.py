"""FedPer: a shared encoder under personal heads, both trained together.

Source: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 1912.00818
(2019).
Travels: the encoder, both ways, batch norm statistics included.
Stays: the head; a device that misses rounds keeps the one it has.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: one linear layer is personal (the paper also tries more layers).
"""

from __future__ import annotations

from . import Method, grades


class FedPer(Method):
    """FedAvg of the encoder alone."""

    shared = ("encoder",)
    source = "Arivazhagan et al., arXiv 1912.00818"
    exactness = grades(mlp=("same form", "one linear layer from random weights; FedPer trains it with the encoder"))
