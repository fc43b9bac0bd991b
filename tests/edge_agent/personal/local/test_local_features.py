from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from edge_agent.personal.local.features import (
    STATISTICS,
    convolution_features,
    flattened,
    image_features,
    learn_convolutions,
    window_statistics,
)


def test_statistics_of_a_sine_are_those_worked_out_by_hand():
    time = np.arange(100)
    window = (3 + 2 * np.sin(2 * np.pi * 5 * time / 100))[None, None].astype(np.float32)
    found = dict(zip(STATISTICS, window_statistics(window)[0], strict=True))
    assert found["mean"] == pytest.approx(3, abs=1e-5)
    assert found["standard deviation"] == pytest.approx(2 / np.sqrt(2), abs=1e-5)
    assert (found["least"], found["greatest"]) == pytest.approx((1, 5), abs=1e-5)
    assert found["median"] == pytest.approx(3, abs=1e-5)
    assert found["root mean square"] == pytest.approx(np.sqrt(9 + 2), abs=1e-5)
    assert found["strongest frequency"] == pytest.approx(0.05)
    assert found["share of the strongest frequency"] == pytest.approx(1, abs=1e-5)
    assert found["centre of the spectrum"] == pytest.approx(0.05, abs=1e-5)
    assert found["share of mean crossings"] == pytest.approx(9 / 99, abs=0.011)
    assert found["correlation with the next value"] == pytest.approx(np.cos(2 * np.pi * 0.05), abs=0.01)


def test_a_constant_channel_has_finite_statistics():
    assert np.isfinite(window_statistics(np.ones((2, 3, 50), np.float32))).all()


def test_random_convolutions_count_outputs_of_kernels_of_minus_one_and_two():
    rng = np.random.default_rng(0)
    windows = rng.standard_normal((40, 3, 50)).astype(np.float32)
    learned = learn_convolutions(windows, np.random.default_rng(1), features=84 * 3 * 2)
    found = convolution_features(windows[:3], learned)
    assert learned["thresholds"].shape == (84 * 3, 2), "dilations 1, 2 and 4"
    dilation = 2
    number = 17
    weights = np.full(9, -1.0)
    weights[list(list(combinations(range(9), 3))[number])] = 2.0
    chosen = np.flatnonzero(learned["channels"][84 + number])
    padded = np.pad(windows[0, chosen].sum(axis=0), 4 * dilation)
    outputs = [sum(weights[j] * padded[t + j * dilation] for j in range(9)) for t in range(50)]
    expected = [(np.array(outputs) > threshold).mean() for threshold in learned["thresholds"][84 + number]]
    assert found[0, 2 * (84 + number) :][:2] == pytest.approx(expected, abs=0.021)  # one value may tie


@pytest.mark.parametrize("shape", [(3, 6, 4), (2, 1, 9), (1, 12, 300)])
def test_random_convolutions_take_any_window(shape):
    windows = np.random.default_rng(0).standard_normal((5, *shape[1:])).astype(np.float32)
    found = convolution_features(windows, learn_convolutions(windows, np.random.default_rng(0)))
    assert np.isfinite(found).all()
    assert found.min() >= 0
    assert found.max() <= 1


def test_gradients_see_the_direction_of_an_edge_and_histograms_the_colour():
    across = np.zeros((1, 1, 28, 28), np.float32)
    across[:, :, :, 14:] = 1.0
    upright, flat = image_features(np.concatenate([across, across.transpose(0, 1, 3, 2)]))
    blocks = (upright.reshape(-1)[: 36 * 36].reshape(36, 4, 9), flat.reshape(-1)[: 36 * 36].reshape(36, 4, 9))
    # 9 orientations of 20 degrees: a gradient to the right lies between the last and the first, one down in the fifth.
    assert blocks[0].sum(axis=(0, 1)).argsort()[-2:].tolist() in ([0, 8], [8, 0])
    assert blocks[1].sum(axis=(0, 1)).argmax() == 4
    assert upright[-16:][[0, 15]].tolist() == [0.5, 0.5]
    brighter = image_features(np.clip(across * 0.5 + 0.25, 0, 1))
    assert brighter[0, : 36 * 36] == pytest.approx(upright[: 36 * 36], abs=1e-4)  # contrast does not matter


def test_images_of_any_size_have_features():
    for shape in ((2, 3, 32, 32), (2, 1, 4, 4), (1, 3, 40, 17), (1, 1, 224, 224)):
        assert np.isfinite(image_features(np.random.default_rng(0).random(shape, np.float32))).all()


@pytest.mark.parametrize("shape, expected", [((3, 8, 8), 192), ((3, 64, 64), 3072), ((6, 2000), 3000), ((5000,), 5000)])
def test_raw_inputs_are_averaged_down_to_4096_values(shape, expected):
    inputs = np.ones((2, *shape), np.float32)
    assert flattened(inputs).shape == (2, expected)
    assert (flattened(inputs) == 1).all()


def test_averaging_by_hand():
    inputs = np.arange(2 * 8192, dtype=np.float32).reshape(2, 1, 8192)
    assert flattened(inputs)[0, :3].tolist() == [0.5, 2.5, 4.5]
