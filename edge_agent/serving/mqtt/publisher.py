"""Publishes what holds, and describes it to Home Assistant, over any MQTT broker.

A message may be lost, and the broker, Home Assistant and this program may each start anew at any time. So everything is
sent again after each connection and whenever Home Assistant says that it has started: the description, the
availability, then what holds. The last will says ``offline``. Where no answer has come for long, the availability is
``offline``, too: what holds is then not known.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from ...core.errors import BrokerAway, MessageError
from ...data.pictures import image_type
from ...heads.saved import SavedNumeric
from ...wire.transport import Connected, Disconnected, Message, Transport, Will, WillOf
from ..answer import ClassAnswer
from ..pair import Pair
from ..predictor import Observation
from ..vote import State
from .discovery import UNKNOWN, Described, discovery_message
from .topics import AnswerTopics

log = logging.getLogger(__name__)

_ONLINE = b"online"
_OFFLINE = b"offline"
_WAIT_S = 1.0
"""Seconds between two looks at the clock while nothing happens."""

_AGAIN_SHARE = 3
"""A state that goes on to hold is published again so many times before it would be too old."""

_NO_STATE = dict.fromkeys(("class", "probability", "value", "anomaly"))
"""What is published before the first answer: Home Assistant takes None for a state that is not known."""

_AFTER_DESCRIBED_S = (2.0, 10.0)
"""Seconds after a description at which the state is published once more.

Home Assistant takes a description in its own time, and a state that comes before it has done so is lost: the entity
would have none until the next change.
"""


def will_of(topics: AnswerTopics) -> WillOf:
    """Return what the broker publishes when the connection breaks."""
    return lambda _connection: Will(topics.availability, _OFFLINE, retain=True)


@dataclass(frozen=True)
class _Known:
    """What is to be published, as it is now."""

    described: Described | None = None
    state: State | None = None
    image: bytes = b""
    have_inputs_changed: bool | None = None


class Publisher:
    """A thread that publishes for one device."""

    def __init__(
        self,
        transport: Transport,
        topics: AnswerTopics,
        described: Described,
        clock: Callable[[], float],
    ) -> None:
        """Prepare; nothing is sent before `start`.

        Args:
            transport: The connection to the broker, with the will of `will_of`.
            topics: Where to publish.
            described: The device; its classes are those of the pair in use, whatever is said here.
            clock: Seconds that go on.
        """
        self._transport = transport
        self._topics = topics
        self._template = described
        self._clock = clock
        self._known = _Known()
        self._lock = threading.Lock()
        self._is_connected = False
        self._has_news = False
        self._is_described = False
        self._last_answer_at: float | None = None
        self._published_at = float("-inf")
        self._repeats_at: list[float] = []
        self._is_available: bool | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mqtt-out", daemon=True)

    # --- what is noted, in the threads of others -----------------------------------------------------------------

    def see(self, observation: Observation) -> None:
        """Note the last image, where it is published; see `edge_agent.serving.predictor.Observer`."""
        self._last_answer_at = self._clock()
        if self._template.has_image and image_type(observation.raw):
            with self._lock:
                self._known = replace(self._known, image=observation.raw)

    def see_switch(self, pair: Pair) -> None:
        """Do nothing: `see_pair` comes with the state."""

    def see_state(self, state: State, *, is_change: bool) -> None:
        """Have a change published at once; see `edge_agent.serving.vote.StateObserver`."""
        with self._lock:
            self._known = replace(self._known, state=state)
            self._has_news = self._has_news or is_change
        if is_change:
            self._transport.wake()

    def see_pair(self, pair: Pair) -> None:
        """Have the classes of another pair described at once, before one of them is published as a state."""
        is_score = isinstance(pair.head, SavedNumeric) and not pair.head.head.predicts_targets
        described = replace(self._template, classes=pair.class_names, is_score=is_score)
        with self._lock:
            if described == self._known.described:
                return
            self._known = replace(self._known, described=described)
            self._is_described = False
        self._transport.wake()

    def see_inputs(self, have_changed: bool) -> None:
        """Have it published whether the inputs have changed since the head was fitted."""
        with self._lock:
            if have_changed == self._known.have_inputs_changed:
                return
            self._known = replace(self._known, have_inputs_changed=have_changed)
            self._has_news = True
        self._transport.wake()

    # --- what is sent, in a thread of its own --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect.

        Raises:
            HeadwaterError: As `MqttTransport.start`.
        """
        self._transport.subscribe(self._topics.hub_status)
        self._transport.start()
        self._thread.start()

    def close(self) -> None:
        """Say that this device is offline, and disconnect."""
        self._stop.set()
        self._transport.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._transport.publish(self._topics.availability, _OFFLINE, retain=True)
        self._transport.close()

    def step(self, timeout_s: float) -> None:
        """Handle at most one event, and publish what is due."""
        event = self._transport.receive(timeout_s)
        if isinstance(event, Connected):
            self._is_connected = True
            self._say_all_again()
        elif isinstance(event, Disconnected):
            self._is_connected = False
        elif isinstance(event, Message) and event.topic == self._topics.hub_status and event.payload == _ONLINE:
            self._say_all_again()
        if self._is_connected:
            self._publish_what_is_due()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step(_WAIT_S)
            except Exception:  # a bug must not end the publisher
                log.exception("mqtt_out_broke")

    def _say_all_again(self) -> None:
        """Have everything published once more: whoever listens may know nothing."""
        self._is_described = False
        self._is_available = None
        self._has_news = True

    def _publish_what_is_due(self) -> None:
        with self._lock:
            known = self._known
            has_news = self._has_news
            self._has_news = False
        # 1. A class is described before it is a state: Home Assistant drops values that are not among the options.
        if known.described is not None and not self._is_described:
            self._publish_json(self._topics.discovery, discovery_message(self._topics, known.described), retain=True)
            self._is_described = True
            self._repeats_at = [self._clock() + seconds for seconds in _AFTER_DESCRIBED_S]
            # Before the first answer: what held before this program started holds no more.
            if known.state is None:
                self._publish_json(self._topics.state, _NO_STATE)
        # 2. Whether what is said counts. The entities would stay unavailable for ever without a first word about it.
        is_available = self._is_fresh()
        if is_available is not self._is_available:
            payload = _ONLINE if is_available else _OFFLINE
            self._transport.publish(self._topics.availability, payload, retain=True)
            self._is_available = is_available
            has_news = True
        # 3. What holds: changes at once, and the same again now and then.
        is_due = self._clock() - self._published_at >= self._template.expire_s / _AGAIN_SHARE
        while self._repeats_at and self._clock() >= self._repeats_at[0]:
            del self._repeats_at[0]
            is_due = True
        if known.state is not None and is_available and (has_news or is_due):
            self._publish_json(self._topics.state, state_message(known.state))
            self._published_at = self._clock()
            if known.image:
                self._publish_image(known.image)
        if known.have_inputs_changed is not None and has_news:
            payload = b"ON" if known.have_inputs_changed else b"OFF"
            self._transport.publish(self._topics.inputs, payload, retain=True)

    def _is_fresh(self) -> bool:
        """Return whether the last answer is recent enough to hold; before the first one there is nothing to doubt."""
        if self._last_answer_at is None:
            return True
        return self._clock() - self._last_answer_at <= self._template.expire_s

    def _publish_json(self, topic: str, content: dict[str, Any], *, retain: bool = False) -> None:
        self._transport.publish(topic, json.dumps(content, separators=(",", ":")).encode(), retain=retain)

    def _publish_image(self, image: bytes) -> None:
        with contextlib.suppress(MessageError):  # larger than the broker takes: the answer counts without it
            self._transport.publish(self._topics.image, image, qos=0)


def forget(transport: Transport, topics: AnswerTopics, limit_s: float, clock: Callable[[], float]) -> None:
    """Remove a device from the broker, and so from Home Assistant.

    An empty retained message ends what was retained, and the one of discovery is the removal of the device.

    Args:
        transport: The connection to the broker; it is started and closed here.
        topics: The topics of the device.
        limit_s: Seconds that the broker is waited for.
        clock: Seconds that go on.

    Raises:
        BrokerAway: The broker has not answered in time.
    """
    transport.start()
    try:
        until = clock() + limit_s
        while not isinstance(transport.receive(_WAIT_S), Connected):
            if clock() > until:
                raise BrokerAway(f"the broker has not answered within {limit_s:.0f} s; nothing was removed there")
        for topic in (topics.discovery, topics.availability, topics.inputs, topics.image):
            transport.publish(topic, b"", retain=True)
    finally:
        transport.close()


def state_message(state: State) -> dict[str, Any]:
    """Return what is published about what holds."""
    answer = state.answer
    since = datetime.fromtimestamp(state.since, timezone.utc).isoformat(timespec="seconds")
    if isinstance(answer, ClassAnswer):
        label = UNKNOWN if answer.is_unknown else answer.label
        content: dict[str, Any] = {"class": label, "probability": round(100 * answer.probability, 2)}
        content |= {"unknown": answer.is_unknown, "likeliest": answer.label}
    else:
        content = {"value": round(answer.value, 6)}
        if answer.is_score:
            content |= {"anomaly": bool(answer.is_anomaly), "threshold": answer.threshold}
    return {**content, "since": since, **answer.pair.as_json()}
