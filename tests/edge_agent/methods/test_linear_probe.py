"""The linear probe: a head of each client's own on an encoder that stays as it is, against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from edge_agent import methods
from edge_agent.core.errors import UnknownName
from edge_agent.training.loops import features_of
from edge_agent.wire.tensors import encode


def test_no_tensor_travels_back_and_the_encoder_stays(federation):
    fed = federation("linear_probe")
    before = encode(fed.state)
    updates = [*fed.run_round(), *fed.run_round()]
    assert [update.tensors for update in updates] == [{}] * len(updates)
    assert encode(fed.state) == before
    assert {name.split(".")[0] for name in fed.state} == {"encoder"}


def test_its_head_is_logistic_regression_on_the_features(federation, images):
    fed = federation("linear_probe", rounds=1).run()
    client = fed.clients["c"]
    fed.method.personalize(client, fed.download("c"))
    inputs, _ = images([0, 1, 2, 1], seed=5)
    scaler = StandardScaler().fit(features_of(client.model, client.train_inputs).numpy())
    twin = LogisticRegression(C=1.0, tol=1e-8, max_iter=10_000)
    twin.fit(scaler.transform(features_of(client.model, client.train_inputs).numpy()), client.train_labels.numpy())
    expected = twin.predict_proba(scaler.transform(features_of(client.model, inputs).numpy()))
    np.testing.assert_allclose(fed.method.predict(client, inputs).numpy(), expected, atol=2e-3)


def test_the_shared_model_answers_nothing(federation):
    fed = federation("linear_probe", rounds=1).run()
    client = fed.clients["a"]
    assert fed.method.predict_global(client, client.train_inputs) is None
    assert fed.method.global_head(fed.state) is None


def test_another_head_is_fitted_where_one_is_named(federation, make_method, images):
    inputs, _ = images([0, 1, 2, 1], seed=5)
    answers = {}
    for head in ("lr", "knn"):
        fed = federation(make_method("linear_probe", head=head), rounds=1).run()
        fed.download("c")
        answers[head] = fed.method.predict(fed.clients["c"], inputs).numpy()
        assert fed.method.head_name == head
    assert np.abs(answers["lr"] - answers["knn"]).max() > 0.01


def test_a_head_that_does_not_exist_is_named(federation, make_method):
    fed = federation(make_method("linear_probe", head="lrr"), rounds=1).run()
    with pytest.raises(UnknownName, match="did you mean 'lr'"):
        fed.method.predict(fed.clients["a"], fed.clients["a"].train_inputs)


def test_it_has_no_parameter_of_training_of_its_own():
    own = methods.get("linear_probe").Params.model_fields.keys() - methods.get("fedavg").Params.model_fields.keys()
    assert own == {"head", "head_params"}
