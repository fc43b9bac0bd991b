"""Which errors mean that memory ran out, on the host or on a GPU."""

from __future__ import annotations

import torch

_TEXTS_WITHOUT_A_CLASS = (
    "DefaultCPUAllocator: can't allocate memory",  # host memory on Linux and macOS
    "DefaultCPUAllocator: not enough memory",  # host memory on Windows
    "MPS backend out of memory",  # Apple's GPUs
    "CUDA error: out of memory",  # a GPU's driver, for what torch's own allocator does not hand out
)
"""What torch's allocators write that have no error class of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on the host or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return _is_of_an_allocator_without_a_class(error)


def _is_of_an_allocator_without_a_class(error: BaseException) -> bool:
    """Return whether one of torch's allocators raised this error that have no class for it.

    `torch.OutOfMemoryError` comes from the allocator of CUDA devices alone. The others raise a `RuntimeError`, as every
    failed check of torch does, without a code or a cause: only its text tells it from, say, shapes that do not fit.
    This is the one place that reads such a text. It reads the allocator's whole phrase, and errors of torch's own kinds
    only, so that an error of a user's method that merely speaks of memory stays what it is.
    """
    # torch.AcceleratorError, which newer versions raise for errors of a GPU's driver, is missing in older ones.
    kinds = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))
    if type(error) not in kinds:
        return False
    message = str(error)
    return any(text in message for text in _TEXTS_WITHOUT_A_CLASS)
