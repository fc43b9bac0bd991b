"""The MQTT topics on which the answers of a device are published."""

from __future__ import annotations

from dataclasses import dataclass

DISCOVERY_PREFIX = "homeassistant"
"""The default discovery prefix of Home Assistant."""


@dataclass(frozen=True)
class AnswerTopics:
    """The topics of one device.

    Attributes:
        device: The name of the device: letters, digits, ``_`` and ``-``, which Home Assistant allows in ids.
        base: The first level of the topics for answers.
        prefix: The first level of the topics on which Home Assistant looks for devices.
    """

    device: str
    base: str = "headwater-answers"
    prefix: str = DISCOVERY_PREFIX

    @property
    def state(self) -> str:
        """The state, as a JSON object. It is not retained, because an old answer must not look like a new one."""
        return f"{self.base}/{self.device}/state"

    @property
    def availability(self) -> str:
        """``online`` or ``offline``, retained; the broker publishes ``offline`` when the connection breaks."""
        return f"{self.base}/{self.device}/availability"

    @property
    def inputs(self) -> str:
        """``ON`` while the inputs have changed since the head was fitted, else ``OFF``; retained."""
        return f"{self.base}/{self.device}/inputs"

    @property
    def image(self) -> str:
        """The last answered image, as the file that was received; only if the owner has enabled it."""
        return f"{self.base}/{self.device}/image"

    @property
    def published(self) -> tuple[str, ...]:
        """All topics that the device publishes on."""
        return (self.state, self.availability, self.inputs, self.image, self.discovery)

    @property
    def discovery(self) -> str:
        """The message that describes the device and its entities; retained."""
        return f"{self.prefix}/device/headwater_{self.device}/config"

    @property
    def hub_status(self) -> str:
        """Home Assistant publishes ``online`` here when it has started."""
        return f"{self.prefix}/status"
