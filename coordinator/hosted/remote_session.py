"""A session whose computations run elsewhere: what travels to the other process, and what comes back.

Everything that a client keeps stays here: its state, its outbox, and what privacy makes of an update. The samples
travel once for each session, the model that was received and the client's state with each computation. A computation
changes nothing here before its result has arrived, so one that is lost is done again from the same state, and ends in
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field, JsonValue

from edge_agent import methods
from edge_agent.client import Arrays, Built, ClientState, Outcome, Session
from edge_agent.core.config import Precision
from edge_agent.core.task import Task, Tensors
from edge_agent.data import Samples
from edge_agent.methods.values import TrainingControl
from edge_agent.run_folder.client_state import merge, split
from edge_agent.training.precision import StepTimes

from ..rounds.compute_requests import Travelling

_UPDATE = "update."
_KEPT = "kept."
_METRICS = "metrics"
_RIGHT = "right"


class SessionSpec(Travelling):
    """What makes the session of a client, but for its samples."""

    client: str
    method: str = Field(description="what `edge_agent.methods.create` takes")
    params: dict[str, JsonValue]
    task: Task
    seed: int
    device: str = Field(description="the device that computes, as the other process names it")
    threads: int = Field(description="torch threads; 0: torch's default")
    evaluate_after: bool


class Computation(Travelling):
    """One call of a session's function."""

    session: SessionSpec
    do: Literal["train", "finish", "activation_ranges", "step_times"]
    precision: Precision
    round: int = 0
    rounds: int = 0
    evaluate: bool = False
    share: float = Field(1.0, description="the share (0..1] of the steps of a training; see `TrainingControl`")


class Computed(Travelling):
    """What a computation has ended with, beside its tensors."""

    samples: int = 0
    metrics: tuple[str, ...] = Field((), description="names; the numbers are a tensor, so that no bit of them changes")
    error: dict[str, JsonValue] | None = Field(None, description="see `processes.compute.error_from`; None: it is done")


IsCancelled = Callable[[], bool]


class Elsewhere(Protocol):
    """Another process, or several, that computes for sessions of this one."""

    def put_samples(self, samples: Tensors) -> Any:
        """Put samples where computations reach them, and return what refers to them."""

    def compute(
        self, computation: Computation, samples: Any, received: Tensors, kept: Tensors, is_cancelled: IsCancelled
    ) -> tuple[Computed, Tensors]:
        """Wait for the result of a computation, and return it.

        Args:
            computation: What is computed.
            samples: What `put_samples` has returned.
            received: The tensors that the coordinator has sent.
            kept: The client's state, see `client_state.merge`.
            is_cancelled: Asked while it waits.

        Raises:
            HeadwaterError, OSError: The error of the computation.
            TrainingCancelled: ``is_cancelled`` has said so.
            TrainingFailed: Those who computed it have ended again and again.
        """


# --- in this process -------------------------------------------------------------------------------------------------


class RemoteSession(Session):
    """A session that has model and samples here, for what is asked about them, and computes elsewhere."""

    def __init__(self, local: Session, spec: SessionSpec, samples: Any, elsewhere: Elsewhere) -> None:
        """Take over a session of this process.

        Args:
            local: The session.
            spec: What makes the same session elsewhere.
            samples: What `Elsewhere.put_samples` has returned for its samples.
            elsewhere: Who computes.
        """
        # All that the session has been made with stays as it is; only its long computations are others.
        vars(self).update(vars(local))
        self._spec = spec
        self._samples = samples
        self._elsewhere = elsewhere

    def train(
        self,
        received: Tensors,
        kept: ClientState,
        *,
        round_number: int,
        rounds: int,
        evaluate: bool,
        control: TrainingControl | None = None,
    ) -> Outcome:
        """Train as `Session.train` does, elsewhere; a training that is lost begins again, without a checkpoint."""
        control = control or TrainingControl()
        computation = self._computation("train").model_copy(
            update={"round": round_number, "rounds": rounds, "evaluate": evaluate, "share": control.share}
        )
        return self._outcome_of(computation, received, kept, control.is_cancelled)

    def finish(self, received: Tensors, kept: ClientState, *, rounds: int) -> Outcome:
        """Personalize as `Session.finish` does, elsewhere."""
        computation = self._computation("finish").model_copy(update={"rounds": rounds})
        return self._outcome_of(computation, received, kept)

    def activation_ranges(self, received: Tensors) -> Tensors:
        """Return the ranges as `Session.activation_ranges` does, computed elsewhere."""
        _, tensors = self._compute(self._computation("activation_ranges"), received, {})
        return tensors

    def step_times(self) -> StepTimes:
        """Return the seconds of a training step on the device that computes."""
        _, tensors = self._compute(self._computation("step_times"), {}, {})
        float32_s, bfloat16_s = tensors["seconds"].tolist()
        return StepTimes(float32_s, bfloat16_s)

    def _computation(self, do: Literal["train", "finish", "activation_ranges", "step_times"]) -> Computation:
        return Computation(session=self._spec, do=do, precision=self.precision)

    def _outcome_of(
        self,
        computation: Computation,
        received: Tensors,
        kept: ClientState,
        is_cancelled: IsCancelled = lambda: False,
    ) -> Outcome:
        """Return the outcome of a computation from a client's state."""
        state = merge(kept.personal, kept.memory)
        computed, tensors = self._compute(computation, received, state, is_cancelled)
        return unpack_outcome(computed, tensors)

    def _compute(
        self,
        computation: Computation,
        received: Tensors,
        kept: Tensors,
        is_cancelled: IsCancelled = lambda: False,
    ) -> tuple[Computed, Tensors]:
        return self._elsewhere.compute(computation, self._samples, received, kept, is_cancelled)


def samples_to_put(train: Samples, test: Samples) -> Tensors:
    """Return the samples of a session as named arrays, for `Elsewhere.put_samples`."""
    return {
        "train.inputs": train.inputs,
        "train.labels": train.labels,
        "test.inputs": test.inputs,
        "test.labels": test.labels,
    }


# --- in the process that computes ------------------------------------------------------------------------------------


@dataclass
class SessionHost:
    """Computes for sessions of another process; the model of the last run stays, as clients use it in turn."""

    _model: tuple[SessionSpec, Built] | None = None

    def compute(
        self, computation: Computation, samples: Tensors, received: Tensors, kept: Tensors
    ) -> tuple[Computed, Tensors]:
        """Return the result of a computation; for the arguments see `Elsewhere.compute`.

        Raises:
            HeadwaterError: As the function of the session.
        """
        session = self._session(computation, samples)
        if computation.do == "activation_ranges":
            return Computed(), session.activation_ranges(received)
        if computation.do == "step_times":
            times = session.step_times()
            return Computed(), {"seconds": np.array([times.float32_s, times.bfloat16_s])}
        state = ClientState(*split(kept))
        if computation.do == "finish":
            return pack_outcome(session.finish(received, state, rounds=computation.rounds))
        outcome = session.train(
            received,
            state,
            round_number=computation.round,
            rounds=computation.rounds,
            evaluate=computation.evaluate,
            control=TrainingControl(computation.share),
        )
        return pack_outcome(outcome)

    def _session(self, computation: Computation, samples: Tensors) -> Session:
        """Return the session of a computation."""
        import torch

        spec = computation.session
        if spec.threads:
            torch.set_num_threads(spec.threads)
        method = methods.create(spec.method, spec.params)
        # The model is that of a run: whose turn it is, and with how many threads, changes nothing of it.
        of_run = spec.model_copy(update={"client": "", "threads": 0})
        if self._model is None or self._model[0] != of_run:
            self._model = (of_run, Built.of(method, spec.task, seed=spec.seed, device=spec.device))
        # Torch takes no arrays that cannot be written to, and what has arrived is such.
        arrays = {name: array.copy() for name, array in samples.items()}
        return Session(
            method,
            spec.task,
            spec.client,
            Arrays(arrays["train.inputs"], arrays["train.labels"]),
            Arrays(arrays["test.inputs"], arrays["test.labels"]),
            seed=spec.seed,
            device=spec.device,
            model=self._model[1],
            evaluate_after=spec.evaluate_after,
            precision=computation.precision,
        )


# --- outcomes on their way -------------------------------------------------------------------------------------------


def pack_outcome(outcome: Outcome) -> tuple[Computed, Tensors]:
    """Return an outcome in the form in which it travels."""
    kept = merge(outcome.kept.personal, outcome.kept.memory)
    tensors = {
        **{_UPDATE + name: array for name, array in outcome.update.items()},
        **{_KEPT + name: array for name, array in kept.items()},
        _METRICS: np.array(list(outcome.metrics.values()), np.float64),
    }
    if outcome.right is not None:
        tensors[_RIGHT] = outcome.right
    return Computed(samples=outcome.samples, metrics=tuple(outcome.metrics)), tensors


def unpack_outcome(computed: Computed, tensors: Mapping[str, np.ndarray]) -> Outcome:
    """Return the outcome that has travelled; its arrays are copies, which may be changed."""
    return Outcome(
        update=_below(_UPDATE, tensors),
        kept=ClientState(*split(_below(_KEPT, tensors))),
        metrics=dict(zip(computed.metrics, tensors[_METRICS].tolist(), strict=True)),
        samples=computed.samples,
        right=tensors[_RIGHT].copy() if _RIGHT in tensors else None,
    )


def _below(prefix: str, tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Return copies of the tensors whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): array.copy() for name, array in tensors.items() if name.startswith(prefix)}
