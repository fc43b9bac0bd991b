"""Simulated devices without torch: the update that they send in a round, and the head that they fit after the last.

A device computes its features by the exported graph of the encoder; here they are computed by the encoder in torch,
because a simulation exports none.
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
from edge_agent.personal.fitting import OF_STATISTICS, has_high_leverage
from edge_agent.personal.local.validation import folds
from edge_agent.training import feature_cache
from edge_agent.training.loops import accuracy
from edge_agent.wire.messages import down, up

from .plan import Plan


def check_head(plan: Plan) -> None:
    """Check the plan's head for devices without torch and new clients, before anything is computed.

    Raises:
        UsageError: No client fits the head, or the head needs a bundle.
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


@dataclass(frozen=True)
class HeadResult:
    """A head that a simulated device has fitted, with its answers on the device's own test samples."""

    name: str
    shared_accuracy: float | None
    """Accuracy of the shared model on the test samples, 0..1; None: there is no shared model, or no test sample."""

    is_right: np.ndarray | None
    """Whether the head is right on each test sample, (n,) bool; None: there is no test sample."""


def fit_head(session: Session, received: Tensors, *, rounds: int, head: str | None, contributors: int) -> HeadResult:
    """Fit a head on the frozen encoder and try it on the client's own test samples.

    Where the method shares no encoder, the head is the model that the client makes of the state that all start from.

    Args:
        session: The client's session.
        received: The last state, which holds the pooled batch norm as well where that stays with clients.
        rounds: Number of rounds of the run.
        head: The name of the head, or auto; None: the first of those that the method's bundle offers.
        contributors: Number of clients that the shared model has learned from; 0: this client is not one of them.
    """
    # 1. Without a shared encoder there are no features to fit a head on.
    method = session.method
    if "encoder" not in method.shared or not method.heads:
        outcome = session.finish(received, ClientState(), rounds=rounds)
        return HeadResult(method.head_name, outcome.metrics.get("acc.global"), outcome.right)
    # 2. The head, which auto chooses by cross-validation on the training samples.
    client = session.before_round(received, ClientState(), round_number=rounds, rounds=rounds)
    features, labels = _features_and_labels(client)
    device = _Device(method, client.task, features, labels, method.global_head(received))
    name = method.heads[0] if head is None else head
    if name == AUTO:
        # The shared classifier has learned from the samples of this client: cross-validation would overrate it.
        count, size = features.shape
        if contributors and has_high_leverage(count, contributors, size):
            device = replace(device, classifier=None)
        name = device.best_head()
    fitted = device.fit(name, slice(None), client.rng)
    # 3. Its answers, and those of the shared model, on the test samples.
    inputs, labels_of_test = session.test
    if not len(labels_of_test):
        return HeadResult(name, None, None)
    shared = method.predict_global(client, inputs)
    shared_accuracy = None if shared is None else accuracy(shared, labels_of_test)
    features_of_test = feature_cache.of_process.features_of(client.model, inputs).cpu().numpy()
    answers = fitted.predict_proba(features_of_test).argmax(axis=1)
    return HeadResult(name, shared_accuracy, np.asarray(answers == labels_of_test.cpu().numpy()))


@dataclass(frozen=True)
class _Device:
    """A device without torch that fits heads: its own features, and what it has received from the coordinator."""

    method: Method
    task: Task
    features: np.ndarray
    """(n, d) float32, of the training samples."""

    labels: np.ndarray
    """(n,) int64."""

    classifier: Tensors | None
    """The shared classifier; None: the method has none, or heads are to learn without it."""

    def fit(self, name: str, rows: slice | np.ndarray, rng: np.random.Generator) -> Head:
        """Return a head fitted on some rows of the features, with the parameters that the method suggests for it."""
        head = heads.create(name, self.method.head_params(name))
        params = self.method.params.model_dump()
        classes = self.task.num_classes
        head.fit(FitData(self.features[rows], self.labels[rows], classes, self.classifier, params), rng)
        return head

    def best_head(self) -> str:
        """Return the name of the head that the rule of devices chooses by cross-validation.

        There is no time limit, which would make the choice depend on the machine. Head `OF_STATISTICS` is left out: it
        needs sums of all devices' features, which are in a bundle, and a simulation makes none.
        """
        samples = Samples(self.features, self.labels, self.task.class_names, self.task.input)
        rng = np.random.default_rng(0)
        divisions = thin_out(self.labels, folds(samples, FOLDS, rng), rng)
        offered = [name for name in self.method.heads if name != OF_STATISTICS]
        names = candidates(offered, has_shared=self.classifier is not None)

        def fit_rows(name: str, rows: np.ndarray) -> Head:
            return self.fit(name, rows, np.random.default_rng(0))

        return choose(names, fit_rows, self.features, self.labels, divisions, clock=lambda: 0.0).name


def _features_and_labels(client: Client) -> tuple[np.ndarray, np.ndarray]:
    """Return the features (n, d) float32 of the client's training samples, and their classes (n,) int64."""
    features = feature_cache.of_process.features_of(client.model, client.train_inputs).cpu().numpy()
    return features, client.train_labels.cpu().numpy()
