"""The model of cost of engine stacked: its coefficients, its table, and what one pass and one after another compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yardstick_stacked_cost as cost


def cell(clients, batch, seconds, network="linear"):
    sizes = {"layers": 2, "weights": 1000, "products": 500}
    return cost.Cell(network, clients, batch, **sizes, stacked_s=seconds, one_by_one_s=2 * seconds)


def test_known_coefficients_are_found_again():
    """5 ms a layer for the pass, 1 ms a layer for each client, 1 us a weight, 2 us a product."""
    coefficients = np.array([5e-3, 1e-3, 1e-6, 2e-6])
    cells = []
    for clients in (1, 2, 5, 9):
        for batch in (1, 4, 16):
            size = cell(clients, batch, 1.0)
            cells.append(cell(clients, batch, float(np.dot(coefficients, size.terms))))
    predicted = [float(np.dot(cost.fit(cells), size.terms)) for size in cells]
    assert predicted == pytest.approx([size.stacked_s for size in cells], rel=1e-6)


def test_the_table_says_what_was_not_fitted():
    cells = [cell(k, b, 0.01 + 0.001 * k * b) for k in (1, 4, 16) for b in (8, 32)]
    lines = cost.table(cells)
    assert next(line for line in lines if "not fitted |" in line).startswith("| linear | 4 | 32 | 138.00 |")
    assert sum("not fitted |" in line for line in lines) == len(cost.HELD_OUT)
    assert "| +50% |" in lines[2]


def test_both_ways_are_measured(monkeypatch):
    monkeypatch.setattr(cost, "REPEATS", 1)
    measured = cost.measure("linear", 2, 4, torch.device("cpu"))
    # A linear layer from 64 pixels to 16 features, and 10 classes of them.
    assert (measured.layers, measured.weights) == (2, 64 * 16 + 16 + 16 * 10 + 10)
    assert measured.products == 64 * 16
    assert measured.stacked_s > 0
    assert measured.one_by_one_s > 0
