"""FedAvg: one model for all, the mean of what every device has trained.

Source: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Algorithm 1.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: nothing but the batch counters of batch norm layers.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: a last batch of one sample joins the batch before it.
"""

from __future__ import annotations

from . import Method, grades


class FedAvg(Method):
    """E epochs of SGD on everything, then the mean weighted by sample counts: all defaults of `Method`."""

    source = "McMahan et al., AISTATS 2017"
    exactness = grades(
        mlp=("approximate", "FedAvg has no personal part; one linear layer of the device's own on its frozen encoder")
    )
