"""The encoder that was cut out, compared with the network that it comes from."""

from __future__ import annotations

import numpy as np

from edge_agent.bundle.manifest import Parity

from ..parity import BATCHES, TOLERANCE, Gate, mean_cosine, run, session
from ..quantize import MIN_COSINE
from .cut import Cut
from .input_form import InputForm


def compare(cut: Cut, form: InputForm, inputs: np.ndarray, *, was_quantized: bool) -> tuple[Gate, Parity]:
    """Return whether an encoder computes what the network does, and the largest difference.

    The network runs one input at a time and without optimizations, and its input and its features are brought into
    form by NumPy; the encoder runs batches of 1, 2 and 7. So a row that depends on its neighbours is found, too.

    Args:
        cut: The encoder, and the network up to its features.
        form: How the network takes its input.
        inputs: Inputs (n, ...) float32 as a device prepares them.
        was_quantized: Whether the network has rounded weights and activations, which the encoder does not have: then
            the directions of the features are compared, and not their values.
    """
    batch = np.resize(inputs, (max(BATCHES), *inputs.shape[1:])).astype(np.float32)
    expected = _reference(cut, form, batch)
    worst = 0.0
    scale = float(np.abs(expected).max(initial=0))
    least_cosine = 1.0
    for size in BATCHES:
        received = run(cut.model, batch[:size], batch=size)
        if (
            received.shape != expected[:size].shape
            or not np.isfinite(received).all()
            or not np.isfinite(expected).all()
        ):
            detail = (
                f"batch {size}: network gives {expected[:size].shape}, encoder {received.shape}; both must be finite"
            )
            return Gate("parity", passed=False, detail=detail), Parity(max_abs=0.0, scale=0.0, batches=BATCHES)
        worst = max(worst, float(np.abs(received - expected[:size]).max()))
        least_cosine = min(least_cosine, mean_cosine(received, expected[:size]))
    parity = Parity(max_abs=worst, scale=scale, batches=BATCHES)
    if was_quantized:
        detail = f"mean cosine to the quantized network {least_cosine:.4f}, at least {MIN_COSINE} is required"
        return Gate("parity", least_cosine >= MIN_COSINE, detail), parity
    allowed = TOLERANCE * scale
    detail = f"largest difference to the network {worst:.2g}, allowed {allowed:.2g} (features up to {scale:.3g})"
    if worst > allowed:
        detail += "; rows that depend on the size of the batch differ like this: export it with a dynamic batch axis"
    return Gate("parity", worst <= allowed, detail), parity


def varied_gate(cut: Cut, inputs: np.ndarray) -> Gate:
    """Return whether features differ between inputs: nothing is learned from a network that always says the same."""
    features = run(cut.model, inputs[:7])
    spread = float(features.std(axis=0).max(initial=0))
    scale = float(np.abs(features).max(initial=0))
    detail = f"features vary by up to {spread:.2g} between inputs (features up to {scale:.3g})"
    return Gate("varied", spread > 1e-6 * max(1e-6, scale), detail)


def _reference(cut: Cut, form: InputForm, inputs: np.ndarray) -> np.ndarray:
    """Return the features (n, d) of the network itself, which runs one input at a time."""
    opened = session(cut.reference, optimized=False)
    name = opened.get_inputs()[0].name
    rows = [opened.run(None, {name: form.arrange(inputs[at : at + 1])})[0] for at in range(len(inputs))]
    return cut.pooling.apply(np.concatenate(rows))
