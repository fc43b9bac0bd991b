"""Encoders of texts: windows of one channel whose values are the positions of characters in an alphabet.

`char_cnn` is small and fast. `char_lstm` is LEAF's own network, for comparisons with others: a device runs it, too, but
its memory cells stay float32 in the int8 variant of a bundle.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from ..core.errors import ConfigError
from ..core.task import Frozen, Task
from .base import encoder


class CharLSTMParams(Frozen):
    """Parameters of `char_lstm`."""

    characters: int = Field(80, ge=2, le=4096, description="characters of the alphabet")
    embedding: int = Field(8, ge=1, le=1024, description="numbers that stand for a character")
    feature_dim: int = Field(256, ge=1, le=4096, description="width of the answer and of each layer, d")
    layers: int = Field(2, ge=1, le=8, description="layers of memory cells")


def _positions(windows: torch.Tensor, characters: int) -> torch.Tensor:
    """Return positions (n, length, channels) int64 of windows (n, channels, length), which are whole numbers as floats.

    Random inputs of a self-test may lie outside of the alphabet: an index must not.
    """
    return (windows.transpose(1, 2) + 0.5).clamp(0.0, characters - 0.5).long()


def _check_not_normalised(task: Task) -> None:
    """Check that the inputs of a task are still positions.

    Raises:
        ConfigError: They are normalised.
    """
    spec = task.input
    if set(spec.mean) != {0.0} or set(spec.std) != {1.0}:
        mistake = f"task.input has mean {spec.mean} and std {spec.std}, expected 0 and 1: leave --standardise out"
        raise ConfigError(f"encoder '{task.encoder}'", [mistake])


class CharCNNParams(Frozen):
    """Parameters of `char_cnn`."""

    characters: int = Field(80, ge=2, le=4096, description="characters of the alphabet")
    embedding: int = Field(16, ge=1, le=1024, description="numbers that stand for a character")
    width: int = Field(64, ge=1, le=1024, description="channels of each stage")
    feature_dim: int = Field(256, ge=1, le=4096, description="width of the answer, d")


class _Stages(nn.Module):
    """Looks characters up, and gives features of where in the text which groups of them are."""

    def __init__(self, channels: int, length: int, params: CharCNNParams) -> None:
        super().__init__()
        self.feature_dim = params.feature_dim
        self._characters = params.characters
        self.embedding = nn.Embedding(params.characters, params.embedding)
        layers: list[nn.Module] = []
        width = channels * params.embedding
        while length > 8 or not layers:
            conv = nn.Conv1d(width, params.width, 5, padding=2, bias=False)
            layers += [conv, nn.BatchNorm1d(params.width), nn.ReLU(), nn.MaxPool1d(2)]
            width = params.width
            length //= 2
        layers += [nn.Flatten(), nn.Linear(width * length, params.feature_dim), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Features (n, feature_dim) of positions (n, channels, length)."""
        characters = self.embedding(_positions(windows, self._characters)).flatten(2)
        features: torch.Tensor = self.layers(characters.transpose(1, 2))
        return features


@encoder("window", smallest=4, params=CharCNNParams)
def char_cnn(task: Task, params: CharCNNParams) -> nn.Module:
    """Return a convolutional network for texts: an embedding of 16, stages as in `small_cnn`, and 256 features.

    Stages of convolution over five characters, batch norm, ReLU and halving down to 8 steps or less; then one linear
    layer on all of them, because the last characters say most about the next one.

    Raises:
        ConfigError: The inputs are normalised, so that they are no positions any more.
    """
    _check_not_normalised(task)
    return _Stages(task.input.channels, task.input.shape[1], params)


class _LastState(nn.Module):
    """Looks characters up, reads them one after another, and gives what the last layer holds at the end."""

    def __init__(self, channels: int, params: CharLSTMParams) -> None:
        super().__init__()
        self.feature_dim = params.feature_dim
        self._characters = params.characters
        self.embedding = nn.Embedding(params.characters, params.embedding)
        width = channels * params.embedding
        self.memory = nn.LSTM(width, params.feature_dim, params.layers, batch_first=True)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Features (n, feature_dim) of positions (n, channels, length)."""
        characters = self.embedding(_positions(windows, self._characters)).flatten(2)
        states, _ = self.memory(characters)
        features: torch.Tensor = states[:, -1]
        return features


@encoder("window", params=CharLSTMParams)
def char_lstm(task: Task, params: CharLSTMParams) -> nn.Module:
    """Return the network of LEAF for Shakespeare: an embedding of 8 and two layers of 256 LSTM cells, 800,000 weights.

    Texts have one channel; of several, the embeddings of one step lie side by side. The last layer of LEAF's network,
    which names the next character, is the classifier here.
    Source: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018; its code, models/shakespeare.

    Raises:
        ConfigError: The inputs are normalised, so that they are no positions any more.
    """
    _check_not_normalised(task)
    return _LastState(task.input.channels, params)
