"""Simulated devices without torch: what they send in a round, and the head that they fit after it.

Features are those of the encoder in torch, which a device has as a graph: it is exported for no simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edge_agent import heads, methods
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.client import ClientState, Session
from edge_agent.core.errors import MissingCapability, UsageError
from edge_agent.core.task import Task, Tensors
from edge_agent.data import Samples
from edge_agent.heads import AUTO, FitData, Head
from edge_agent.methods import Client
from edge_agent.methods.base import Method
from edge_agent.personal.blend import BLEND
from edge_agent.personal.choice import FOLDS, candidates, choose, thin_out
from edge_agent.personal.fitting import OF_STATISTICS, pulls_too_much
from edge_agent.personal.local.validation import folds
from edge_agent.training.loops import accuracy, features_of
from edge_agent.wire.messages import down, up

from .plan import Plan


def check_head(plan: Plan) -> None:
    """Find mistakes in the head of devices without torch before anything is computed.

    Raises:
        UsageError: No client fits it, or it needs a bundle.
        UnknownName: No head has this name.
    """
    head = plan.head
    if head is None:
        return
    if not (plan.new_clients or plan.head_clients):
        raise UsageError(
            f"head = '{head}', and no client fits it; give new_clients or head_clients as well, or leave it out"
        )
    heads.check(head, {})
    if head in {OF_STATISTICS, BLEND}:
        raise UsageError(f"head = '{head}' needs a bundle, which no simulation makes; choose another, or auto")


def contribute(tasks: TaskRunner, job: down.Job, received: Tensors) -> up.UpdateManifest:
    """Take part in a round as a device without torch does, and put the update into the outbox.

    Raises:
        MissingCapability: The method has no half for such devices.
    """
    session = tasks.session(job)
    client = session.before_round(received, ClientState(), round_number=job.round, rounds=job.rounds)
    half = methods.contribution(session.method.name)
    if half is None:
        raise MissingCapability(f"method '{session.method.name}' has no half for devices without torch")
    features, labels = _features_and_labels(client)
    data = FitData(features, labels, client.task.num_classes, None, session.method.all_params())
    return tasks.offer(job, half(data, received, client.rng), client.samples, {})


def fit_head(
    session: Session, received: Tensors, *, rounds: int, head: str | None, contributors: int
) -> tuple[str, float | None, np.ndarray | None]:
    """Fit a head on the frozen encoder, and return its name, the shared model's accuracy, and the head's right answers.

    Args:
        session: The client's session.
        received: The last state, which holds the pooled batch norm as well where that stays with clients.
        rounds: Number of rounds of the run.
        head: The name of the head, or auto; None: the first of those that the method's bundle offers.
        contributors: Number of clients that the shared model has learned from; 0: this client is not one of them.

    Returns:
        The name of the head; the accuracy of the shared model on the client's own test samples, None where there is
        none; whether the head is right on each of them, (n,) bool, None without any. Where a method shares no encoder,
        the model is the one that all clients start from.
    """
    method = session.method
    if "encoder" not in method.shared or not method.heads:
        outcome = session.finish(received, ClientState(), rounds=rounds)
        return method.head_name, outcome.metrics.get("acc.global"), outcome.right
    client = session.before_round(received, ClientState(), round_number=rounds, rounds=rounds)
    features, labels = _features_and_labels(client)
    device = _Device(method, client.task, features, labels, method.global_head(received))
    name = method.heads[0] if head is None else head
    if name == AUTO:
        # Cross-validation on samples that the shared classifier knows would be too kind to it.
        count, size = features.shape
        if contributors and pulls_too_much(count, contributors, size):
            device = replace(device, classifier=None)
        name = device.best_head()
    fitted = device.fitted(name, slice(None), client.rng)
    inputs, truth = session.test
    if not len(truth):
        return name, None, None
    shared = method.predict_global(client, inputs)
    result = fitted.predict_proba(features_of(client.model, inputs).cpu().numpy()).argmax(axis=1)
    overall = None if shared is None else accuracy(shared, truth)
    return name, overall, np.asarray(result == truth.cpu().numpy())


@dataclass(frozen=True)
class _Device:
    """What a device without torch has when it fits a head: what came from the coordinator, and its own features."""

    method: Method
    task: Task
    features: np.ndarray
    """(n, d) float32, of the training samples."""

    labels: np.ndarray
    """(n,) int64."""

    classifier: Tensors | None
    """The shared classifier; None: there is none, or it is withheld."""

    def fitted(self, name: str, rows: slice | np.ndarray, rng: np.random.Generator) -> Head:
        """Return a head fitted on these rows, with the parameters that the method suggests."""
        head = heads.create(name, self.method.head_params(name))
        params = self.method.params.model_dump()
        classes = self.task.num_classes
        head.fit(FitData(self.features[rows], self.labels[rows], classes, self.classifier, params), rng)
        return head

    def best_head(self) -> str:
        """Return the head that is the surest in cross-validation, by the rule of devices.

        There is no limit of time, which would make the choice depend on the machine. The head that needs sums of all
        devices' features is left out: they are in a bundle, and no bundle is made.
        """
        samples = Samples(self.features, self.labels, self.task.class_names, self.task.input)
        rng = np.random.default_rng(0)
        divisions = thin_out(self.labels, folds(samples, FOLDS, rng), rng)
        offered = [name for name in self.method.heads if name != OF_STATISTICS]
        names = candidates(offered, has_shared=self.classifier is not None)

        def fit(name: str, rows: np.ndarray) -> Head:
            return self.fitted(name, rows, np.random.default_rng(0))

        return choose(names, fit, self.features, self.labels, divisions, clock=lambda: 0.0).name


def _features_and_labels(client: Client) -> tuple[np.ndarray, np.ndarray]:
    """Return the features (n, d) float32 of the client's training samples, and their classes (n,) int64."""
    features = features_of(client.model, client.train_inputs).cpu().numpy()
    return features, client.train_labels.cpu().numpy()
