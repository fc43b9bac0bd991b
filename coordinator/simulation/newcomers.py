"""Clients that come when training is over: they take the encoder as it is and fit a head on it, as a device does."""

from __future__ import annotations

import numpy as np

from edge_agent import heads
from edge_agent.client.session import ClientState, Session
from edge_agent.heads import FitData
from edge_agent.task import Tensors
from edge_agent.training.loops import accuracy, features_of


def fit_head(session: Session, received: Tensors, *, rounds: int) -> tuple[str, float | None, float | None]:
    """(head, accuracy of the shared model, accuracy of the head), the latter on the client's own test samples.

    ``received`` holds the pooled batch norm as well where that stays with clients. The head is the first of those that
    the method's bundle offers, with the parameters that the bundle suggests. Where
    a method shares no encoder, there is nothing to take: the model is the one that everybody starts from.
    """
    method = session.method
    if "encoder" not in method.shared or not method.heads:
        outcome = session.finish(received, ClientState(), rounds=rounds)
        return method.head_name, outcome.metrics.get("acc.global"), outcome.metrics.get("acc.personal")
    client = session.before_round(received, ClientState(), round_number=rounds, rounds=rounds)
    name = method.heads[0]
    head = heads.create(name, method.head_params(name))
    params = method.params.model_dump()
    features = features_of(client.model, client.train_inputs).cpu().numpy()
    labels = client.train_labels.cpu().numpy()
    head.fit(FitData(features, labels, client.task.num_classes, method.global_head(received), params), client.rng)
    inputs, truth = session.test
    if not len(truth):
        return name, None, None
    shared = method.predict_global(client, inputs)
    found = head.predict_proba(features_of(client.model, inputs).cpu().numpy()).argmax(axis=1)
    overall = None if shared is None else accuracy(shared, truth)
    return name, overall, float(np.mean(found == truth.cpu().numpy()))
