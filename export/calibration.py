"""The inputs by which int8 takes its ranges, and the labelled samples on which it is compared with fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edge_agent.core.errors import ExportRejected
from edge_agent.core.task import Task
from edge_agent.data import Samples

from .domains import choose_samples, range_inputs

UNLABELLED = ""
"""The name of inputs that belong to no domain and have no labels."""


@dataclass(frozen=True)
class Calibration:
    """Everything that an export knows about the inputs of the devices."""

    range_inputs: Mapping[str, np.ndarray]
    """Preprocessed inputs (n, ...) float32 by domain, from which ranges are taken; `UNLABELLED` for those of none."""

    domains: Mapping[str, Samples] = field(default_factory=dict)
    """Labelled samples by domain, on which heads compare int8 with fp32; empty where nothing is compared."""

    client_ranges: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The activation ranges (steps, 2) of `training.ranges` by client, whose samples are not here."""

    @classmethod
    def from_inputs(cls, inputs: np.ndarray, client_ranges: Mapping[str, np.ndarray] | None = None) -> Calibration:
        """Return the calibration by inputs without labels, by which nothing is compared.

        Args:
            inputs: Preprocessed inputs (n, ...) float32.
            client_ranges: Ranges of clients, see `from_domains`. They count more than these inputs.
        """
        return cls({UNLABELLED: inputs}, client_ranges=client_ranges or {})

    @classmethod
    def from_domains(
        cls, samples: Mapping[str, Samples], client_ranges: Mapping[str, np.ndarray] | None = None
    ) -> Calibration:
        """Return the calibration by evenly spread samples of at most 64 of these domains.

        Args:
            samples: Labelled samples by domain, from which ranges are taken in equal parts; heads compare int8 with
                fp32 on each domain by ranges of the others.
            client_ranges: The (steps, 2) of `training.ranges` for this encoder by client, whose samples are not here.
                They count as domains do; those of fewer than three clients are left out, and the manifest's
                ``quantization.ranges`` says so.
        """
        domains = choose_samples(samples)
        return cls(range_inputs(domains), domains, client_ranges or {})

    def joined_inputs(self, task: Task) -> np.ndarray:
        """Return the range inputs of all domains in one array (n, ...) float32.

        Raises:
            ExportRejected: There are no inputs, or some are not inputs of this task.
        """
        if not self.range_inputs:
            raise ExportRejected("calibration has no domain; give samples of one at least, or inputs without labels")
        for name, inputs in self.range_inputs.items():
            _check_inputs(name, inputs, task)
        return np.ascontiguousarray(np.concatenate([*self.range_inputs.values()]), dtype=np.float32)

    def describe_inputs(self) -> str:
        """Return the text of the manifest about where ranges of inputs come from."""
        count = sum(map(len, self.range_inputs.values()))
        if UNLABELLED in self.range_inputs:
            return f"{count} inputs without labels"
        return f"{count} inputs of {len(self.range_inputs)} domain(s)"


def _check_inputs(name: str, inputs: np.ndarray, task: Task) -> None:
    """Raise `ExportRejected` unless the inputs of a domain are finite, at least one, and of the task's shape."""
    has_shape = inputs.shape[1:] == task.input_shape and len(inputs) > 0
    if has_shape and np.isfinite(inputs).all():
        return
    domain = f" of {name}" if name else ""
    sides = ", ".join(map(str, task.input_shape))
    raise ExportRejected(
        f"calibration inputs{domain} are {list(inputs.shape)}, expected finite [n, {sides}] with n >= 1; "
        "give preprocessed inputs of this task"
    )
