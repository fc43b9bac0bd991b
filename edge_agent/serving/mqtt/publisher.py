"""Publishes the state of a device over any MQTT broker, and describes the device to Home Assistant.

A message may be lost, and the broker, Home Assistant and this program may each restart at any time. So everything is
sent again after each connection, and whenever Home Assistant announces that it has started: first the description, then
the availability, then the state. When the connection breaks, the broker publishes ``offline`` as the last will. When no
answer has come for too long, the publisher sends ``offline`` itself, because the last state may no longer be true.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import BrokerAway, MessageError
from ...core.time_and_text import utc_text
from ...data.pictures import image_type
from ...heads.saved import SavedNumeric
from ...wire.transport import Connected, Disconnected, Message, Transport, Will, WillOf
from ..answer import ClassAnswer
from ..pair import Pair
from ..predictor import Observation
from ..vote import State
from .discovery import UNKNOWN, DeviceDescription, discovery_message
from .topics import AnswerTopics

log = logging.getLogger(__name__)

_ONLINE = b"online"
_OFFLINE = b"offline"
_WAIT_S = 1.0
"""Seconds after which the thread checks the clock, if no event wakes it earlier."""

_REPEATS_BEFORE_EXPIRY = 3
"""How often an unchanged state is published again within ``expire_s``, the time after which it would be too old."""

_NO_STATE = dict.fromkeys(("class", "probability", "value", "anomaly"))
"""The state message before the first answer: Home Assistant reads null as a state that is not known."""

_AFTER_DESCRIPTION_S = (2.0, 10.0)
"""Seconds after a description at which the state is published once more.

Home Assistant takes a while to create the entities of a description. A state that arrives earlier is lost, and the
entity would have none until the next change.
"""


def offline_will(topics: AnswerTopics) -> WillOf:
    """Return the last will: the broker publishes ``offline`` when the connection breaks."""
    return lambda _connection: Will(topics.availability, _OFFLINE, retain=True)


@dataclass(frozen=True)
class _Content:
    """The content to publish now; None or empty: there is nothing to publish yet."""

    description: DeviceDescription | None = None
    state: State | None = None
    image: bytes = b""
    have_inputs_changed: bool | None = None


class Publisher:
    """A thread that publishes the state of one device."""

    def __init__(
        self,
        transport: Transport,
        topics: AnswerTopics,
        description: DeviceDescription,
        clock: Callable[[], float],
    ) -> None:
        """Create a publisher; nothing is sent before `start`.

        Args:
            transport: The connection to the broker, with the last will of `offline_will`.
            topics: The topics to publish on.
            description: The device. Its classes are replaced by those of the pair in use; see `on_pair`.
            clock: Returns seconds of a monotonic clock.
        """
        self._transport = transport
        self._topics = topics
        self._template = description
        self._clock = clock
        self._content = _Content()
        self._lock = threading.Lock()
        self._is_connected = False
        self._has_news = False
        self._is_description_sent = False
        self._last_answer_at: float | None = None
        self._published_at = float("-inf")
        self._repeats_at: list[float] = []
        """When to repeat the state after a description, ascending; see `_AFTER_DESCRIPTION_S`."""

        self._is_available: bool | None = None
        """The availability that was published last; None: it has to be published."""

        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mqtt-out", daemon=True)

    # --- observing: called in the threads of the predictor -------------------------------------------------------

    def on_answer(self, observation: Observation) -> None:
        """Remember the last image if images are published; see `edge_agent.serving.predictor.Observer`."""
        self._last_answer_at = self._clock()
        if self._template.has_image and image_type(observation.raw):
            with self._lock:
                self._content = replace(self._content, image=observation.raw)

    def on_switch(self, pair: Pair) -> None:
        """Do nothing: `on_pair` is called with the same pair."""

    def on_state(self, state: State, *, is_change: bool) -> None:
        """Have a changed state published at once; see `edge_agent.serving.vote.StateObserver`."""
        with self._lock:
            self._content = replace(self._content, state=state)
            self._has_news = self._has_news or is_change
        if is_change:
            self._transport.wake()

    def on_pair(self, pair: Pair) -> None:
        """Have the classes of another pair described at once, before one of them is published as a state."""
        is_score = isinstance(pair.head, SavedNumeric) and not pair.head.head.predicts_targets
        description = replace(self._template, classes=pair.class_names, is_score=is_score)
        with self._lock:
            if description == self._content.description:
                return
            self._content = replace(self._content, description=description)
            self._is_description_sent = False
        self._transport.wake()

    def on_inputs(self, have_changed: bool) -> None:
        """Publish whether the inputs have changed since the head was fitted."""
        with self._lock:
            if have_changed == self._content.have_inputs_changed:
                return
            self._content = replace(self._content, have_inputs_changed=have_changed)
            self._has_news = True
        self._transport.wake()

    # --- publishing: in a thread of its own ----------------------------------------------------------------------

    def start(self) -> None:
        """Start to connect, and to publish.

        Raises:
            HeadwaterError: The connection cannot be set up; see `MqttTransport.start`.
        """
        self._transport.subscribe(self._topics.hub_status)
        self._transport.start()
        self._thread.start()

    def close(self) -> None:
        """Publish that this device is offline, and disconnect."""
        self._stop.set()
        self._transport.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._transport.publish(self._topics.availability, _OFFLINE, retain=True)
        self._transport.close()

    def step(self, timeout_s: float) -> None:
        """Wait for an event, handle it, and publish what is due; ``timeout_s``: seconds to wait."""
        event = self._transport.receive(timeout_s)
        if isinstance(event, Connected):
            self._is_connected = True
            self._publish_everything_again()
        elif isinstance(event, Disconnected):
            self._is_connected = False
        elif isinstance(event, Message) and event.topic == self._topics.hub_status and event.payload == _ONLINE:
            self._publish_everything_again()
        if self._is_connected:
            self._publish_what_is_due()

    def _run(self) -> None:
        """Publish until `close` is called."""
        while not self._stop.is_set():
            try:
                self.step(_WAIT_S)
            except Exception:  # a bug must not end the thread
                log.exception("mqtt_out_broke")

    def _publish_everything_again(self) -> None:
        """Have everything published once more: the broker or Home Assistant may have lost it."""
        self._is_description_sent = False
        self._is_available = None
        self._has_news = True

    def _publish_what_is_due(self) -> None:
        """Publish the description, the availability and the state, each if it has changed or is due again."""
        with self._lock:
            content = self._content
            has_news = self._has_news
            self._has_news = False
        # 1. The description comes before the state: Home Assistant drops a class that is not among the options.
        if content.description is not None and not self._is_description_sent:
            self._publish_description(content.description, has_state=content.state is not None)
        # 2. The availability. It is sent before the first answer, too: without it, entities would stay unavailable.
        is_available = self._is_fresh()
        if is_available is not self._is_available:
            payload = _ONLINE if is_available else _OFFLINE
            self._transport.publish(self._topics.availability, payload, retain=True)
            self._is_available = is_available
            has_news = True
        # 3. The state: after a change at once, otherwise again at intervals.
        is_repetition_due = self._pop_due_repetition()
        if content.state is not None and is_available and (has_news or is_repetition_due):
            self._publish_json(self._topics.state, state_message(content.state))
            self._published_at = self._clock()
            if content.image:
                self._publish_image(content.image)
        # 4. Whether inputs have changed.
        if content.have_inputs_changed is not None and has_news:
            payload = b"ON" if content.have_inputs_changed else b"OFF"
            self._transport.publish(self._topics.inputs, payload, retain=True)

    def _publish_description(self, description: DeviceDescription, *, has_state: bool) -> None:
        """Describe the device, and plan to repeat the state afterwards."""
        self._publish_json(self._topics.discovery, discovery_message(self._topics, description), retain=True)
        self._is_description_sent = True
        self._repeats_at = [self._clock() + seconds for seconds in _AFTER_DESCRIPTION_S]
        # Before the first answer, the state that this program published before a restart is no longer valid.
        if not has_state:
            self._publish_json(self._topics.state, _NO_STATE)

    def _pop_due_repetition(self) -> bool:
        """Return whether an unchanged state is due again, and drop the planned repetitions whose time has come."""
        is_due = self._clock() - self._published_at >= self._template.expire_s / _REPEATS_BEFORE_EXPIRY
        while self._repeats_at and self._clock() >= self._repeats_at[0]:
            del self._repeats_at[0]
            is_due = True
        return is_due

    def _is_fresh(self) -> bool:
        """Return whether the last answer is recent enough to be valid; True before the first answer."""
        if self._last_answer_at is None:
            return True
        return self._clock() - self._last_answer_at <= self._template.expire_s

    def _publish_json(self, topic: str, content: dict[str, Any], *, retain: bool = False) -> None:
        self._transport.publish(topic, json.dumps(content, separators=(",", ":")).encode(), retain=retain)

    def _publish_image(self, image: bytes) -> None:
        with contextlib.suppress(
            MessageError
        ):  # it is larger than the broker accepts; the answer is published without it
            self._transport.publish(self._topics.image, image, qos=0)


def remove_device(transport: Transport, topics: AnswerTopics, limit_s: float, clock: Callable[[], float]) -> None:
    """Remove a device from the broker, and so from Home Assistant.

    An empty retained message deletes the retained one. Home Assistant removes a device whose description is deleted.

    Args:
        transport: The connection to the broker; it is started and closed here.
        topics: The topics of the device.
        limit_s: Seconds to wait for the broker.
        clock: Returns seconds of a monotonic clock.

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
    """Return the message that describes the state, as a JSON object."""
    answer = state.answer
    since = utc_text(state.since)
    if isinstance(answer, ClassAnswer):
        label = UNKNOWN if answer.is_unknown else answer.label
        content: dict[str, Any] = {"class": label, "probability": round(100 * answer.probability, 2)}
        content |= {"unknown": answer.is_unknown, "likeliest": answer.label}
    else:
        content = {"value": round(answer.value, 6)}
        if answer.is_score:
            content |= {"anomaly": bool(answer.is_anomaly), "threshold": answer.threshold}
    return {**content, "since": since, **answer.pair.as_json()}
