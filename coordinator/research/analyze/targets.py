"""What an analysis works on: samples of clients, and the features that a client's model computes of them.

A target is a simulation (`coordinator.research.analyze.simulations`), a coordinator's run, or a bundle. Only a
simulation has the personal parts of clients; for the others a device head is fitted on the features of one encoder.
"""

from __future__ import annotations

import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import numpy as np

from edge_agent import data, heads, methods
from edge_agent.bundle import installed, unpacked
from edge_agent.bundle.unpacked import Bundle
from edge_agent.core.config import NAME_PATTERN
from edge_agent.core.errors import DataError, ExportRejected, HeadwaterError, UsageError
from edge_agent.core.task import State, Task, Tensors
from edge_agent.heads import FitData
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.personalize import global_probabilities
from edge_agent.wire.tensors import decode

from ...journal.store import Journal
from ...rounds.request import Request
from ...runs.release import pooled_before
from ...state.store import StateFolder, states_of
from ...views.runs import RunRecord, replay
from . import measures
from .settings import Location, Settings

Kind = Literal["simulation", "run", "bundle"]


@dataclass(frozen=True)
class LabelledSamples:
    """Samples, or features of samples, with their labels."""

    inputs: np.ndarray
    """Inputs (n, ...) float32."""

    labels: np.ndarray
    """Labels (n,) int64."""

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, count: int, seed: int) -> LabelledSamples:
        """Return at most ``count`` samples, drawn at random and left in their order."""
        if count >= len(self):
            return self
        rows = np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False))
        return LabelledSamples(self.inputs[rows], self.labels[rows])


@dataclass(frozen=True)
class ClientSamples:
    """The samples of one client: those to train on, and those held out."""

    train: LabelledSamples
    test: LabelledSamples


@dataclass(frozen=True)
class FeatureView:
    """Features that one client's model computes of its samples, and of those that all clients are compared on.

    The answers and the training features are details, which only the last round has.
    """

    client: str
    labels: np.ndarray
    """Class of each of the n test samples whose features are measured, (n,)."""

    kinds: Mapping[str, np.ndarray]
    """Kind of features -> features (n, d) of those samples."""

    probe: Mapping[str, np.ndarray]
    """Kind of features -> features (p, d) of the samples that all clients are compared on."""

    answers: Mapping[str, np.ndarray]
    """Scope -> predicted class of each of all t test samples, (t,)."""

    truth: np.ndarray
    """Class of each of all test samples, (t,)."""

    counts: np.ndarray
    """Number of training samples of each class, (K,)."""

    trained: LabelledSamples | None = None
    """The encoder's features (m, d) of the training samples, with their labels."""

    mask: np.ndarray | None = None
    """The mask (n, d) of a method that picks features; None where the method has none."""

    @property
    def features(self) -> np.ndarray:
        """The encoder's features (n, d)."""
        return self.kinds["encoder"]

    def features_to_draw(self) -> dict[str, np.ndarray]:
        """Return features to draw, by name: with a mask, those that it picks and those that it leaves."""
        if self.mask is None:
            return dict(self.kinds)
        return {"relevant": self.features * self.mask, "irrelevant": self.features * (1 - self.mask)}

    def is_finite(self) -> bool:
        """Return whether all features are finite numbers."""
        all_features = [*self.kinds.values(), *self.probe.values()]
        return all(np.isfinite(features).all() for features in all_features)


@dataclass
class LeftOut:
    """The parts of an analysis that could not be computed, each with one reason."""

    reasons: dict[str, str] = field(default_factory=dict)
    """Part -> why it could not be computed."""

    def note(self, part: str, reason: str) -> None:
        """Record why a part could not be computed; of several reasons the first one counts."""
        self.reasons.setdefault(part, reason)

    def body(self) -> list[dict[str, str]]:
        """Return the parts and their reasons as JSON."""
        return [{"what": part, "why": reason} for part, reason in self.reasons.items()]


@dataclass(frozen=True)
class Mixing:
    """The weights (m, m) that combined the classifiers of m clients; row i is for client i."""

    clients: tuple[str, ...]
    weights: np.ndarray


class AnalysisTarget(ABC):
    """A target of an analysis; subclasses define where states, samples and models come from."""

    kind: Kind

    def __init__(
        self,
        name: str,
        run: str,
        method: str,
        class_names: Sequence[str],
        *,
        clients: Iterable[str],
        rounds: Iterable[int],
    ) -> None:
        """Take what the result of the analysis says of its target.

        Args:
            name: The path or name under which it was given.
            run: The id of the run.
            method: The name of the method.
            class_names: The classes of the task.
            clients: The clients whose samples are known, sorted.
            rounds: The rounds whose states are available, ascending; the last one is analyzed in detail.
        """
        self.name = name
        self.run = run
        self.method = method
        self.class_names = tuple(class_names)
        self.clients = tuple(clients)
        self.rounds = tuple(rounds)
        self.left_out = LeftOut()

    @abstractmethod
    def samples_of(self, client: str) -> ClientSamples:
        """Return the samples of a client, those to train on and those held out."""

    @abstractmethod
    def feature_views(self, number: int, settings: Settings, probe: np.ndarray) -> Iterator[FeatureView]:
        """Yield the view of each client after a round, with details for the last round; ``probe`` (p, ...) inputs."""

    def mixing(self, number: int) -> Mixing | None:  # noqa: ARG002 - for methods that combine classifiers
        """Return how classifiers were combined in a round; None where they are not."""
        return None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of the run's ``metrics.jsonl``; none for a bundle."""
        return []

    def groups(self) -> dict[str, str]:
        """Return client -> name of its group of similar clients; empty where groups are not known."""
        return {}

    def clients_with_test_samples(self) -> tuple[str, ...]:
        """Return the clients that have test samples; the others are noted as left out."""
        result = []
        for client in self.clients:
            if len(self.samples_of(client).test):
                result.append(client)
            else:
                self.left_out.note(f"client {client}", "it has no test samples")
        return tuple(result)

    def probe(self, settings: Settings) -> np.ndarray:
        """Return inputs (p, ...) on which clients are compared: equally many of each client's test samples.

        Raises:
            DataError: No client has a test sample.
        """
        names = self.clients_with_test_samples()
        if not names:
            raise DataError(f"none of {len(self.clients)} clients has test samples; give more data")
        counts = {name: len(self.samples_of(name).test) for name in names}
        sizes = measures.spread_evenly(counts, settings.probe)
        inputs = list[np.ndarray]()
        for name in names:
            drawn = self.samples_of(name).test.some(sizes[name], settings.seed)
            inputs.append(drawn.inputs)
        return np.concatenate(inputs)


Features = Callable[[np.ndarray], np.ndarray]
"""Inputs (n, ...) in, features (n, d) float32 out."""

_NAMED = re.compile(r"([^=:?/]+)=(.+)", re.DOTALL)


def client_samples(sources: Sequence[str], task: Task, settings: Settings) -> dict[str, ClientSamples]:
    """Return client -> samples, sorted by client; they are split as a device would split them.

    Args:
        sources: ``NAME=SOURCE``, or a source alone, whose client is called after its path.
        task: The task that the samples have to fit.
        settings: The share that is held out, and the seed of that choice.

    Raises:
        UsageError: A name cannot be a client's, or occurs twice.
        DataError: Samples are missing, or of classes or a form that the task does not have.
    """
    clients: dict[str, ClientSamples] = {}
    for option in sources:
        name, source = parse_name_and_source(option)
        if name in clients:
            raise UsageError(f"--data {option}: client '{name}' occurs twice; name it differently: NAME=SOURCE")
        samples = data.load(source, task.input, task.class_names)
        train, test = data.split(samples, settings.test_fraction, settings.seed)
        clients[name] = ClientSamples(
            LabelledSamples(train.inputs, train.labels), LabelledSamples(test.inputs, test.labels)
        )
    return dict(sorted(clients.items()))


def parse_name_and_source(option: str) -> tuple[str, str]:
    """Return name and source of a value of ``--data``; a source without a name is called after its path.

    Raises:
        UsageError: The name cannot be a client's.
    """
    match = _NAMED.fullmatch(option)
    if match is None:
        return _name_after_path(option), option
    name, source = match.groups()
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(f"--data {option}: '{name}' cannot be a client's name, expected {NAME_PATTERN}")
    return name, source


def _name_after_path(source: str) -> str:
    """Return a client's name made of the last part of a source's path; ``data`` where nothing of it is left."""
    path, _, _ = source.partition("?")
    file_name = path.rstrip("/").rpartition("/")[2].rpartition(":")[2].lower()
    name = re.sub(r"[^a-z0-9_-]+", "-", file_name).strip("-_")[:50]
    return name or "data"


@dataclass(frozen=True)
class SharedEncoder:
    """One encoder for all clients, the shared classifier where there is one, and how a device head is fitted."""

    features: Features
    classifier: Tensors | None
    method_params: Mapping[str, Any]
    num_classes: int

    def view(
        self, client: str, mine: ClientSamples, settings: Settings, left_out: LeftOut, *, details: bool
    ) -> FeatureView:
        """Return the view of one client, with answers and training features where ``details`` are wanted."""
        some = mine.test.some(settings.samples, settings.seed)
        result = FeatureView(
            client=client,
            labels=some.labels,
            kinds={"encoder": self.features(some.inputs)},
            probe={},
            answers={},
            truth=mine.test.labels,
            counts=np.bincount(mine.train.labels, minlength=self.num_classes),
        )
        if not details or not result.is_finite():
            return result
        trained = LabelledSamples(self.features(mine.train.inputs), mine.train.labels)
        answers = dict(self._answers(client, self.features(mine.test.inputs), trained, settings, left_out))
        return replace(result, answers=answers, trained=trained)

    def _answers(
        self, client: str, tested: np.ndarray, trained: LabelledSamples, settings: Settings, left_out: LeftOut
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (scope, predicted class of each test sample), by the shared classifier and by a device head.

        Args:
            client: The client.
            tested: Features (t, d) of its test samples.
            trained: Features (m, d) of its training samples, with their labels.
            settings: The head, and the seed of its fit.
            left_out: Gets the reason where the head cannot be fitted.

        Raises:
            UsageError: There is no such head.
        """
        if self.classifier is not None:
            yield "global", global_probabilities(self.classifier, tested).argmax(axis=1)
        try:
            head = heads.create(settings.head)
            head.fit(
                FitData(trained.inputs, trained.labels, self.num_classes, self.classifier, self.method_params),
                np.random.default_rng(settings.seed),
            )
        except UsageError:
            raise
        except HeadwaterError as error:
            left_out.note(f"accuracies of client {client} with head {settings.head}", str(error))
            return
        yield settings.head, head.predict_proba(tested).argmax(axis=1)


class StoredRun(AnalysisTarget):
    """A run in a state folder, with the states of some of its rounds."""

    def __init__(
        self, name: str, folder: StateFolder, run: str, method: methods.Method, task: Task, clients: Iterable[str]
    ) -> None:
        with folder.look():
            self._states = states_of(folder, run)
        super().__init__(name, run, method.name, task.class_names, clients=clients, rounds=self._states)
        self._folder = folder
        self._method = method
        self._task = task

    def state(self, number: int) -> State:
        """Return the server's state after a round."""
        return decode(self._folder.blobs.read(self._states[number]))

    def mixing(self, number: int) -> Mixing | None:
        """Return the weights of a method that combines classifiers; None before the first round."""
        if not hasattr(self._method, "combination"):
            return None
        names, weights = self._method.combination(self.state(number))
        if not names:
            return None
        return Mixing(tuple(names), np.asarray(weights, np.float64))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of the run's ``metrics.jsonl``."""
        return self._folder.run(self.run).metrics()


class BundleTarget(AnalysisTarget):
    """One frozen encoder, without rounds, traffic or personal parts."""

    kind = "bundle"

    def __init__(self, path: Path, bundle: Bundle, held: dict[str, ClientSamples], encoder: Encoder) -> None:
        manifest = bundle.manifest
        names = manifest.task.class_names
        super().__init__(str(path), manifest.name, manifest.method, names, clients=held, rounds=(0,))
        self._held = held
        classifier = bundle.global_head()
        self._encoder = SharedEncoder(encoder.features, classifier, manifest.method_params, manifest.task.num_classes)
        self.left_out.note("communication", "a bundle has no figures of the run that it came from")
        self.left_out.note("client-wise CKA", "all clients use this one encoder, so it would be 1")
        self.left_out.note("personal parts (projector, mask, classifiers)", "they never leave their devices")

    @classmethod
    def at(cls, path: Path, location: Location, settings: Settings) -> BundleTarget:
        """Open the bundle at ``path``, a file or a folder.

        Raises:
            UsageError: No data were given.
            DataError: Data do not fit.
            BundleError: The bundle is damaged or of another version.
        """
        # A bundle that was unpacked for the analysis is removed with the target, or at once where that is not made.
        stack = ExitStack()
        try:
            bundle = _open_bundle(path, stack)
            if not location.data:
                raise UsageError(
                    f"{path} is a bundle and holds no samples: give --data NAME=SOURCE, once for each client, "
                    "for example --data a=images:photos"
                )
            samples = client_samples(location.data, bundle.manifest.task, settings)
            target = cls(path, bundle, samples, Encoder.open(bundle, "fp32", cache=False))
        except BaseException:
            stack.close()
            raise
        finalize(target, stack.close)
        return target

    def samples_of(self, client: str) -> ClientSamples:
        """Return the samples of a client, those to train on and those held out."""
        return self._held[client]

    def feature_views(self, number: int, settings: Settings, probe: np.ndarray) -> Iterator[FeatureView]:  # noqa: ARG002 - one encoder
        """Yield one view for each client."""
        for client in self.clients_with_test_samples():
            yield self._encoder.view(client, self._held[client], settings, self.left_out, details=True)


def _open_bundle(path: Path, stack: ExitStack) -> Bundle:
    """Open a bundle and verify it; a file is unpacked into a temporary folder, which ``stack`` removes.

    Raises:
        UsageError: The folder holds no bundle.
        BundleError: The bundle is damaged or of another version.
    """
    if path.is_file():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-analyze-")))
        return installed.install(path, folder / "bundles")
    if (path / "manifest.json").is_file():
        return unpacked.open_folder(path)
    bundle = installed.current(path / "bundles")
    if bundle is None:
        raise UsageError(f"{path}: no bundle in this folder; expected a bundle file or an agent's state folder")
    return bundle


BATCH = 512
"""The number of samples whose features are computed at once."""


def _newest_with_round(journal: Journal, names: Iterable[str]) -> RunRecord | None:
    """Return the first of these runs that has closed a round; None where none has."""
    for name in names:
        record = replay(journal, name)
        if record.round:
            return record
    return None


class RunTarget(StoredRun):
    """The coordinator's part of a run; personal parts stay on the devices."""

    kind = "run"

    def __init__(self, folder: StateFolder, run: str, request: Request, held: dict[str, ClientSamples]) -> None:
        super().__init__(
            str(folder.path), folder, run, methods.create(request.method_reference, request.params), request.task, held
        )
        self._held = held
        self.left_out.note("personal parts (projector, mask, classifiers)", "they never leave their devices")
        if held:
            self.left_out.note("client-wise CKA", "all clients receive this one encoder, so it would be 1")
        else:
            self.left_out.note("features and accuracies of classes", "no samples: give --data NAME=SOURCE")

    @classmethod
    def at(cls, state: Path, run: str | None, location: Location, settings: Settings) -> RunTarget:
        """Open the run of that name in a state folder; without a name the latest one with a closed round.

        Raises:
            UnknownName: There is no such run.
            UsageError: No run there has a closed round.
            StateError: There is no journal, or a damaged one.
        """
        folder = StateFolder(state)
        with folder.look():
            names = [run] if run else reversed(folder.journal.runs())
            record = _newest_with_round(folder.journal, names)
        if record is None and run:
            raise UsageError(f"{run} has no closed round yet; there is nothing to analyze before the first one")
        if record is None:
            raise UsageError(f"{folder.path}: no run has closed a round yet; 'headwater run' starts one")
        request = Request.from_fact(record.request)
        return cls(folder, record.run, request, client_samples(location.data, request.task, settings))

    def samples_of(self, client: str) -> ClientSamples:
        """Return the samples of a client, those to train on and those held out."""
        return self._held[client]

    def feature_views(self, number: int, settings: Settings, probe: np.ndarray) -> Iterator[FeatureView]:  # noqa: ARG002 - one encoder
        """Yield a view of each client; none where the encoder of that round is incomplete."""
        import torch

        from edge_agent.training.loops import features_of
        from export import model_from_state

        state = self.state(number)
        with self._folder.look():
            pooled = pooled_before(self._folder, self.run, number)
        try:
            model = model_from_state(self._method, self._task, {**state, **pooled})
        except ExportRejected as error:
            self.left_out.note(f"features after round {number}", str(error))
            return

        def features(inputs: np.ndarray) -> np.ndarray:
            tensor = torch.from_numpy(np.ascontiguousarray(inputs))
            computed: np.ndarray = features_of(model, tensor, BATCH).numpy()
            return computed

        classifier = self._method.global_head(state)
        classes = self._task.num_classes
        encoder = SharedEncoder(features, classifier, self._method.params.model_dump(mode="json"), classes)
        for client in self.clients_with_test_samples():
            details = number == self.rounds[-1]
            yield encoder.view(client, self._held[client], settings, self.left_out, details=details)
