"""What FedRIR is made of: masks, autoencoder, bounds of information; against numbers worked out elsewhere."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.task import ImageInput, Task
from edge_agent.training.augment import mask_patches
from edge_agent.training.losses import GaussianPredictor, gaussian_misfit, vclub
from edge_agent.training.networks import Generator, SpecificEncoder, kl_to_standard_normal, sample


def image_task(channels: int, height: int, width: int) -> Task:
    return Task(input=ImageInput(channels=channels, height=height, width=width), class_names=("a", "b"))


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# --- masks -----------------------------------------------------------------------------------------------------------


def grid_of(masked: torch.Tensor, patch: int) -> torch.Tensor:
    """Per image and patch, whether all of its pixels are 0; fails where a patch is 0 in part."""
    n, c, h, w = masked.shape
    cells = (masked == 0).view(n, c, h // patch, patch, w // patch, patch).float().mean(dim=(1, 3, 5))
    assert set(cells.unique().tolist()) <= {0.0, 1.0}
    return cells.bool().flatten(1)


def test_29_of_49_patches_are_masked_at_28_pixels():
    images = torch.rand(16, 1, 28, 28, generator=draw()) + 0.5
    masked = mask_patches(images, 0.6, 4, draw(1))
    grid = grid_of(masked, 4)
    assert grid.shape == (16, 49)
    assert grid.sum(dim=1).tolist() == [29] * 16
    assert torch.equal(masked[masked != 0], images[masked != 0])
    assert len({tuple(row.tolist()) for row in grid}) == 16, "each image has its own mask"


@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3]), st.floats(0, 1), st.integers(0, 9)
)
def test_any_ratio_masks_the_floor_of_its_share(patch, rows, columns, channels, ratio, seed):
    images = torch.ones(3, channels, rows * patch, columns * patch)
    masked = grid_of(mask_patches(images, ratio, patch, draw(seed)), patch).sum(dim=1).tolist()
    assert masked == [math.floor(ratio * rows * columns + 1e-9)] * 3


def test_a_ratio_of_0_masks_nothing_and_of_1_everything():
    images = torch.randn(2, 3, 8, 8, generator=draw())
    assert torch.equal(mask_patches(images, 0.0, 4, draw()), images)
    assert not mask_patches(images, 1.0, 4, draw()).any()


def test_a_share_just_below_a_whole_number_counts_as_that_number():
    assert grid_of(mask_patches(torch.ones(1, 1, 10, 10), 0.29, 1, draw()), 1).sum() == 29  # 0.29 * 100 = 28.99...96


def test_patches_are_masked_equally_often():
    grid = grid_of(mask_patches(torch.ones(4000, 1, 8, 8), 0.5, 4, draw()), 4)
    assert grid.float().mean(dim=0).tolist() == pytest.approx([0.5] * 4, abs=0.03)


# --- autoencoder -----------------------------------------------------------------------------------------------------


def test_parts_have_the_published_number_of_weights():
    task = image_task(1, 28, 28)
    # conv(1,32,5) 832 + bn 64 + conv(32,64,5) 51,264 + bn 128 + fc(1024,1024) 1,049,600
    assert weights(SpecificEncoder(task, 512)) == 832 + 64 + 51_264 + 128 + 1_049_600 == 1_101_888
    # fc(512,1024) 525,312 + convt(64,32,5) 51,232 + convt(32,1,5) 801
    assert weights(Generator(task, 512)) == 525_312 + 51_232 + 801 == 577_345
    # twice 512-128-512: 65,664 + 66,048
    assert weights(GaussianPredictor(512, 512)) == 2 * (65_664 + 66_048) == 263_424


@pytest.mark.parametrize("channels, side, flat", [(1, 28, 1024), (3, 32, 1600), (3, 64, 10_816)])
def test_official_sides_give_the_official_shapes(channels, side, flat):
    task = image_task(channels, side, side)
    encoder = SpecificEncoder(task, 512)
    generator = Generator(task, 512)
    assert encoder.layers[-1].in_features == flat
    assert generator.layers[0].out_features == flat
    mean, logvar = encoder(torch.zeros(2, channels, side, side))
    assert mean.shape == logvar.shape == (2, 512)
    assert generator(mean).shape == (2, channels, side, side)


@given(st.integers(1, 10), st.integers(1, 10), st.sampled_from([1, 3]))
def test_the_generator_draws_every_size_that_4_divides(rows, columns, channels):
    task = image_task(channels, 4 * rows, 4 * columns)
    mean, _ = SpecificEncoder(task, 2)(torch.zeros(2, *task.input_shape))
    assert Generator(task, 2)(mean).shape == (2, *task.input_shape)


def test_the_first_half_is_the_mean_and_the_second_the_log_variance():
    encoder = SpecificEncoder(image_task(1, 8, 8), 3)
    with torch.no_grad():
        encoder.layers[-1].weight.zero_()
        encoder.layers[-1].bias.copy_(torch.arange(6.0))
    mean, logvar = encoder(torch.randn(2, 1, 8, 8))
    assert mean[0].tolist() == [0, 1, 2]
    assert logvar[0].tolist() == [3, 4, 5]


def test_divergence_from_the_standard_normal_by_hand():
    assert kl_to_standard_normal(torch.zeros(3, 2), torch.zeros(3, 2)) == 0
    # -0.5 (1 + ln 4 - 1 - 4) = 1.306853
    one = kl_to_standard_normal(torch.ones(1, 1), torch.full((1, 1), math.log(4.0)))
    assert float(one) == pytest.approx(1.306853, abs=1e-6)
    # Summed over dimensions, averaged over rows: (2 * 1.306853 + 0) / 2
    both = kl_to_standard_normal(
        torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[math.log(4.0)] * 2, [0.0, 0.0]])
    )
    assert float(both) == pytest.approx(1.306853, abs=1e-6)


def test_divergence_equals_that_of_torch_distributions():
    mean = torch.randn(5, 3, generator=draw(1))
    logvar = torch.randn(5, 3, generator=draw(2))
    theirs = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, (0.5 * logvar).exp()), torch.distributions.Normal(0.0, 1.0)
    )
    torch.testing.assert_close(kl_to_standard_normal(mean, logvar), theirs.sum(dim=1).mean())


def test_samples_have_the_mean_and_spread_asked_for_and_pass_gradients():
    mean = torch.tensor([[1.0, -2.0]]).repeat(20_000, 1)
    logvar = torch.tensor([[0.0, math.log(9.0)]]).repeat(20_000, 1)
    mean.requires_grad_()
    drawn = sample(mean, logvar, draw())
    assert drawn.mean(dim=0).tolist() == pytest.approx([1.0, -2.0], abs=0.08)
    assert drawn.std(dim=0).tolist() == pytest.approx([1.0, 3.0], abs=0.05)
    drawn.sum().backward()
    assert (mean.grad == 1).all()


# --- mutual information ----------------------------------------------------------------------------------------------


def brute_force(values, mean, logvar):
    """mean_i [log q(v_i|i) - mean_j log q(v_j|i)] with the whole Gaussian densities, in loops."""

    def log_density(value, m, lv):
        return float(np.sum(-0.5 * ((value - m) ** 2 / np.exp(lv) + lv + np.log(2 * np.pi))))

    n = len(values)
    terms = [
        log_density(values[i], mean[i], logvar[i])
        - sum(log_density(values[j], mean[i], logvar[i]) for j in range(n)) / n
        for i in range(n)
    ]
    return sum(terms) / n


def test_bound_and_misfit_by_hand():
    # q(g|c) = N(c, 1), c = g = (0, 1): each row has (0 + 1) / 2 / 2 = 0.25; the other direction predicts perfectly.
    both = torch.tensor([[0.0], [1.0]])
    assert float(vclub(both, both, torch.zeros(2, 1))) == pytest.approx(0.25)
    assert float(gaussian_misfit(both, both, torch.zeros(2, 1))) == 0.0
    # (3 - 1)^2 / 4 + ln 4 = 1 + 1.386294
    found = gaussian_misfit(torch.tensor([[3.0]]), torch.tensor([[1.0]]), torch.tensor([[math.log(4.0)]]))
    assert float(found) == pytest.approx(2.386294, abs=1e-6)


@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 99))
def test_bound_equals_the_double_loop(n, d, seed):
    rng = np.random.default_rng(seed)
    values, mean, logvar = (rng.normal(size=(n, d)) for _ in range(3))
    found = vclub(*(torch.from_numpy(array) for array in (values, mean, logvar)))
    assert float(found) == pytest.approx(brute_force(values, mean, logvar), abs=1e-9)


def test_single_negatives_average_to_all_negatives():
    values, mean, logvar = (torch.randn(4, 3, generator=draw(seed), dtype=torch.float64) for seed in range(3))
    single = [float(vclub(values, mean, logvar, torch.tensor(p))) for p in itertools.permutations(range(4))]
    assert sum(single) / 24 == pytest.approx(float(vclub(values, mean, logvar)), abs=1e-12)
    assert vclub(values, mean, logvar, torch.arange(4)) == 0.0


@pytest.mark.parametrize("others", [None, torch.tensor([2, 0, 1, 4, 3])], ids=["all", "permutation"])
def test_the_gradient_of_the_bound_is_that_of_finite_differences(others):
    values, mean, logvar = (torch.randn(5, 2, generator=draw(seed), dtype=torch.float64) for seed in range(3))
    values.requires_grad_()
    vclub(values, mean, logvar, others).backward()
    step = 1e-6
    for place in itertools.product(range(5), range(2)):
        sides = []
        for sign in (1, -1):
            moved = values.detach().clone()
            moved[place] += sign * step
            sides.append(float(vclub(moved, mean, logvar, others)))
        assert float(values.grad[place]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-8)


def gaussians(rho: float, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """g and c (n, 1) of unit variance and correlation rho."""
    c, noise = (torch.randn(n, 1, generator=draw(seed + k), dtype=torch.float64) for k in (1, 1001))
    return rho * c + math.sqrt(1 - rho**2) * noise, c


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
def test_with_the_true_conditional_the_bound_is_known_and_above_the_information(rho):
    g, c = gaussians(rho, 400_000)
    found = float(vclub(g, rho * c, torch.full_like(c, math.log(1 - rho**2))))
    assert found == pytest.approx(rho**2 / (1 - rho**2), rel=0.02)  # rho 0.6: 0.5625
    assert found > -0.5 * math.log(1 - rho**2)  # rho 0.6: 0.223144


def test_independent_features_have_a_bound_near_zero():
    g, c = gaussians(0.0, 400_000)
    assert float(vclub(g, 0.6 * c, torch.full_like(c, math.log(0.64)))) == pytest.approx(0.0, abs=0.01)


def correlation(g: torch.Tensor, c: torch.Tensor) -> float:
    pairs = zip(g.detach().T, c.T, strict=True)
    return float(np.mean([abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) for pair in pairs]))


def fitted(inputs: torch.Tensor, targets: torch.Tensor) -> GaussianPredictor:
    torch.manual_seed(0)
    predictor = GaussianPredictor(inputs.shape[1], targets.shape[1]).double()
    optimizer = torch.optim.Adam(predictor.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        gaussian_misfit(targets, *predictor(inputs)).backward()
        optimizer.step()
    return predictor


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_step_of_vclub_takes_correlation_away_and_a_step_of_official_adds_some(seed):
    pairs = [gaussians(0.6, 600, seed=10 * seed + k) for k in range(3)]
    g, c = (torch.cat(columns, dim=1) for columns in zip(*pairs, strict=True))
    before = correlation(g, c)

    moved = g.clone().requires_grad_()
    mean, logvar = fitted(c, g)(c)
    vclub(moved, mean.detach(), logvar.detach()).backward()
    assert correlation(g - 60 * moved.grad, c) < before - 0.02

    moved = g.clone().requires_grad_()
    gaussian_misfit(c, *fitted(g, c)(moved)).backward()
    assert correlation(g - 60 * moved.grad, c) > before + 0.02


def test_log_variances_stay_within_one():
    predictor = GaussianPredictor(3, 2)
    with torch.no_grad():
        predictor.logvar[2].bias.copy_(torch.tensor([50.0, -50.0]))
    _, logvar = predictor(torch.zeros(1, 3))
    assert logvar.tolist() == [[1.0, -1.0]]
