"""A client's round of FedPAC against a numpy twin, and what it tells."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paper_methods import fedpac, softmax

from edge_agent import heads, methods
from edge_agent.client import Arrays, ClientState, Session
from edge_agent.core.errors import TrainingFailed
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.heads import FitData
from edge_agent.heads.fedpac import FedPACHead
from edge_agent.methods.values import Update
from edge_agent.training.loops import TrainingOptions, features_of, train
from edge_agent.wire.tensors import encode, specs_of

TINY = Task(
    input=WindowInput(channels=1, length=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 2},
)
ENCODER = ("encoder.layers.1.weight", "encoder.layers.1.bias")


class Twin:
    """A round of FedPAC on the two-layer linear network, with gradients by hand, in float64."""

    def __init__(self, weights, inputs, labels, rng, params):
        self.w, self.b, self.head, self.bias = (w.astype(np.float64).copy() for w in weights)
        self.x = inputs.reshape(len(labels), -1).astype(np.float64)
        self.y = labels
        self.rng = rng
        self.p = params

    def features(self):
        return self.x @ self.w.T + self.b

    def means(self):
        z = self.features()
        return np.stack([z[self.y == k].mean(axis=0) if (self.y == k).any() else np.zeros(2) for k in range(3)])

    def descend(self, arrays, gradients, lr, epochs):
        speed = [np.zeros_like(a) for a in arrays]
        for _ in range(epochs):
            order = self.rng.permutation(len(self.y))
            size = self.p.batch_size
            cuts = [c for c in range(size, len(order), size) if len(order) - c != 1]
            for rows in np.split(order, cuts):
                for array, velocity, gradient in zip(arrays, speed, gradients(rows), strict=True):
                    velocity[...] = self.p.momentum * velocity + gradient + self.p.weight_decay * array
                    np.subtract(array, lr * velocity, out=array)

    def head_gradients(self, rows):
        z = self.features()[rows]
        error = (softmax(z @ self.head.T + self.bias) - np.eye(3)[self.y[rows]]) / len(rows)
        return error.T @ z, error.sum(axis=0)

    def encoder_gradients(self, targets):
        def gradients(rows):
            z = self.features()[rows]
            error = (softmax(z @ self.head.T + self.bias) - np.eye(3)[self.y[rows]]) / len(rows)
            back = error @ self.head
            if targets is not None:  # lambda * mean over rows and features of (z - c)^2
                back = back + self.p.alignment_weight * 2 * (z - targets[self.y[rows]]) / z.size
            return back.T @ self.x[rows], back.sum(axis=0)

        return gradients

    def run(self, centroids=None, counts=None):
        products = np.eye(3)[self.y][:, :, None] * self.features()[:, None, :]
        h = products.mean(axis=0)
        v = ((products - h) ** 2).sum(axis=(1, 2)).mean() / len(self.y)
        before = self.means()
        self.descend((self.head, self.bias), self.head_gradients, self.p.head_lr, self.p.head_epochs)
        targets = None if counts is None else np.where(counts[:, None] > 0, centroids, before)
        self.descend((self.w, self.b), self.encoder_gradients(targets), self.p.lr, self.p.local_epochs)
        return v, h, self.means()


def tiny(federation, labels, **params):
    method = methods.create("fedpac", {"batch_size": 3, "local_epochs": 2, "lr": 0.05, "min_class_count": 1, **params})
    fed = federation(method, TINY, labels={"x": []})
    fed.clients.clear()
    for salt, (name, own) in enumerate(labels.items()):
        client = fed.join(name, [])
        client.train_inputs = torch.randn(len(own), 1, 4, generator=torch.Generator().manual_seed(salt))
        client.train_labels = torch.tensor(own)
    return fed


@pytest.mark.parametrize("aligned", [False, True])
def test_a_clients_round_equals_its_numpy_twin(federation, aligned):
    """Class 2 has no common centroid: its samples are drawn to the client's own mean before training."""
    fed = tiny(federation, {"a": [0, 1, 2, 1, 0, 2, 2]}, alignment_weight=3.0)
    client = fed.clients["a"]
    received = {}
    if aligned:
        received = {
            "extra.centroids": np.float32([[1, -1], [0.5, 2], [0, 0]]),
            "extra.counts": np.array([4, 3, 0]),
        }
    weights = [client.model.state_dict()[name].numpy() for name in (*ENCODER, "head.weight", "head.bias")]
    twin = Twin(
        weights,
        client.train_inputs.numpy(),
        client.train_labels.numpy(),
        np.random.default_rng([0, 1]),
        fed.method.params,
    )
    client.rng = np.random.default_rng([0, 1])
    sent = fed.method.local_update(client, received)
    v, h, means = twin.run(received.get("extra.centroids"), received.get("extra.counts"))
    assert sent["extra.variance"][0] == pytest.approx(v, rel=1e-5)
    by_hand = {
        "extra.weighted_means": h,
        "extra.centroids": means,
        "extra.head.weight": twin.head,
        "extra.head.bias": twin.bias,
        ENCODER[0]: twin.w,
        ENCODER[1]: twin.b,
    }
    for name, expected in by_hand.items():
        np.testing.assert_allclose(sent[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(sent["extra.counts"], [2, 2, 3])


def test_the_alignment_loss_by_hand_and_by_finite_differences(federation):
    """z = x W' + b; loss = CE + lambda / (B d) sum |z - c_y|^2, here in float64."""
    fed = tiny(federation, {"a": [0, 1, 2, 1]}, alignment_weight=2.5)
    model = fed.clients["a"].model.double()
    inputs = fed.clients["a"].train_inputs.double()
    labels = fed.clients["a"].train_labels
    targets = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]], dtype=torch.float64)
    loss = fed.method.aligned_loss(model, targets)
    z = model.features(inputs)
    plain = torch.nn.functional.cross_entropy(model.head(z), labels)
    by_hand = plain + 2.5 * sum(((z[i] - targets[y]) ** 2).sum() for i, y in enumerate(labels)) / (4 * 2)
    assert loss(inputs, labels).item() == pytest.approx(by_hand.item(), rel=1e-12)
    weight = model.encoder.layers[1].weight
    loss(inputs, labels).backward()
    with torch.no_grad():
        for place in ((0, 0), (1, 3)):
            values = []
            for step in (1e-6, -1e-6):
                weight[place] += step
                values.append(loss(inputs, labels).item())
                weight[place] -= step
            assert weight.grad[place].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5)


def test_the_epoch_on_cached_features_equals_the_one_through_the_frozen_encoder(federation):
    fed = federation(fedpac(head_epochs=3))
    client = fed.clients["a"]
    twin = fed.fresh_model(1)
    labels = client.train_labels
    fed.method.train_head(client, features_of(client.model, client.train_inputs).numpy())
    plain = fed.join("twin", [0, 1] * 5)
    plain.model = twin
    plain.train_inputs = client.train_inputs
    plain.train_labels = labels
    plain.rng = np.random.default_rng([0, 1])
    loss = lambda x, y: torch.nn.functional.cross_entropy(twin(x), y)
    train(plain, loss, fed.method.params, lr=0.1, options=TrainingOptions(epochs=3, batch_size=4, frozen=("encoder",)))
    assert not torch.equal(client.model.head.weight, fed.fresh_model(1).head.weight)
    torch.testing.assert_close(client.model.head.weight, twin.head.weight, atol=1e-5, rtol=0)
    torch.testing.assert_close(client.model.head.bias, twin.head.bias, atol=1e-5, rtol=0)


def test_statistics_come_before_training_and_class_means_after(federation):
    fed = federation(fedpac(lr=0.1))
    client = fed.clients["b"]
    fed.download("b")
    before = features_of(client.model, client.train_inputs).numpy().astype(np.float64)
    sent = fed.method.local_update(client, {})
    after = features_of(client.model, client.train_inputs).numpy().astype(np.float64)
    labels = client.train_labels.numpy()
    for k in (1, 2):
        share = (labels == k).mean()
        np.testing.assert_allclose(sent["extra.weighted_means"][k], share * before[labels == k].mean(axis=0), atol=1e-5)
        np.testing.assert_allclose(sent["extra.centroids"][k], after[labels == k].mean(axis=0), atol=1e-5)
    assert not np.allclose(before, after, atol=1e-3)
    assert sent["extra.counts"].tolist() == [0, 4, 4]
    assert not sent["extra.centroids"][0].any()


def test_the_first_round_aligns_nothing_and_the_second_does(federation):
    weak, strong = (federation(fedpac(alignment_weight=weight), seed=1) for weight in (0.0, 1.0))
    for fed in (weak, strong):
        fed.run_round()
    assert encode(weak.state) == encode(strong.state)
    for fed in (weak, strong):
        fed.run_round()
    assert encode(weak.state) != encode(strong.state)


def test_alignment_draws_features_to_the_common_centroids(federation):
    distances = {}
    for weight in (0.0, 10.0):
        fed = federation(fedpac(alignment_weight=weight, local_epochs=8, batch_size=5, lr=0.05), rounds=3)
        fed.run()
        centroids = fed.state["extra.centroids"]
        client = fed.clients["a"]
        z = features_of(client.model, client.train_inputs).numpy()
        spread = np.linalg.norm(centroids[0] - centroids[1])
        distances[weight] = np.linalg.norm(z - centroids[client.train_labels.numpy()], axis=1).mean() / spread
    assert distances[10.0] < 0.8 * distances[0.0]


def test_a_diverging_alignment_is_named_and_stops_the_update(federation):
    fed = federation(fedpac(alignment_weight=1e30))
    fed.run_round()  # nothing is aligned yet
    with pytest.raises(
        TrainingFailed, match=r"client '[abc]'.*alignment_weight \(lambda\) 1e\+30.*lower lr or alignment"
    ):
        fed.run_round()


def test_a_last_step_that_diverges_is_noticed_in_the_features(federation):
    fed = federation(fedpac(lr=1e38, local_epochs=1, batch_size=100))
    with pytest.raises(TrainingFailed, match="features hold NaN or infinity in round 1"):
        fed.run_round()


def test_features_are_taken_in_eval_mode(federation):
    """With E = 0 nothing trains the encoder, so its batch norm statistics must not move."""
    fed = federation(fedpac(local_epochs=0))
    before = {name: array.copy() for name, array in fed.state.items()}
    (update, *_) = fed.run_round()
    assert any(name.endswith("running_mean") for name in before)
    for name, array in before.items():
        np.testing.assert_array_equal(update.tensors[name], array)


@pytest.mark.parametrize("mode", ["qp", "prototype_loss"])
def test_a_device_without_torch_tells_what_the_method_tells(federation, mode):
    """With E = 0 the encoder of both stays; 1e-5 is float32 after 10 steps."""
    params = {"local_epochs": 0, "batch_size": 3, "head_epochs": 2, "weights": mode}
    fed = federation(methods.create("fedpac", params), labels={"a": [0, 1, 2] * 5})
    fed.run_round()
    client = fed.clients["a"]
    received = fed.download("a")
    features = features_of(client.model, client.train_inputs).numpy()
    data = FitData(features, client.train_labels.numpy(), 3, method_params=fed.method.params.model_dump(mode="json"))
    client.rng = np.random.default_rng(5)
    expected = fed.method.local_update(client, received)
    found = FedPACHead.contribute(data, received, np.random.default_rng(5))
    declared = fed.method.sends(client.model, fed.task)
    assert specs_of(found) == specs_of(declared)
    assert {name for name in expected if name.startswith("extra.")} == set(found)
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5, err_msg=name)
    assert not np.allclose(found["extra.head.weight"], received["head.weight"], atol=1e-3)


def test_the_device_head_gets_the_parameters_of_the_classifiers_epoch():
    method = fedpac(head_lr=0.3, head_epochs=2, momentum=0.1, lr=0.9)
    head = heads.create("fedpac", method.head_params("fedpac"))
    assert (head.params.lr, head.params.epochs, head.params.momentum, head.params.batch_size) == (0.3, 2, 0.1, 4)
    assert method.head_params("lr") == {}


def test_a_single_samples_features_are_never_sent(federation):
    fed = federation(fedpac(), labels={"a": [0, 0, 0, 1], "b": [0, 1, 2]})
    ups = {update.client: update.tensors for update in fed.run_round()}
    np.testing.assert_array_equal(ups["a"]["extra.counts"], [3, 0, 0])
    assert not ups["a"]["extra.centroids"][1:].any()
    assert not ups["a"]["extra.weighted_means"][1:].any()
    for name in ("counts", "centroids", "weighted_means", "variance"):
        assert not ups["b"][f"extra.{name}"].any()
    open_one = federation(fedpac(min_class_count=1), labels={"a": [0, 0, 0, 1]})
    (update,) = open_one.run_round()
    np.testing.assert_array_equal(update.tensors["extra.counts"], [3, 1, 0])


def test_both_accuracies_are_told_before_and_after_training(images):
    method = fedpac()
    inputs, labels = (t.numpy() for t in images([0, 1, 2] * 6, seed=3))
    task = Task(
        input=ImageInput(channels=1, height=8, width=8),
        class_names=("l", "m", "r"),
        encoder="small_cnn",
        encoder_params={"feature_dim": 12, "width": 4},
    )
    session = Session(method, task, "a", Arrays(inputs, labels), Arrays(inputs, labels), seed=0, device="cpu")
    fresh = session.train({}, ClientState(), round_number=1, rounds=2, evaluate=True)
    assert {"acc.personal", "acc.after.personal", "loss", "head_loss"} == set(fresh.metrics)
    state = method.aggregate({}, [Update("a", 18.0, fresh.update)])
    received = {**method.broadcast(state), **method.downlink(state, "a")}
    again = session.train(received, fresh.kept, round_number=2, rounds=2, evaluate=True)
    # Alone, the combination is the client's own classifier, and the mean encoder its own.
    assert again.metrics["acc.personal"] == fresh.metrics["acc.after.personal"]
