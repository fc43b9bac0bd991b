"""bn: the normalisation layers alone, their affine parameters and, of batch norm, their running statistics.

Source: Frankle, Schwab, Morcos, "Training BatchNorm and Only BatchNorm: On the Expressive Power of Random Features in
CNNs", ICLR 2021, for what these parameters alone can do.
Differs from the paper: the rest of the encoder is pretrained and not random.
"""

from __future__ import annotations

from torch import nn

from ..parts import NORM_LAYERS
from .base import Peft, tensors_of

_LAYERS = (*NORM_LAYERS, nn.LayerNorm, nn.GroupNorm)


class NormalisationOnly(Peft):
    """Everything is frozen but batch, layer and group norm."""

    needs = "normalisation layers with weights"
    source = "Frankle, Schwab, Morcos, ICLR 2021"

    def prepare(self, encoder: nn.Module) -> frozenset[str]:
        """Return the tensors of all normalisation layers."""
        paths = [path for path, layer in encoder.named_modules() if isinstance(layer, _LAYERS)]
        return tensors_of(encoder, paths)
