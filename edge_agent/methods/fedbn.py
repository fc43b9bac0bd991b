"""FedBN: FedAvg of everything but batch norm, which adapts to each device's own inputs.

Source: Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR
2021, Algorithm 1, and the authors' code.
Travels: encoder and head without batch norm layers, both ways.
Stays: batch norm's gamma, beta, means and variances; a device that misses rounds keeps those it has.
Server: uniform mean over the clients of the round.
Differs from the paper: batch norm is known by its type, the authors' code goes by names that contain "bn" and would
share ``downsample.1`` of a ResNet. An exported encoder has the pooled statistics of all clients.
"""

from __future__ import annotations

from pydantic import Field

from . import Method, MethodParams


class FedBNParams(MethodParams):
    """The authors' code."""

    batch_size: int = Field(32, ge=1, description="B; the authors' code: 32")


class FedBN(Method):
    """FedAvg whose batch norm layers never travel."""

    Params = FedBNParams
    norm = "local_all"
    weighting = "uniform"
    source = "Li et al., FedBN, ICLR 2021"
