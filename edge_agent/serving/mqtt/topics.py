"""Where the answers of a device are published."""

from __future__ import annotations

from dataclasses import dataclass

DISCOVERY_PREFIX = "homeassistant"
"""Home Assistant's own prefix, unless its owner has changed it."""


@dataclass(frozen=True)
class AnswerTopics:
    """The topics of one device.

    Attributes:
        device: Its name: letters, digits, ``_`` and ``-``, which is what Home Assistant allows in ids.
        base: The beginning of its own topics.
        prefix: The beginning of the topics by which Home Assistant finds devices.
    """

    device: str
    base: str = "headwater-answers"
    prefix: str = DISCOVERY_PREFIX

    @property
    def state(self) -> str:
        """What holds, as a JSON object; not retained, because an old answer must not look like a new one."""
        return f"{self.base}/{self.device}/state"

    @property
    def availability(self) -> str:
        """``online`` or ``offline``, retained; the broker publishes ``offline`` when the connection breaks."""
        return f"{self.base}/{self.device}/availability"

    @property
    def inputs(self) -> str:
        """``ON`` where the inputs have changed since the head was fitted, else ``OFF``."""
        return f"{self.base}/{self.device}/inputs"

    @property
    def image(self) -> str:
        """The last image that was answered, as a JPEG or PNG file; only where the owner wants it."""
        return f"{self.base}/{self.device}/image"

    @property
    def published(self) -> tuple[str, ...]:
        """All topics that the device publishes on."""
        return (self.state, self.availability, self.inputs, self.image, self.discovery)

    @property
    def discovery(self) -> str:
        """The message that describes the device and its entities, retained."""
        return f"{self.prefix}/device/headwater_{self.device}/config"

    @property
    def hub_status(self) -> str:
        """Where Home Assistant says that it has started."""
        return f"{self.prefix}/status"
