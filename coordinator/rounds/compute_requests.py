"""What the coordinator asks of its compute process about a run, and what that answers.

The pipe between the two carries JSON. Who asks makes one of these requests and sends its ``to_json``; the function in
the compute process reads it by ``from_json``, and answers in the same way. Tensors do not travel: they are in the blob
store of the state folder, named by their digests, or in files, named by their paths.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from edge_agent.bundle.manifest import Lineage
from edge_agent.bundle.trust import Purpose
from edge_agent.core.task import Task
from edge_agent.methods.values import ClassStatistics

from ..config import AggregationConfig, ExportConfig, HostedConfig, WarmStartConfig
from ..journal.entries import Aggregation
from .aggregation import StoredUpdates
from .request import Weights

if TYPE_CHECKING:
    from typing_extensions import Self


class Travelling(BaseModel):
    """A request to the compute process, or its answer; both processes are of the same version.

    The validators are built when they are first used: a coordinator at rest needs none of them, and many it never does.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), defer_build=True)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that the pipe carries."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Return what the JSON from the pipe says."""
        return cls.model_validate(body)


# --- a run and its method --------------------------------------------------------------------------------------------


class OfMethod(Travelling):
    """What makes the method of a run."""

    method: str = Field(description="what `edge_agent.methods.create` takes: a name, or the method's own file as text")
    params: dict[str, JsonValue] = {}
    blobs: Path = Field(Path(), description="folder of the blob store")


class OfRun(OfMethod):
    """What makes the method of a run and its model."""

    run: str = ""
    task: Task
    seed: int = 0
    weights: Weights | None = Field(None, description="of the encoder at the start; None: initialised from the seed")


class OfModel(OfRun):
    """What makes the model that a run has reached."""

    state: str = Field(description="digest of the state")
    pooled: str = Field("", description="digest of batch norm that is not in the state; empty: there is none")
    client_ranges: str = Field("", description="digest of the ranges of activations on clients; empty: there are none")


class BeginRequest(OfRun):
    """Build the method and its model, and the first state of a new run."""

    is_new: bool = Field(description="whether the run has no state yet")


class MethodValues(Travelling):
    """What the coordinator has to know of a method whose class the compute process alone has loaded."""

    name: str
    params: dict[str, Any] = Field(description="with their defaults")
    shared: tuple[str, ...] = Field(description="`Method.shared`")
    returned: tuple[str, ...] | None = Field(description="`Method.returned`")
    norm: Literal["global", "local_stats", "local_all"] = Field(description="`Method.norm`")
    weighting: Literal["samples", "uniform"] = Field(description="`Method.weighting`")
    bounded_extras: dict[str, str] = Field(description="`Method.bounded_extras`")
    class_statistics: ClassStatistics | None = Field(description="`Method.class_statistics`")
    needs_last_round: bool = Field(description="`Method.needs_last_round`")
    takes_contributions: bool = Field(description="`Method.takes_contributions`")
    server_step_is_mean: bool = Field(description="`Method.server_step_is_mean`")
    server_step_is_sum: bool = Field(False, description="`Method.server_step_is_sum`")
    one_pass: bool = Field(description="`Method.one_pass`")
    own: tuple[str, ...] = Field(description="what the method computes for the coordinator by functions of its own")


Forms = dict[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor -> its dtype as numpy writes it, such as ``<f4``, and its shape."""


class Begun(Travelling):
    """The method, and the forms of what travels between coordinator and agents."""

    method: MethodValues
    returned: Forms = Field(description="of the tensors of the model that an update has")
    extras: Forms = Field(description="of what an update has beside them")
    norm: Forms = Field(description="of the encoder's batch norm that stays on clients")
    digest: str | None = Field(description="of the first state; None: the run has one already")


# --- a method's own functions ----------------------------------------------------------------------------------------


class ObjectionRequest(OfMethod):
    """Say why the update in a file cannot be honest."""

    path: Path


class Objection(Travelling):
    """Why an update cannot be honest."""

    objection: str = Field(description="empty: it can")


class AnswersRequest(OfMethod):
    """Write what clients receive: one file for each, or one with the name ``broadcast`` for all."""

    state: str = Field(description="digest of the state")
    into: dict[str, Path] = Field(description="client -> the file to write")


class AggregateRequest(OfMethod):
    """Aggregate the updates of a round."""

    state: str = Field(description="digest of the state that the round began with")
    updates: StoredUpdates
    settings: AggregationConfig


class NextStateRequest(OfMethod):
    """Make the next state of the sum of a round's updates."""

    state: str = Field(description="digest of the state that the round began with")
    total: Path = Field(description="file of the sum")


class NextState(Travelling):
    """The state after a round."""

    digest: str


class Aggregated(Travelling):
    """The state after a round, and the decisions about single updates."""

    digest: str = Field(description="of the state")
    decisions: Aggregation = Field(description="without the settings")

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that the pipe carries; what was not decided is left out, as in the journal."""
        return self.model_dump(mode="json", exclude_unset=True)


class Nothing(Travelling):
    """The answer of a function that has written files."""


# --- export ----------------------------------------------------------------------------------------------------------


class ExportRequest(OfModel):
    """Export the encoder of a run as a bundle."""

    export: ExportConfig
    hosted: tuple[HostedConfig, ...] = ()
    path: Path = Field(description="the file of the bundle")
    purpose: Purpose
    lineage: Lineage | None = Field(None, description="where the encoder comes from; None: nobody asks")


class Exported(Travelling):
    """A bundle, and how far its encoder is from that of torch."""

    bundle_id: str
    parity_max_abs: float = Field(description="largest difference between the encoder and torch")
    int8_cosine: float | None = Field(description="of int8 and fp32 features; None: no int8")
    held_out: dict[str, float] = Field(default_factory=dict, description="variant -> accuracy (0..1) on held-out data")


class StepCount(Travelling):
    """The steps of an encoder whose activations have ranges."""

    steps: int


# --- the coordinator's own data --------------------------------------------------------------------------------------


class WarmStartRequest(OfRun):
    """Train the first state of a run on the samples of [warm_start]."""

    into: Path = Field(description="the file of the state")
    settings: WarmStartConfig


class WarmStartResult(Travelling):
    """The first state of a run, as the entry ``warm_started`` of the journal has it."""

    data: str
    samples: int
    tested: int = Field(description="held-out samples")
    epochs: int
    loss: float
    accuracy: float | None = Field(description="0..1, on the held-out samples; None: there are none")
    head: str = Field(description="shared: it is part of the state; discarded: it is not")
    device: str = Field(description="of torch")


class ProxyRequest(OfRun):
    """Evaluate the state of a round on the samples of [proxy]."""

    state: Path = Field(description="the file of the state")
    data: str
    folder: Path = Field(description="base of relative paths in ``data``")
    device: str


class ProxyResult(Travelling):
    """The accuracy of a state, as the entry ``proxy_evaluated`` of the journal has it."""

    acc: float = Field(description="0..1")
    samples: int
    by: str = Field(description="what has classified")
    norm: str = Field(description="where batch norm had its statistics from")
