"""Encoders that are networks of torchvision, without their classifiers and without pretrained weights.

Their parameters have torchvision's names, so that weights for these networks can be loaded (``run.weights``). Those of
ImageNet expect colours of 224 x 224 pixels with mean 0.485, 0.456, 0.406 and deviation 0.229, 0.224, 0.225.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from ..core.errors import ConfigError
from ..core.task import Frozen, Task
from ._torchvision import import_torchvision
from .base import encoder


class StemParams(Frozen):
    """Parameters of encoders that were made for large images."""

    stem: Literal["imagenet", "small"] = Field(
        "imagenet", description="'small' keeps the size of small images: better features, 4 to 15x the work"
    )


@encoder("image", smallest=32, params=StemParams)
def resnet18(task: Task, params: StemParams) -> nn.Module:
    """ResNet18 of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016: 512 features."""
    return _resnet(task, "resnet18", params)


@encoder("image", smallest=32, params=StemParams)
def resnet34(task: Task, params: StemParams) -> nn.Module:
    """ResNet34 of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016: 512 features."""
    return _resnet(task, "resnet34", params)


@encoder("image", smallest=32, params=StemParams)
def resnet50(task: Task, params: StemParams) -> nn.Module:
    """ResNet50 of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016: 2048 features."""
    return _resnet(task, "resnet50", params)


@encoder("image", smallest=32, params=StemParams)
def mobilenet_v2(task: Task, params: StemParams) -> nn.Module:
    """MobileNetV2 of Sandler et al., "Inverted Residuals and Linear Bottlenecks", CVPR 2018: 1280 features."""
    return _mobilenet(task, "mobilenet_v2", params, 1280)


@encoder("image", smallest=32, params=StemParams)
def mobilenet_v3_small(task: Task, params: StemParams) -> nn.Module:
    """MobileNetV3-small of Howard et al., "Searching for MobileNetV3", ICCV 2019: 576 features."""
    return _mobilenet(task, "mobilenet_v3_small", params, 576)


@encoder("image", smallest=32, params=StemParams)
def mobilenet_v3_large(task: Task, params: StemParams) -> nn.Module:
    """MobileNetV3-large of Howard et al., "Searching for MobileNetV3", ICCV 2019: 960 features."""
    return _mobilenet(task, "mobilenet_v3_large", params, 960)


@encoder("image", smallest=32, params=StemParams)
def efficientnet_b0(task: Task, params: StemParams) -> nn.Module:
    """EfficientNet-B0 of Tan and Le, "EfficientNet", ICML 2019: 1280 features.

    No block is left out at random, which is meant for longer training than a federation's.
    """
    return _mobilenet(task, "efficientnet_b0", params, 1280, stochastic_depth_prob=0.0)


class VisionTransformerParams(Frozen):
    """Parameters of `vit`."""

    patch: int = Field(16, ge=2, le=64, description="pixels of a side of a patch; 4 suits images of 32")
    width: int = Field(192, ge=32, le=1024, multiple_of=32, description="features, and numbers for each patch")
    depth: int = Field(12, ge=1, le=48, description="layers")
    heads: int = Field(3, ge=1, le=32, description="heads of attention; width has to be a multiple of it")


@encoder("image", smallest=16, params=VisionTransformerParams)
def vit(task: Task, params: VisionTransformerParams) -> nn.Module:
    """Vision transformer of Dosovitskiy et al., ICLR 2021, in the sizes of DeiT (Touvron et al., ICML 2021).

    The defaults are those of DeiT-tiny (5.5 million weights, 192 features); width 384 with 6 heads is DeiT-small. The
    features are the first token of the last layer, normalised. Images are square and whole patches.
    """
    _, height, width = task.input_shape
    mistakes = list[str]()
    if height != width or height % params.patch:
        mistakes.append(
            f"inputs of {height} x {width}, expected a square of whole patches of {params.patch}; change task.input or "
            "encoder_params.patch"
        )
    if params.width % params.heads:
        mistakes.append(f"width is {params.width}, expected a multiple of heads, {params.heads}")
    if mistakes:
        raise ConfigError("encoder 'vit'", mistakes)
    network: nn.Module = _VisionTransformer(task, params)
    return network


class _VisionTransformer(nn.Module):
    """The parts of torchvision's transformer under their names, computed by operators that every device has.

    torchvision's own way to compute attention, and to repeat the first token for each image, becomes operators on
    shapes that devices do not have.
    """

    order: torch.Tensor
    is_first: torch.Tensor

    def __init__(self, task: Task, params: VisionTransformerParams) -> None:
        super().__init__()
        channels, side, _ = task.input_shape
        net = networks().VisionTransformer(
            image_size=side,
            patch_size=params.patch,
            num_layers=params.depth,
            num_heads=params.heads,
            hidden_dim=params.width,
            mlp_dim=4 * params.width,
        )
        self.class_token = net.class_token
        self.conv_proj = net.conv_proj
        if channels != 3:
            self.conv_proj = nn.Conv2d(channels, params.width, params.patch, stride=params.patch)
        self.encoder = net.encoder
        self.feature_dim = params.width
        self.patches = (side // params.patch) ** 2
        self.heads_of_attention = params.heads
        order = torch.arange(-1, self.patches).clamp(min=0)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("is_first", (torch.arange(self.patches + 1) == 0).float()[None, :, None], persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Features (n, width) of images (n, channels, side, side)."""
        patches = self.conv_proj(images).reshape(-1, self.feature_dim, self.patches).transpose(1, 2)
        # In front of the patches is the token that stands for the whole image: a patch is put there and blanked out.
        is_first = self.is_first
        tokens = patches[:, self.order] * (1 - is_first) + self.class_token * is_first + self.encoder.pos_embedding
        for layer in self.encoder.layers:
            tokens = tokens + self._attention(layer.self_attention, layer.ln_1(tokens))
            tokens = tokens + layer.mlp(layer.ln_2(tokens))
        features: torch.Tensor = self.encoder.ln(tokens)[:, 0]
        return features

    def _attention(self, layer: nn.MultiheadAttention, tokens: torch.Tensor) -> torch.Tensor:
        """Return what each token takes from all others, (n, tokens, width), by Vaswani et al., 2017, Eq. 1."""
        count = self.patches + 1
        size = self.feature_dim // self.heads_of_attention
        joined = nn.functional.linear(tokens, layer.in_proj_weight, layer.in_proj_bias)
        split = joined.reshape(-1, count, 3, self.heads_of_attention, size).permute(2, 0, 3, 1, 4)
        queries = split[0] * size**-0.5
        shares = torch.softmax(queries @ split[1].transpose(-2, -1), dim=-1)
        taken = (shares @ split[2]).transpose(1, 2).reshape(-1, count, self.feature_dim)
        mixed: torch.Tensor = layer.out_proj(taken)
        return mixed


def _resnet(task: Task, name: str, params: StemParams) -> nn.Module:
    """Return a ResNet of torchvision without its classifier, whose first layers fit the task and the stem.

    The ``small`` stem, for small images, has a 3 x 3 convolution with stride 1, and no pooling.
    """
    net = getattr(networks(), name)(weights=None)
    if params.stem == "small":
        net.conv1 = _first_convolution(net.conv1, task, stride=1, kernel=3)
        net.maxpool = nn.Identity()
    elif task.input.channels != 3:
        net.conv1 = _first_convolution(net.conv1, task)
    net.feature_dim = net.fc.in_features
    net.fc = nn.Identity()
    network: nn.Module = net
    return network


def _mobilenet(task: Task, name: str, params: StemParams, feature_dim: int, **options: float) -> nn.Module:
    """Return a MobileNet, or a network built like one, without its classifier; its first layer fits task and stem.

    The ``small`` stem, for small images, has stride 1. ``options`` go to torchvision.
    """
    net = getattr(networks(), name)(weights=None, **options)
    first = net.features[0]
    if params.stem == "small":
        first[0] = _first_convolution(first[0], task, stride=1)
    elif task.input.channels != 3:
        first[0] = _first_convolution(first[0], task)
    net.feature_dim = feature_dim
    net.classifier = nn.Identity()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            # torchvision gives MobileNetV3 a momentum of 0.01: after the few steps of a federated round the running
            # statistics are still those of the start, and features in eval mode are at chance level (measured).
            module.momentum = 0.1
    network: nn.Module = net
    return network


def _first_convolution(
    conv: nn.Conv2d, task: Task, *, stride: int | None = None, kernel: int | None = None
) -> nn.Conv2d:
    """Return a fresh convolution like ``conv`` that takes the task's channels; smaller or denser where asked."""
    size = kernel or int(conv.kernel_size[0])
    stride = stride or int(conv.stride[0])
    has_bias = conv.bias is not None
    return nn.Conv2d(task.input.channels, conv.out_channels, size, stride, padding=size // 2, bias=has_bias)


def networks() -> ModuleType:
    """Return the module ``torchvision.models``.

    Raises:
        MissingCapability: torchvision is not installed, or does not work with the installed torch.
    """
    import_torchvision()
    return importlib.import_module("torchvision.models")
