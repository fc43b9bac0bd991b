"""Passes over the updates of a round: what is computed in one reading of them, here or by aggregators.

The updates of a round are read several times, one after another: their sizes are measured, their changes are added up
and multiplied with that sum, and at last they are summed for the step of the server. Each of these readings is a pass.
A pass gives the same result whether one process reads all updates or several read a part each: what it says of single
updates depends on nothing but the update and the pass, and what it sums is summed exactly.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from edge_agent.core.errors import TensorsError
from edge_agent.core.task import State, Tensors
from edge_agent.methods import Method, Update

Answer = TypeVar("Answer")
Result = TypeVar("Result")

Updates = Callable[[], Iterable[Update]]
"""Gives the same updates in the same order each time."""

_JSON = "json"
"""Name of the array that holds the values of a packet."""


class PassValues(BaseModel):
    """The values that a pass or its answer has beside its arrays; a pass without any has no subclass of its own.

    Processes of one version exchange them. A number may be infinite, or not a number.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


Values = TypeVar("Values", bound=PassValues)


@dataclass(frozen=True)
class Packet:
    """The values and arrays of a pass, or of its answer, on their way between processes; the values as JSON.

    Call `from_values` to make one, and `values_as` to read its values.
    """

    fields: Mapping[str, JsonValue]
    """Name of a value -> the value as JSON."""

    tensors: Tensors

    @classmethod
    def from_values(cls, values: PassValues, tensors: Tensors | None = None) -> Packet:
        """Return the packet of these values, and of these arrays where there are any."""
        return cls(values.model_dump(mode="json"), tensors or {})

    def with_values(self, values: PassValues) -> Packet:
        """Return this packet with further values beside its own; no two have one name."""
        return Packet({**self.fields, **values.model_dump(mode="json")}, self.tensors)

    def values_as(self, kind: type[Values]) -> Values:
        """Return those of the values that a class of them has as its fields.

        Raises:
            TensorsError: One is missing, or has another form.
        """
        try:
            return kind.model_validate(self.fields)
        except ValidationError as error:
            mistakes = "; ".join(f"{detail['loc']}: {detail['msg']}" for detail in error.errors()[:3])
            raise TensorsError(f"a packet without {kind.__name__} as this version knows them: {mistakes}") from error

    def to_tensors(self) -> Tensors:
        """Return values and arrays as named arrays: the values are an array of bytes."""
        text = json.dumps(self.fields, separators=(",", ":"), allow_nan=True).encode()
        return {**self.tensors, _JSON: np.frombuffer(text, np.uint8)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, np.ndarray]) -> Packet:
        """Return the packet that `to_tensors` has written.

        Raises:
            TensorsError: It holds no values.
        """
        others = dict(tensors)
        text = others.pop(_JSON, None)
        if text is None:
            raise TensorsError("a pass without values")
        try:
            fields = json.loads(text.tobytes())
        except (ValueError, RecursionError) as error:
            raise TensorsError(f"the values of a pass are not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise TensorsError("a pass without values")
        return cls(fields, others)


@dataclass(frozen=True)
class Origin:
    """The model that the updates of a round are changes of, and the one that the run began with."""

    method: Method
    received: Tensors
    """What its clients started from."""

    start: State | None = None
    """The state that the run began with; None where it is not known."""

    @property
    def extras(self) -> Mapping[str, str]:
        """The extra arrays whose size has a bound, see `Method.bounded_extras`."""
        return self.method.bounded_extras


class Pass(ABC, Generic[Answer]):
    """One reading of the updates of a round."""

    name: ClassVar[str]

    @abstractmethod
    def over(self, origin: Origin, updates: Iterable[Update]) -> Answer:
        """Return what these updates give; they are read one at a time."""

    @abstractmethod
    def join(self, answers: Iterable[Answer]) -> Answer:
        """Return the answer for all updates from those for parts of them, in whatever order; there is at least one.

        They are taken one at a time: each may be as large as a model, several times over.

        Raises:
            TensorsError: They do not fit together.
        """

    @abstractmethod
    def is_exact(self, answer: Answer) -> bool:
        """Return whether another division into parts would have given the same bits."""

    def covers(self, answer: Answer, clients: Collection[str]) -> bool:  # noqa: ARG002 - for overriding methods
        """Return whether an answer is about the updates of these clients, as far as it tells; default: it does not."""
        return True

    # --- between processes -----------------------------------------------------------------------------------------

    @abstractmethod
    def to_packet(self, clients: Sequence[str]) -> Packet:
        """Return what another process needs for this pass over the updates of these clients."""

    @classmethod
    @abstractmethod
    def from_packet(cls, packet: Packet) -> Pass[Answer]:
        """Return the pass that `to_packet` has described.

        Raises:
            TensorsError: The packet does not describe such a pass.
        """

    @abstractmethod
    def pack(self, answer: Answer) -> Packet:
        """Return an answer for another process."""

    @abstractmethod
    def unpack(self, packet: Packet) -> Answer:
        """Return the answer that `pack` has packed.

        Raises:
            TensorsError: It is no answer to this pass.
        """


Asked = tuple[Pass[Any], Origin]
"""A pass, and what the updates that it reads are changes of."""

Reading = Generator[Asked, Any, Result]
"""A computation that asks for passes over the updates of a round, one after another, and gets the answer of each."""


def read(one_pass: Pass[Answer], origin: Origin) -> Reading[Answer]:
    """Return the answer of one pass over all updates."""
    answer: Answer = yield one_pass, origin
    return answer


def read_here(reading: Reading[Result], updates: Updates) -> Result:
    """Return the result of a computation whose passes are all made in this process.

    Args:
        reading: The computation.
        updates: Called once for each pass.
    """
    try:
        one_pass, origin = next(reading)
        while True:
            one_pass, origin = reading.send(one_pass.over(origin, updates()))
    except StopIteration as end:
        result: Result = end.value
        return result
