"""last_block: the last block of the encoder; what comes before it is a fixed extractor of features.

The block is found by the order in which modules are defined, which is that of their use in all encoders that ship: the
last child with a weight of two axes or more, and the layers behind it, such as its batch norm. Plain sequences are
looked into, and so are modules that hold little but a stack of blocks of one class, as transformers have; blocks
themselves are not. So it is the last residual block of a ResNet, the last of the twelve blocks of a vision transformer,
and the last convolution or linear layer of a network that is one sequence of layers.
"""

from __future__ import annotations

from torch import nn

from .base import Peft, tensors_of


class LastBlock(Peft):
    """Everything is frozen but the last block."""

    needs = "block with weights before which anything is left to freeze"

    def prepare(self, encoder: nn.Module) -> frozenset[str]:
        """Return the tensors of the last block."""
        learning = tensors_of(encoder, last_block(encoder))
        is_whole = learning >= {name for name, _ in encoder.named_parameters()}
        return frozenset() if is_whole else learning


def last_block(encoder: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules of the last block; none where no module has a weight of two axes."""
    block = encoder
    prefix = ""
    behind: list[str] = []
    while True:
        children = list(block.named_children())
        with_matrices = [number for number, (_, child) in enumerate(children) if _has_matrix(child)]
        if not with_matrices:
            return ()
        last = with_matrices[-1]
        name, child = children[last]
        # Layers behind the block, such as its batch norm, belong to it.
        behind = [*(prefix + later for later, _ in children[last + 1 :]), *behind]
        path = prefix + name
        if type(child) is not nn.Sequential and not _is_around_stack(child):
            return (path, *behind)
        block = child
        prefix = f"{path}."


def _is_around_stack(module: nn.Module) -> bool:
    """Return whether all matrices of a module are in one plain sequence of two or more blocks of one class.

    The sequence in a single block, such as an inverted residual, is no such stack: its layers are of several classes.
    """
    with_matrices = [child for child in module.children() if _has_matrix(child)]
    if len(with_matrices) != 1 or type(with_matrices[0]) is not nn.Sequential:
        return False
    classes = [type(block) for block in with_matrices[0]]
    return len(classes) > 1 and len({*classes}) == 1


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module has a weight of two axes or more, as layers have that are no normalisation."""
    return any(weight.ndim > 1 for weight in module.parameters())
