"""Memory that ran out is told from other errors by classes, and by text only where torch has no class."""

import pytest
import torch

from coordinator.simulation.out_of_memory import is_out_of_memory
from edge_agent.core.errors import TrainingFailed

MORE_THAN_THERE_IS = 1 << 55


class OwnError(RuntimeError):
    """An error of a user's method."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB, max allowed: 1 GB)"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_memory_that_ran_out_is_recognised(error):
    assert is_out_of_memory(error)


def test_the_allocator_of_this_torch_is_recognised():
    """The text is torch's own: a version that changes it fails here first."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(MORE_THAN_THERE_IS)
    assert is_out_of_memory(refused.value)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the replay buffer is out of memory slots"),
        OwnError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("my cache is out of memory"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        TrainingFailed("not enough memory was given"),
        KeyError("out of memory"),
    ],
)
def test_an_error_that_only_speaks_of_memory_is_something_else(error):
    assert not is_out_of_memory(error)
