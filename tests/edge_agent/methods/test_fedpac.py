"""FedPAC: a whole client round against a numpy twin, the coordinator's half against hand-worked numbers."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from edge_agent import heads, methods
from edge_agent.errors import ConfigError, TrainingFailed
from edge_agent.heads import FitData
from edge_agent.heads.fedpac import contribute
from edge_agent.methods.base import Update
from edge_agent.methods.fedpac import _Member, prototype_losses
from edge_agent.task import ImageInput, Task, WindowInput
from edge_agent.training.loops import features_of, local_optimizer, train_epochs
from edge_agent.training.session import Arrays, Kept, Session
from edge_agent.wire.tensors import decode, encode, specs_of

TINY = Task(
    input=WindowInput(channels=1, length=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 2},
)
ENCODER = ("encoder.layers.1.weight", "encoder.layers.1.bias")
SMALL = {"local_epochs": 2, "batch_size": 4}


def fedpac(**params):
    return methods.create("fedpac", {**SMALL, **params})


def softmax(logits):
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


# --- one client's round ----------------------------------------------------------------------------------------------


class Twin:
    """A round of FedPAC on the two-layer linear network, with gradients by hand, in float64."""

    def __init__(self, weights, inputs, labels, rng, params):
        self.w, self.b, self.head, self.bias = (w.astype(np.float64).copy() for w in weights)
        self.x, self.y, self.rng, self.p = inputs.reshape(len(labels), -1).astype(np.float64), labels, rng, params

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
    inputs, labels = fed.clients["a"].train_inputs.double(), fed.clients["a"].train_labels
    targets = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]], dtype=torch.float64)
    loss = fed.method._loss(model, targets)
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
    client, twin = fed.clients["a"], fed.fresh_model(1)
    labels = client.train_labels
    fed.method._train_head(client, features_of(client.model, client.train_inputs).numpy())
    plain = fed.join("twin", [0, 1] * 5)
    plain.model, plain.train_inputs, plain.train_labels = twin, client.train_inputs, labels
    plain.rng = np.random.default_rng([0, 1])
    loss = lambda x, y: torch.nn.functional.cross_entropy(twin(x), y)
    train_epochs(
        plain,
        loss,
        local_optimizer(twin.head.parameters(), fed.method.params, lr=0.1),
        epochs=3,
        batch_size=4,
        frozen=("encoder",),
    )
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
    client, received = fed.clients["a"], fed.download("a")
    features = features_of(client.model, client.train_inputs).numpy()
    data = FitData(features, client.train_labels.numpy(), 3, method_params=fed.method.params.model_dump(mode="json"))
    client.rng = np.random.default_rng(5)
    expected = fed.method.local_update(client, received)
    found = contribute(data, received, np.random.default_rng(5))
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
    fresh = session.train({}, Kept(), round_number=1, rounds=2, evaluate=True)
    assert {"acc.personal", "acc.after.personal", "loss", "head_loss"} == set(fresh.metrics)
    state = method.aggregate({}, [Update("a", 18.0, fresh.update)])
    received = {**method.broadcast(state), **method.downlink(state, "a")}
    again = session.train(received, fresh.kept, round_number=2, rounds=2, evaluate=True)
    # Alone, the combination is the client's own classifier, and the mean encoder its own.
    assert again.metrics["acc.personal"] == fresh.metrics["acc.after.personal"]


# --- the coordinator's half ------------------------------------------------------------------------------------------


def update(client, weight=10.0, *, encoder=1.0, v=1.0, h=None, head=None, centroids=None, counts=(5, 5)):
    """An update of two classes and two features."""
    square = lambda array, default: np.float32(default if array is None else array)
    tensors = {
        "extra.variance": np.array([float(v)]),
        "extra.weighted_means": square(h, [[1, 0], [0, 1]]),
        "extra.head.weight": square(head, np.eye(2)),
        "extra.head.bias": np.float32([0, 0]),
        "extra.centroids": square(centroids, [[1, 0], [0, 1]]),
        "extra.counts": np.array(counts, np.int64),
    }
    if encoder is not None:
        tensors["encoder.w"] = np.float32([encoder])
    return Update(client, weight, tensors)


def by_hand():
    """The three clients whose weights are worked out in the combination's own tests."""
    near, far = [[4 / 3, 0], [0, 2 / 3]], [[0, 4 / 3], [4 / 3, 0]]
    return [
        update("a", 3, v=22 / 27, h=near, head=[[1, 0], [0, 0]]),
        update("b", 3, v=16 / 27, h=near, head=[[0, 1], [0, 0]]),
        update("c", 3, v=40 / 27, h=far, head=[[0, 0], [1, 0]]),
    ]


def test_each_client_gets_its_own_combination_of_classifiers():
    method = fedpac()
    state = method.aggregate({"encoder.w": np.float32([9])}, by_hand())
    names, weights = method.combination(state)
    assert names == ("a", "b", "c")
    expected = [[0.402051, 0.552821, 0.045128]] * 2 + [[0.082051, 0.112821, 0.805128]]
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    for name, row in zip(names, expected, strict=True):
        given = method.downlink(state, name)
        assert set(given) == {"head.weight", "head.bias"}
        np.testing.assert_allclose(given["head.weight"], [row[:2], [row[2], 0]], atol=1e-5)


def test_the_state_that_goes_out_holds_no_clients_classifier_nor_who_combines_whose():
    method = fedpac()
    state = method.aggregate({"encoder.w": np.float32([9])}, by_hand())
    assert set(method.broadcast(state)) == {"encoder.w", "extra.centroids", "extra.counts"}
    kept = decode(encode(state))
    assert method.combination(kept)[0] == ("a", "b", "c")
    np.testing.assert_array_equal(method.downlink(kept, "b")["head.weight"], method.downlink(state, "b")["head.weight"])


def test_any_agent_id_gets_its_own_head_back():
    names = ["0", "a", "a-", "a-weight", "a_b", "aa", "head-weight", "names", "z" * 63]
    method = fedpac(min_class_count=1)
    ups = [update(name, v=0.0, h=place * np.eye(2), head=place * np.eye(2)) for place, name in enumerate(names)]
    state = decode(encode(method.aggregate({}, ups)))
    for place, name in enumerate(names):
        np.testing.assert_allclose(method.downlink(state, name)["head.weight"], place * np.eye(2), atol=1e-6)
    assert method.downlink(state, "b") == method.downlink(state, "a-weigh") == {}


def test_who_sits_out_keeps_its_classifier_and_gets_encoder_and_centroids_anew():
    method = fedpac()
    first = method.aggregate({"encoder.w": np.float32([9])}, by_hand())
    ups = [update("a", encoder=4, head=7 * np.eye(2)), update("d", encoder=8, head=5 * np.eye(2))]
    second = method.aggregate(decode(encode(first)), ups)
    assert method.combination(second)[0] == ("a", "d")
    for name in ("b", "c"):
        for key, array in method.downlink(first, name).items():
            np.testing.assert_array_equal(method.downlink(second, name)[key], array)
    np.testing.assert_allclose(method.downlink(second, "d")["head.weight"], 6 * np.eye(2), atol=1e-5)
    assert second["encoder.w"] == 6.0
    assert second["clients.samples"].tolist() == [10, 3, 3, 10]


def test_a_client_that_drops_out_leaves_the_programme_whole():
    """Its variance, its h and its classifier are missing together: as if it had never been asked."""
    method = fedpac()
    left = method.aggregate({}, [by_hand()[0], by_hand()[2]])
    names, weights = method.combination(left)
    assert names == ("a", "c")
    # a_11 = (V_2 + D) / (V_1 + V_2 + D) with D = 52/9
    np.testing.assert_allclose(weights[0], [0.899083, 1 - 0.899083], atol=1e-5)
    np.testing.assert_allclose(method.downlink(left, "a")["head.weight"], [[0.899083, 0], [1 - 0.899083, 0]], atol=1e-5)


@pytest.mark.parametrize("weighting, expected", [("samples", [2, 1]), ("uniform", [3, 2])])
def test_centroids_by_hand(weighting, expected):
    """Means (1, 0) of 3 samples and (5, 4) of one: (3 * 1 + 5) / 4 = 2, 4 / 4 = 1; unweighted 3 and 2."""
    method = fedpac(centroid_weighting=weighting)
    ups = [
        update("a", 3, centroids=[[1, 0], [0, 0]], counts=(3, 0)),
        update("b", 1, centroids=[[5, 4], [0, 0]], counts=(1, 0)),
    ]
    state = method.aggregate({}, ups)
    np.testing.assert_allclose(state["extra.centroids"], [expected, [0, 0]], atol=1e-6)
    np.testing.assert_array_equal(state["extra.counts"], [4, 0])


def test_a_class_that_nobody_has_keeps_its_centroid():
    method = fedpac()
    first = method.aggregate({}, [update("a", centroids=[[1, 2], [3, 4]], counts=(5, 5))])
    second = method.aggregate(first, [update("a", centroids=[[9, 9], [0, 0]], counts=(10, 0))])
    np.testing.assert_allclose(second["extra.centroids"], [[9, 9], [3, 4]])
    np.testing.assert_array_equal(second["extra.counts"], [10, 5])


def test_a_client_speaks_for_no_more_samples_than_it_trained_on():
    honest = update("a", 10, centroids=[[1, 0], [0, 0]], counts=(10, 0))
    loud = update("b", 10, centroids=[[3, 0], [0, 0]], counts=(1_000_000, 0))
    state = fedpac().aggregate({}, [honest, loud])
    np.testing.assert_allclose(state["extra.centroids"][0], [2, 0])


def test_a_device_that_trains_no_encoder_joins_in_all_but_the_encoder():
    method = fedpac()
    a, b, c = by_hand()
    whole = method.aggregate({}, [a, b, c])
    small = Update("b", 300.0, {name: array for name, array in b.tensors.items() if name.startswith("extra.")})
    mixed = method.aggregate({}, [Update("a", 3.0, {**a.tensors, "encoder.w": np.float32([4])}), small, c])
    assert mixed["encoder.w"] == (4 + 1) / 2
    np.testing.assert_array_equal(mixed["mixing.weights"], whole["mixing.weights"])
    for name in "abc":
        for key, array in method.downlink(whole, name).items():
            np.testing.assert_array_equal(method.downlink(mixed, name)[key], array)
    only = method.aggregate({"encoder.w": np.float32([9])}, [small])
    assert only["encoder.w"] == 9.0
    assert method.combination(only)[0] == ("b",)


def test_a_round_of_nobody_is_refused():
    with pytest.raises(TrainingFailed, match="no update to aggregate"):
        fedpac().aggregate({}, [])


def test_who_tells_no_class_mean_keeps_its_own_and_lends_it_to_nobody():
    silent = update("b", v=0, h=np.zeros((2, 2)), head=3 * np.eye(2), centroids=np.zeros((2, 2)), counts=(0, 0))
    for mode in ("qp", "prototype_loss"):
        method = fedpac(weights=mode)
        state = method.aggregate({}, [update("a"), silent, update("c")])
        np.testing.assert_allclose(state["mixing.weights"], [[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]], atol=1e-6)
        nobody = method.aggregate({}, [silent])
        np.testing.assert_array_equal(nobody["mixing.weights"], [[1]])


def test_small_weights_of_the_programme_are_cut_off():
    """a_12 = V_1 / (V_1 + V_2 + D) = 1 / 2002 <= 1e-3 when D = 2000."""
    ups = [update("a", v=1, h=[[0, 0], [0, 0]]), update("b", v=1, h=[[np.sqrt(2000), 0], [0, 0]])]
    np.testing.assert_array_equal(fedpac().aggregate({}, ups)["mixing.weights"], np.eye(2))
    kept = fedpac(prune_below=0.0).aggregate({}, ups)["mixing.weights"]
    assert kept[0, 1] == pytest.approx(1 / 2002, rel=1e-4)


def test_updates_are_folded_in_one_at_a_time():
    """When the third encoder is asked for, the first one is gone."""
    alive = []

    def stream():
        for place, name in enumerate("abcd"):
            if place >= 2:
                assert alive[place - 2]() is None
            encoder = np.full(1000, float(place), np.float32)
            alive.append(weakref.ref(encoder))
            made = update(name)
            made.tensors["encoder.w"] = encoder
            del encoder
            yield made
            del made

    assert fedpac().aggregate({}, stream())["encoder.w"][0] == 1.5


def test_views_on_an_update_are_not_kept():
    """A mapped file stays open as long as any array of it is alive."""
    method = fedpac()
    members = [decode(encode(update(name).tensors)) for name in "ab"]
    state = method.aggregate({}, [Update(name, 1.0, tensors) for name, tensors in zip("ab", members, strict=True)])
    for array in state.values():
        assert not any(np.shares_memory(array, other) for tensors in members for other in tensors.values())


def test_the_exported_classifier_is_the_mean_of_the_clients_latest():
    method = fedpac()
    assert method.global_head({"encoder.w": np.float32([1])}) is None
    state = method.aggregate({}, [update("a", 1, v=0.0, head=np.eye(2), h=np.eye(2))])
    state = method.aggregate(state, [update("b", 3, v=0.0, head=5 * np.eye(2), h=9 * np.eye(2))])
    head = method.global_head(state)
    np.testing.assert_allclose(head["weight"], 4 * np.eye(2))  # (1 + 3 * 5) / 4
    assert head["bias"].shape == (2,)


def test_newcomers_start_from_their_own_classifier_or_from_the_mean():
    state = fedpac().aggregate({}, [update("a", head=3 * np.eye(2))])
    assert fedpac().downlink(state, "new") == {}
    given = fedpac(newcomers="mean").downlink(state, "new")
    np.testing.assert_allclose(given["head.weight"], 3 * np.eye(2))
    assert fedpac(newcomers="mean").downlink({"encoder.w": np.float32([1])}, "new") == {}


def test_answers_of_a_combined_classifier_are_the_combined_answers(federation, images):
    """sum_j a_ij phi_j(z) = (sum_j a_ij phi_j)(z), before the softmax."""
    fed = federation(fedpac())
    ups = fed.run_round()
    weights = fed.method.combination(fed.state)[1]
    fed.download("a")
    client = fed.clients["a"]
    inputs, _ = images([0, 1, 2, 0], seed=7)
    z = features_of(client.model, inputs).numpy()
    each = [z @ u.tensors["extra.head.weight"].T + u.tensors["extra.head.bias"] for u in ups]
    expected = softmax(sum(w * logits for w, logits in zip(weights[0], each, strict=True)))
    np.testing.assert_allclose(fed.method.predict(client, inputs).numpy(), expected, atol=1e-5)
    assert fed.method.predict_global(client, inputs) is None


def test_clients_of_one_group_combine_with_each_other(federation):
    """Six clients of two label groups: in both modes that look at labels, others of the group outweigh strangers."""
    labels = {f"{group}{n}": [group, group + 1] * 12 for group in (0, 1) for n in range(3)}
    same = np.array([[one[0] == other[0] for other in sorted(labels)] for one in sorted(labels)])
    mass = {}
    for mode, params in {
        "qp": {},
        "uniform": {"weights": "prototype_loss"},
        "prior": {"weights": "prototype_loss", "class_weighting": "label_prior"},
        "cold": {"weights": "prototype_loss", "temperature": 0.05},
    }.items():
        fed = federation(fedpac(**params, local_epochs=3, lr=0.05), rounds=3, labels=labels).run()
        mass[mode] = (fed.method.combination(fed.state)[1] * same).sum(axis=1).min()
    assert mass["qp"] > 0.95
    assert mass["uniform"] > 0.5
    assert mass["cold"] > mass["uniform"]
    assert mass["prior"] > 0.5


def test_personal_heads_beat_one_head_where_labels_conflict(federation, images):
    """The same picture means class 0 to some and class 1 to others: only combined heads can be right for both."""
    fed = federation(fedpac(local_epochs=4, lr=0.05, head_epochs=5), rounds=6, labels={n: [0, 1] * 12 for n in "abcd"})
    for name in "cd":
        fed.clients[name].train_labels = 1 - fed.clients[name].train_labels
    fed.run()
    inputs, labels = images([0, 1] * 15, seed=77)
    for name in fed.clients:
        fed.download(name)
        wanted = 1 - labels if name in "cd" else labels
        found = fed.method.predict(fed.clients[name], inputs).argmax(dim=1)
        assert (found == wanted).double().mean() > 0.9, name


# --- the report's modification ---------------------------------------------------------------------------------------


def modified(**params):
    return fedpac(weights="prototype_loss", **params)


def test_prototype_losses_by_hand():
    """Identity head, class means 2 e_k: CE = log(1 + e^-2) = .126928; swapped means: 2 more. Weights 1 : e^-2."""
    ups = [update("a", centroids=2 * np.eye(2)), update("b", centroids=2 * np.eye(2)[::-1])]
    members = [_Member(u.client, u.weight, {n.removeprefix("extra."): a for n, a in u.tensors.items()}) for u in ups]
    np.testing.assert_allclose(prototype_losses(members, by_prior=False), [[0.126928, 2.126928]] * 2, atol=1e-6)
    weights = modified().aggregate({}, ups)["mixing.weights"]
    np.testing.assert_allclose(weights, [[0.880797, 0.119203]] * 2, atol=1e-6)


def test_with_source_heads_rows_and_columns_change_places():
    """Heads I and 0, own means 2 e_k: target 1's means give .126928 under head I and log 2 under head 0."""
    ups = [update("a", centroids=2 * np.eye(2)), update("b", centroids=2 * np.eye(2), head=np.zeros((2, 2)))]
    by_target = modified().aggregate({}, ups)["mixing.weights"]
    np.testing.assert_allclose(by_target, 0.5, atol=1e-6)  # each head meets two equal sets of means
    by_source = modified(direction="source_head").aggregate({}, ups)["mixing.weights"]
    good, idle = np.exp(-0.126928), 0.5
    np.testing.assert_allclose(by_source, [[good / (good + idle), idle / (good + idle)]] * 2, atol=1e-6)


def test_label_priors_weigh_classes_by_their_owner():
    """Source b: class 0 right (.126928) in 9 of 10 samples, class 1 wrong (2.126928) in one."""
    ups = [update("a", centroids=2 * np.eye(2)), update("b", centroids=[[2, 0], [2, 0]], counts=(9, 1))]
    for weighting, loss in (("uniform", 1.126928), ("label_prior", 0.326928)):
        weights = modified(class_weighting=weighting).aggregate({}, ups)["mixing.weights"]
        odds = np.exp(-np.array([0.126928, loss]))
        np.testing.assert_allclose(weights[0], odds / odds.sum(), atol=1e-6)


def test_absent_classes_do_not_count_in_the_loss():
    ups = [update("a", centroids=[[2, 0], [0, 0]], counts=(5, 0)), update("b", centroids=2 * np.eye(2))]
    np.testing.assert_allclose(modified().aggregate({}, ups)["mixing.weights"], 0.5, atol=1e-6)


def test_temperature_sharpens():
    ups = [update("a", centroids=2 * np.eye(2)), update("b", centroids=2 * np.eye(2)[::-1])]
    weights = modified(temperature=0.5).aggregate({}, ups)["mixing.weights"]
    assert weights[0, 0] == pytest.approx(1 / (1 + np.exp(-4)), abs=1e-6)


def test_identical_clients_share_evenly_in_both_modes():
    for method in (fedpac(), modified(), modified(direction="source_head", class_weighting="label_prior")):
        weights = method.aggregate({}, [update(name) for name in "abcd"])["mixing.weights"]
        np.testing.assert_allclose(weights, 0.25, atol=1e-5)


def test_the_modification_sends_no_variance_and_no_label_shares(federation):
    fed = federation(modified())
    declared = fed.method.sends(fed.clients["a"].model, fed.task)
    assert set(declared) == {"extra.head.weight", "extra.head.bias", "extra.centroids", "extra.counts"}
    for sent in fed.run_round():
        assert set(sent.tensors) == {*fed.shared, *declared}
        assert fed.method.objection(sent.tensors) == ""


# --- what cannot be honest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, why",
    [
        ({"v": -1e-9}, "variance V is -1e-09, expected 0"),
        ({"v": 1e13}, "variance V is 1e+13"),
        ({"counts": (5, -1)}, "class counts from -1 to 5"),
        ({"counts": (5, 2_000_000_000)}, "class counts from 5 to 2000000000"),
        ({"h": [[1e7, 0], [0, 0]]}, "'extra.weighted_means' reaches 1e+07"),
        ({"centroids": [[0, 0], [0, -2e6]]}, "'extra.centroids' reaches 2e+06"),
        ({"head": [[1e30, 0], [0, 0]]}, "'extra.head.weight' reaches 1e+30"),
        ({"counts": (5, 0)}, "'extra.centroids' tells of a class whose count is 0"),
        ({"counts": (5, 0), "centroids": [[1, 1], [0, 0]]}, "'extra.weighted_means' tells of a class"),
    ],
)
def test_objections(wrong, why):
    assert why in fedpac().objection(update("a", **wrong).tensors)


def test_honest_updates_meet_no_objection():
    assert fedpac().objection(update("a").tensors) == ""
    assert (
        fedpac().objection(update("a", v=0, counts=(5, 0), h=[[1, 0], [0, 0]], centroids=[[1, 0], [0, 0]]).tensors)
        == ""
    )


def test_an_accepted_hostile_update_leaves_the_round_finite():
    """Everything at its limit, beside two honest clients."""
    extreme = update("c", v=1e12, h=1e6 * np.ones((2, 2)), head=-1e6 * np.eye(2), centroids=1e6 * np.ones((2, 2)))
    assert fedpac().objection(extreme.tensors) == ""
    state = fedpac().aggregate({}, [update("a", v=0.1), update("b", v=0.1), extreme])
    assert all(np.isfinite(array).all() for array in state.values())
    np.testing.assert_allclose(state["mixing.weights"][:2, :2], 0.5, atol=1e-3)


def test_impossible_parameters_are_all_named():
    with pytest.raises(ConfigError) as caught:
        methods.create("fedpac", {"weights": "best", "temperature": 0, "min_class_count": 0, "lambda": 1})
    assert len(caught.value.mistakes) == 4
