"""The encoder that a run begins with: option ``--from``, which names a bundle or an earlier run, and notes on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent import models
from edge_agent.bundle.archive import open_bundle
from edge_agent.bundle.starter import NAME, bundle_path
from edge_agent.core.errors import UsageError
from edge_agent.core.task import EncoderTask, Task
from edge_agent.training.bundle_weights import is_bundle

from ..config import CoordinatorConfig
from ..state.store import StateFolder

if TYPE_CHECKING:
    from edge_agent.methods import Method

_WEIGHTS_OF_RUN = "encoder.safetensors"
"""Name of the file with the encoder of an earlier run, in the folder of that run."""

_SHAPE_FIELDS = frozenset({"kind", "channels", "height", "width", "length"})
"""The fields of a task's input that its shape is made of."""

_WEIGHTS_SUFFIXES = frozenset({".safetensors", ".pth", ".pt", ".bin"})
"""Suffixes of files that hold weights alone."""


@dataclass(frozen=True)
class Start:
    """An encoder to begin with: its weights, and the network and inputs that they belong to."""

    source: str
    """The bundle or run, as the user has named it."""

    weights: Path
    """The file of the weights: a bundle or a safetensors file."""

    task: EncoderTask | Task
    """The task that the encoder was trained on."""

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a simulation that begins with this encoder.

        Raises:
            UsageError: The network is not one of this project, or an option contradicts it.
        """
        self._check_network()
        options = {
            "encoder": self.task.encoder,
            "encoder_params": dict(self.task.encoder_params),
            "input": self.task.input.model_dump(mode="json", exclude={"kind"}),
            "weights": self.weights,
        }
        contradicting = [f"--{name.replace('_', '-')}" for name in options if name in given]
        if contradicting:
            raise UsageError(
                f"--from {self.source} says what the encoder is and takes; leave out {', '.join(contradicting)}"
            )
        return options

    def configure(self, settings: CoordinatorConfig) -> CoordinatorConfig:
        """Return a configuration whose runs begin with this encoder: with its network and inputs, and with own classes.

        Raises:
            UsageError: The network is not one of this project, or its inputs are of another kind than the task's.
        """
        own = settings.task
        if self.task.input.kind != own.input.kind:
            raise UsageError(
                f"--from {self.source}: its encoder takes {self.task.input.kind}s, and task.input.kind of the "
                f"configuration is '{own.input.kind}'; choose an encoder for {own.input.kind}s"
            )
        self._check_network()
        fields = ("input", "encoder", "encoder_params")
        task = own.model_copy(update={name: getattr(self.task, name) for name in fields})
        run = settings.run.model_copy(update={"weights": self.weights})
        return settings.model_copy(update={"task": task, "run": run})

    def _check_network(self) -> None:
        """Require that the network is one of this project, which can be built and trained.

        Raises:
            UsageError: The network is not one of this project.
        """
        if self.task.encoder not in models.names():
            raise UsageError(
                f"--from {self.source}: its network '{self.task.encoder}' cannot be trained here; devices can use the "
                "bundle as it is ('edge-agent fit --bundle'), and a run can begin with one of "
                f"{', '.join(models.names())}"
            )

    def differences(self, own: Task) -> str:
        """Return, for people, in what this encoder's task replaces the configuration's; empty: in nothing.

        Args:
            own: The task of the configuration.
        """
        # 1. The network, and the shape of its inputs.
        pairs: list[tuple[str, object, object]] = [
            ("encoder", self.task.encoder, own.encoder),
            ("inputs", self.task.input_shape, own.input_shape),
        ]
        # 2. The parameters of the network. Those of two different networks cannot be compared.
        if self.task.encoder == own.encoder:
            pairs.append(("encoder parameters", self.task.encoder_params, own.encoder_params))
        # 3. How inputs of that shape are prepared, such as their mean and std.
        own_input = own.input.model_dump()
        for name, value in self.task.input.model_dump().items():
            if name in own_input and name not in _SHAPE_FIELDS:
                pairs.append((name, value, own_input[name]))
        changes = [f"{name} {new} (not {replaced})" for name, new, replaced in pairs if new != replaced]
        return ", ".join(changes)


def notes_on_frozen_encoder(method: Method, rounds: int, *, began_trained: bool) -> Iterator[str]:
    """Yield, before a run begins, what a method that leaves the encoder as it is lacks or wastes with these settings.

    Args:
        method: Its method; of one that trains the encoder nothing is said.
        rounds: The number of its rounds.
        began_trained: Whether the encoder begins with weights that were trained before.
    """
    if not method.leaves_encoder:
        return
    if not began_trained:
        yield (
            f"{method.name} leaves the encoder as it is, and this one has random weights: --from starter (pictures) or "
            "--from BUNDLE begins with one that is trained"
        )
    if rounds > 1:
        yield (
            f"{method.name} needs one round (--rounds 1): the encoder stays as it is, so that later ones change "
            "nothing unless other clients take part"
        )


def notes_on_weights(path: Path, own: Task) -> Iterator[str]:
    """Yield a note where the inputs of a task differ from those that a bundle's encoder was trained on.

    The weights fit a network whose inputs are prepared in another way, too, but are a worse start for it.

    Args:
        path: The weights that a run begins with. Of other files than bundles nothing is known, and nothing is said.
        own: The task of the run.
    """
    if not is_bundle(path):
        return
    trained_on = open_bundle(path).manifest.task.input.model_dump()
    own_input = own.input.model_dump()
    differing = [
        f"{name} {_field_text(value)} (here {_field_text(own_input[name])})"
        for name, value in trained_on.items()
        if name in own_input and own_input[name] != value
    ]
    if differing:
        source = NAME if path == bundle_path(NAME) else path
        fields = ", ".join(differing)
        yield f"the weights of {source} were trained on other inputs: {fields}; --from {source} takes both"


def _field_text(value: object) -> str:
    """Return a field of an input spec for people: the values of a tuple without its brackets."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)


def bundle_start(source: str) -> Start:
    """Return the encoder of a bundle file or of the starter bundle.

    Raises:
        UsageError: There is no such file, or it holds weights alone.
        BundleDamaged: The file is not a whole bundle.
    """
    path = bundle_path(source).absolute()
    if not path.is_file():
        advice = f"expected FILE.hwb or {NAME}; 'headwater export' makes such a file of a run"
        raise UsageError(f"--from {source}: there is no such file; {advice}")
    if path.suffix in _WEIGHTS_SUFFIXES:
        raise UsageError(
            f"--from {source}: weights do not say what network they belong to; name the encoder, and the file by "
            f"--weights {source}"
        )
    return Start(source, path, open_bundle(path).manifest.task)


def find_start(source: str, state: Path) -> Start:
    """Return the encoder of a bundle file, of the starter bundle, or of an earlier run of this state folder.

    The weights of a run after its last round are written to a file in its folder.

    Raises:
        UsageError: There is no such file or run, or the run has no closed round.
        BundleDamaged: The file is not a whole bundle.
    """
    if bundle_path(source).is_file():
        return bundle_start(source)
    with StateFolder(state).look(create=True) as folder:
        runs = folder.journal.runs()
    if source not in runs:
        known = f"runs here: {', '.join(runs[-5:])}" if runs else "there are no runs here yet"
        raise UsageError(
            f"--from {source}: is neither a bundle file nor a run; {known}; expected RUN, FILE.hwb or {NAME}"
        )
    from ..simulation.trained import TrainedModel

    trained = TrainedModel.of(state, source)
    file = state.absolute() / "runs" / source / _WEIGHTS_OF_RUN
    trained.write_weights(file)
    return Start(source, file, trained.request.task)
