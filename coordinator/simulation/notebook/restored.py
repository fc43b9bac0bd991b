"""The clients of a finished run with their models and samples: what each of them answers with after the run."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from edge_agent.client import Arrays, Built, ClientState, Session
from edge_agent.core.errors import UsageError
from edge_agent.core.storage import sha256_of
from edge_agent.core.task import ImageInput, State, Task
from edge_agent.data import Samples
from edge_agent.data.preprocess import normalise_images
from edge_agent.methods import Method
from edge_agent.methods.values import Client
from edge_agent.run_folder.client_state import LAST_ROUND
from edge_agent.wire.tensors import decode

from ...state.store import StateFolder
from ..client_tasks import state_files_in
from ..finished import finished_record
from ..setup import CLIENTS, PARTITION, Prepared, computing_as_begun, read_plan
from .tables import joined


@dataclass(frozen=True)
class TestAnswers:
    """The answers of one client to its test samples.

    Attributes:
        labels: The classes that they have, (n,) int64.
        answers: The classes that the client's model names, (n,) int64.
    """

    labels: np.ndarray
    answers: np.ndarray


class PersonalModel:
    """The model that one client answers with after the run, with the samples that it was made from.

    ``model(inputs)`` and ``model.predict_proba(inputs)`` are probabilities (n, K) float32, ``model.predict(inputs)``
    the names of the classes (n,). Inputs are pixels (n, height, width) or (n, height, width, channels) uint8 of the
    task's size, or what an encoder takes, float32: ``module`` is that encoder with the other parts, a torch module.
    """

    def __init__(self, session: Session, client: Client) -> None:
        self.session = session
        self.client = client

    @property
    def module(self) -> nn.Module:
        """The torch module with the client's weights. Some methods answer by more than it: `predict_proba` does all."""
        return self.client.model

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the probabilities."""
        return self.client.task.class_names

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Return `predict_proba` of the inputs."""
        return self.predict_proba(inputs)

    def predict_proba(self, inputs: np.ndarray) -> np.ndarray:
        """Return probabilities (n, K) float32.

        Raises:
            UsageError: The inputs have another shape.
        """
        tensor = torch.from_numpy(_prepared(np.asarray(inputs), self.client.task)).to(self.client.device)
        return probabilities(self.session, self.client, tensor)

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Return the name of the most probable class of each input, (n,) of text.

        Raises:
            UsageError: The inputs have another shape.
        """
        names: np.ndarray = np.asarray(self.classes)[self.predict_proba(inputs).argmax(axis=1)]
        return names

    def score(self, inputs: np.ndarray, names: Sequence[str]) -> float:
        """Return the share (0..1) of inputs whose most probable class has this name.

        Raises:
            UsageError: The inputs have another shape or number, or a name is that of no class.
        """
        expected = np.asarray(names).astype(str)
        strangers = sorted(set(expected.ravel().tolist()) - set(self.classes))
        if strangers:
            raise UsageError(
                f"names: {joined(strangers)}: of no class; expected names such as {joined(self.classes)}. Where those "
                "are positions of classes, give numpy.asarray(model.classes)[positions]"
            )
        answers = self.predict(inputs)
        if expected.shape != answers.shape:
            raise UsageError(f"names: shape {expected.shape}, expected {answers.shape}, one for each input")
        return float(np.mean(answers == expected))

    def __repr__(self) -> str:
        parts = ", ".join(name for name, _ in self.client.model.named_children())
        return f"PersonalModel(client {self.client.id}, {len(self.classes)} classes, parts: {parts})"


@dataclass(frozen=True)
class RestoredRun:
    """A finished run: its plan with the data, its last state, and the folder of its clients' states.

    Attributes:
        prepared: Plan, data, partition, method and model.
        state: The last state of the coordinator.
        folder: The folder of the run.
        run: The name of the run.
    """

    prepared: Prepared
    state: State
    folder: Path
    run: str
    _answers: dict[str, TestAnswers] = field(default_factory=dict)

    @classmethod
    def at(cls, folder: Path) -> RestoredRun:
        """Read the run in ``folder``.

        Raises:
            UsageError: There is no finished run.
            DataError: Its data are not there any more, or differ.
            StateError: Files are damaged.
        """
        record = finished_record(folder)
        plan = read_plan(folder)
        if plan is None:
            raise UsageError(f"{folder} holds no simulation any more; open the result again")
        with _same_threads(), StateFolder(folder).look() as state:
            prepared = computing_as_begun(state, record.run, Prepared.of(plan, folder / PARTITION))
            return cls(prepared, decode(state.blobs.read(record.checkpoint or "")), folder, record.run)

    @property
    def method(self) -> Method:
        """The method of the run."""
        return self.prepared.method

    @property
    def task(self) -> Task:
        """The task of the run."""
        return self.prepared.task

    @property
    def without_model(self) -> frozenset[str]:
        """Clients that fit a head at the end of a run, and keep no model."""
        return frozenset((*self.prepared.new_clients, *self.prepared.head_clients))

    def samples_of(self, client: str) -> tuple[Samples, Samples]:
        """Return training and test samples of a client."""
        return self.prepared.pools.rows_of(self.prepared.division.clients[client])

    def raw_tests_of(self, client: str) -> Samples:
        """Return the test samples of a client as they are kept: images of 8 bits are not normalised."""
        pools = self.prepared.pools
        kept = pools.train if pools.test is None else pools.test
        return kept.take(np.asarray(self.prepared.division.clients[client].test, np.int64))

    def model_of(self, client: str) -> PersonalModel:
        """Return a client's model as it is after the run, which shares nothing with other ones.

        Raises:
            UsageError: The client fits a head at the end of a run, and keeps no model.
            StateError: The state of the client is damaged.
        """
        built = self.prepared.model
        own = Built(copy.deepcopy(built.model), built.fresh)
        return PersonalModel(*self.client_with(client, own))

    def client_with(self, client: str, model: Built) -> tuple[Session, Client]:
        """Return the session of a client, and the client with its weights loaded into ``model``.

        Raises:
            UsageError: The client fits a head at the end of a run, and keeps no model.
            StateError: The state of the client is damaged.
        """
        if client in self.without_model:
            raise UsageError(
                f"client '{client}' takes part without torch, or never trained: it fits a head at the end, which is "
                "not kept; choose another client"
            )
        plan = self.prepared.plan
        train, test = self.samples_of(client)
        session = Session(
            self.method,
            self.task,
            client,
            Arrays(train.inputs, train.labels),
            Arrays(test.inputs, test.labels),
            seed=plan.seed,
            device=plan.device,
            model=model,
        )
        # What the client has received for the evaluation after the last round, and what it has kept of that.
        received = {**self.method.broadcast(self.state), **self.method.downlink(self.state, client)}
        kept = ClientState(*state_files_in(self.folder / CLIENTS, client, self.run).before(LAST_ROUND + 1))
        return session, session.before_round(received, kept, round_number=plan.rounds, rounds=plan.rounds, salt=1)

    def answers_of(self, client: str) -> TestAnswers:
        """Return a client's answers to its test samples; computed once.

        Raises:
            UsageError: The client keeps no model.
            StateError: The state of the client is damaged.
        """
        if client not in self._answers:
            with _same_threads():
                torch.set_num_threads(self.prepared.plan.threads or torch.get_num_threads())
                session, restored = self.client_with(client, self.prepared.model)
                inputs, labels = session.test
                named = np.empty(0, np.int64)
                if len(labels):
                    named = probabilities(session, restored, inputs).argmax(axis=1)
            self._answers[client] = TestAnswers(labels.cpu().numpy(), named)
        return self._answers[client]

    def digest_of_tests(self, client: str) -> str:
        """Return the SHA-256 of a client's test samples and their labels (hex)."""
        test = self.raw_tests_of(client)
        return sha256_of(np.ascontiguousarray(test.inputs).tobytes(), np.ascontiguousarray(test.labels).tobytes())


def probabilities(session: Session, client: Client, inputs: torch.Tensor) -> np.ndarray:
    """Return a client's answers (n, K) float32, as it gives them in the evaluation after the last round."""
    with session.own_statistics(client):
        return session.method.predict(client, inputs).cpu().numpy()


def _prepared(inputs: np.ndarray, task: Task) -> np.ndarray:
    """Return inputs (n, …) as the encoder takes them, float32.

    Raises:
        UsageError: They have another shape.
    """
    spec = task.input
    shape = task.input_shape
    if inputs.shape[1:] == shape and inputs.dtype != np.uint8:
        return np.ascontiguousarray(inputs, np.float32)
    wanted = f"float32 of shape (n, {', '.join(map(str, shape))})"
    if isinstance(spec, ImageInput):
        pixels = inputs[..., None] if inputs.ndim == 3 else inputs
        expected = (spec.height, spec.width, spec.channels)
        if pixels.dtype == np.uint8 and pixels.shape[1:] == expected:
            return normalise_images(pixels.transpose(0, 3, 1, 2).astype(np.float32), spec)
        wanted = f"uint8 of shape (n, {', '.join(map(str, expected))}), or {wanted}"
    raise UsageError(f"inputs: {inputs.dtype} of shape {inputs.shape}, expected {wanted}")


@contextmanager
def _same_threads() -> Iterator[None]:
    """Put the number of torch's threads back at the end."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
