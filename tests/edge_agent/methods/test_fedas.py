from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.methods.fedas import aligned_loss, fisher_trace
from edge_agent.methods.values import Update
from edge_agent.training.loops import features_of

LABELS = {"a": [0, 1, 1, 0, 1], "b": [1, 2, 2, 2]}
TRACE = "extra.fisher"


def sent(client, value, trace, weight=1.0):
    return Update(client, weight, {"encoder.w": np.float32([value]), TRACE: np.array([trace])})


def test_clients_count_by_their_traces_or_by_their_samples():
    updates = [sent("a", 1.0, 3.0, 10.0), sent("b", 5.0, 1.0, 30.0)]
    state = {"encoder.w": np.float32([0])}
    np.testing.assert_allclose(methods.create("fedas").aggregate(state, updates)["encoder.w"], [2.0])
    by_samples = methods.create("fedas", {"weights": "samples"})
    after = by_samples.aggregate(state, updates)
    np.testing.assert_allclose(after["encoder.w"], [4.0])
    assert TRACE not in after


def test_the_trace_by_hand_on_a_linear_model(tiny):
    """Of a softmax of W z + b the gradient by logits is p - y; by W its outer product with z, and so on backwards."""
    fed = tiny("fedas", {"a": [0, 2]}, batch_size=1)
    client = fed.clients["a"]
    model = client.model.double()
    client.train_inputs = client.train_inputs.double()
    total = 0.0
    for row in range(2):
        model.zero_grad()
        logits = model(client.train_inputs[row : row + 1])
        (-torch.log_softmax(logits, dim=1)[0, client.train_labels[row]]).backward()
        total += sum(float(weight.grad.square().sum()) for weight in model.parameters())
    assert fisher_trace(client, 1) == pytest.approx(total)
    assert fisher_trace(client, 2) != pytest.approx(total), "the square of a mean gradient"


def test_a_model_that_is_sure_and_right_has_almost_no_trace(federation):
    fed = federation(methods.create("fedas", {"lr": 0.1, "batch_size": 4, "local_epochs": 1}), rounds=30)
    first = fed.run_round()
    for _ in range(29):
        last = fed.run_round()
    assert last[0].tensors[TRACE][0] < 0.2 * first[0].tensors[TRACE][0]


def test_the_alignment_by_hand(tiny):
    fed = tiny("fedas", LABELS)
    client = fed.clients["a"]
    means = np.float32([[1, 0, 0], [0, 2, 0], [9, 9, 9]])
    loss = aligned_loss(client.model, means, np.array([2, 3, 0]), torch.device("cpu"))
    features = client.model.features(client.train_inputs)
    by_hand = sum(
        (features[client.train_labels == label] - torch.from_numpy(means[label])).square().mean() for label in (0, 1)
    )
    torch.testing.assert_close(loss(client.train_inputs, client.train_labels), by_hand)
    # A class without a mean pulls at nothing, but the batch must still have a gradient.
    nothing = loss(client.train_inputs[:1], torch.tensor([2]))
    assert nothing.requires_grad
    assert nothing.item() == 0.0


def test_the_first_round_is_fedper_and_the_second_begins_with_what_the_client_knew(tiny):
    fed = tiny("fedas", LABELS, lr=0.1)
    plain = tiny("fedper", LABELS, lr=0.1)
    update = fed.update("a")
    for name, array in plain.update("a").tensors.items():
        np.testing.assert_allclose(update.tensors[name], array, atol=1e-6)
    client = fed.clients["a"]
    features = features_of(client.model, client.train_inputs).numpy()
    expected = features[np.array(LABELS["a"]) == 1].mean(axis=0)
    np.testing.assert_allclose(client.memory["class_means"][1], expected, atol=1e-6)
    assert client.memory["class_counts"].tolist() == [2, 3, 0]
    fed.update("b")
    fed.round = 2
    fed.update("a")
    assert client.log["loss.alignment"] > 0


def test_an_aligned_encoder_is_nearer_to_the_clients_own(federation):
    distances = []
    for epochs in (0, 5):
        fed = federation(
            methods.create(
                "fedas", {"alignment_epochs": epochs, "local_epochs": 0, "alignment_lr": 0.05, "batch_size": 4}
            )
        )
        client = fed.clients["a"]
        fed.update("a")
        # Another encoder arrives: the client's memory is of the one before.
        means = client.memory["class_means"].copy()
        fed.state = {name: array + np.float32(0.05) for name, array in fed.state.items() if array.dtype.kind == "f"} | {
            name: array for name, array in fed.state.items() if array.dtype.kind != "f"
        }
        fed.update("a")
        distances.append(float(np.abs(client.memory["class_means"] - means)[:2].mean()))
    assert distances[1] < 0.8 * distances[0]


@pytest.mark.parametrize("trace, objects", [(0.0, False), (3.5, False), (-1.0, True), (1e13, True)])
def test_a_trace_that_no_network_has_is_refused(trace, objects):
    assert bool(methods.create("fedas").objection({TRACE: np.array([trace])})) is objects


def test_noise_is_added_to_the_logarithm():
    method = methods.create("fedas")
    clean = method.to_noise({TRACE: np.array([1000.0])})
    assert clean[TRACE][0] == pytest.approx(6.9088, abs=1e-4)
    assert method.from_noise(clean)[TRACE][0] == pytest.approx(1000.0)
    assert method.from_noise({TRACE: np.array([-3.0])})[TRACE][0] == 0.0
    assert method.objection(method.from_noise({TRACE: np.array([1e9])})) == ""
