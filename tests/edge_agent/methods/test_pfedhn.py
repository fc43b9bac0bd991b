from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edge_agent import methods
from edge_agent.core.errors import ConfigError
from edge_agent.methods.families import names_in
from edge_agent.methods.pfedhn import Hypernetwork, PFedHNParams, clipped, pull_back
from edge_agent.methods.values import Update

SMALL = {"local_steps": 2, "batch_size": 4, "embedding_size": 3, "hidden_layers": 1, "hidden_units": 5}
FRESH = {"head.weight": np.float32([[1.0, 2.0], [3.0, 4.0]]), "head.bias": np.float32([0.5, -0.5])}


def pfedhn(**params):
    return methods.create("pfedhn", {**SMALL, **params})


class Linear(nn.Module):
    """H(e) = W e, one tensor."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))

    def forward(self, embedding):
        return {"w": self.w @ embedding}


def test_running_statistics_are_not_to_be_made():
    with pytest.raises(ConfigError, match=r"norm = 'global': .*no hypernetwork can make them; expected local_stats"):
        methods.create("pfedhn", {"norm": "global"})


def test_the_product_of_a_linear_network_by_hand():
    # H(e) = W e with e = (1, -1): (-1, -1, -1). Trained (-2, 0, -1): delta = (1, -1, 0); by W delta e', by e W' delta.
    network = Linear()
    embedding = torch.tensor([1.0, -1.0], requires_grad=True)
    trained = {"w": np.float32([-2.0, 0.0, -1.0])}
    by_w, by_e = pull_back(network, embedding, trained, [network.w, embedding])
    assert by_w.tolist() == [[1.0, -1.0], [-1.0, 1.0], [0.0, 0.0]]
    assert by_e.tolist() == [-2.0, -2.0]


def test_the_product_is_that_of_finite_differences():
    """<H(e), delta> with a fixed delta, differenced in every weight of H and in e."""
    torch.manual_seed(0)
    params = PFedHNParams.model_validate(SMALL)
    network = Hypernetwork({name: array.shape for name, array in FRESH.items()}, params)
    network.begin(FRESH, 1.0)
    network = network.double()
    embedding = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64, requires_grad=True)
    rng = np.random.default_rng(0)
    made = {name: tensor.detach().numpy() for name, tensor in network(embedding).items()}
    delta = {name: rng.standard_normal(array.shape) for name, array in made.items()}
    trained = {name: made[name] - delta[name] for name in made}
    weights = [*network.parameters(), embedding]
    products = pull_back(network, embedding, trained, weights)

    def value():
        with torch.no_grad():
            return sum(float((t * torch.from_numpy(delta[n])).sum()) for n, t in network(embedding).items())

    for weight, product in zip(weights, products, strict=True):
        flat = weight.detach().view(-1)
        for place in range(0, len(flat), 3):
            held = flat[place].item()
            ends = []
            for step in (1e-6, -1e-6):
                flat[place] = held + step
                ends.append(value())
            flat[place] = held
            difference = (ends[0] - ends[1]) / 2e-6
            assert product.reshape(-1)[place].item() == pytest.approx(difference, rel=1e-5, abs=1e-7)


def test_gradients_are_shortened_together():
    slopes = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert [slope.item() for slope in clipped(slopes, 1.0)] == pytest.approx([0.6, 0.8])
    assert clipped(slopes, 10.0) == slopes


def test_without_spread_every_client_begins_with_the_fresh_model():
    method = pfedhn(spread=0.0)
    state = method.start(FRESH)
    for client in ("a", "b"):
        down = method.downlink(state, client)
        assert down.keys() == FRESH.keys()
        for name, array in down.items():
            np.testing.assert_allclose(array, FRESH[name], rtol=1e-6)
    state = pfedhn(spread=1.0).start(FRESH)
    one, other = (pfedhn(spread=1.0).downlink(state, client)["head.weight"] for client in "ab")
    assert not np.array_equal(one, other)


def test_embeddings_depend_on_the_id_alone():
    first = pfedhn().aggregate(pfedhn().start(FRESH), [Update("kiosk", 1.0, FRESH)])
    other = {name: array + 1 for name, array in FRESH.items()}
    again = pfedhn(server_lr=1e-9).aggregate(pfedhn().start(other), [Update("kiosk", 1.0, other)])
    np.testing.assert_allclose(first["clients.embedding"], again["clients.embedding"], atol=0.05)
    assert first["clients.embedding"].shape == (1, 3)


def test_a_step_brings_what_is_made_nearer_to_what_was_trained():
    method = pfedhn(server_lr=0.02, server_weight_decay=0.0)
    state = method.start(FRESH)
    wanted = {"a": 1.0, "b": -1.0}
    gaps = []
    for _ in range(25):
        made = {client: method.downlink(state, client) for client in wanted}
        gaps.append(max(abs(made[c]["head.bias"] - FRESH["head.bias"] - wanted[c]).max() for c in wanted))
        ups = [
            Update(c, 1.0, {"head.weight": made[c]["head.weight"], "head.bias": FRESH["head.bias"] + np.float32(w)})
            for c, w in wanted.items()
        ]
        state = method.aggregate(state, ups)
    assert gaps[-1] < 0.5 * gaps[0]  # one network makes two different models


def test_clients_that_are_away_keep_their_embeddings():
    method = pfedhn()
    state = method.aggregate(method.start(FRESH), [Update(c, 1.0, FRESH) for c in ("b", "c")])
    after = method.aggregate(state, [Update(c, 1.0, {n: a + 1 for n, a in FRESH.items()}) for c in ("a", "c")])
    assert names_in(after, "clients.names") == ("a", "b", "c")
    np.testing.assert_array_equal(after["clients.embedding"][1], state["clients.embedding"][0])
    assert not np.array_equal(after["clients.embedding"][2], state["clients.embedding"][1])


def test_neither_network_nor_embeddings_leave_the_coordinator(federation):
    fed = federation(pfedhn(), rounds=1).run()
    down = {**fed.method.broadcast(fed.state), **fed.method.downlink(fed.state, "a")}
    assert set(down) == set(fed.shared)
    assert not [name for name in fed.shared if "running" in name]
    assert any(name.endswith("running_mean") for name in fed.personal("a"))


def test_the_variant_with_personal_heads_makes_encoders_alone(federation):
    fed = federation(pfedhn(personal_head=True), rounds=1).run()
    assert {name.split(".")[0] for name in fed.method.downlink(fed.state, "a")} == {"encoder"}
    assert "head.weight" in fed.personal("a")


def test_a_network_too_large_for_the_coordinator_is_refused():
    with pytest.raises(ConfigError, match="hidden_units: 4096 for 4000000 weights take"):
        pfedhn(hidden_units=4096).start({"head.weight": np.zeros((1000, 4000), np.float32)})
