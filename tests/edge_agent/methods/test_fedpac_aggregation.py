"""The coordinator's half of FedPAC against numbers worked out by hand, and what clients get from it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from paper_methods import fedpac, softmax
from paper_methods import fedpac_update as update

from edge_agent.core.errors import TrainingFailed
from edge_agent.methods.values import Update
from edge_agent.training.loops import features_of
from edge_agent.wire.tensors import decode, encode


def by_hand():
    """The three clients whose weights are worked out in the combination's own tests."""
    near = [[4 / 3, 0], [0, 2 / 3]]
    far = [[0, 4 / 3], [4 / 3, 0]]
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
    given = fedpac(new_clients="mean").downlink(state, "new")
    np.testing.assert_allclose(given["head.weight"], 3 * np.eye(2))
    assert fedpac(new_clients="mean").downlink({"encoder.w": np.float32([1])}, "new") == {}


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
