"""The advice for a login that a broker refuses; apart from `mqtt`, whose client takes over a megabyte of memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoginAdvice:
    """The advice for a login that the broker refuses.

    Attributes:
        without_user: Where no user is configured.
        refused: Where it does not know the user, or the password; ``{user}`` stands for the user.
    """

    without_user: str
    refused: str


FEDERATION_ADVICE = LoginAdvice(
    "set broker.user and broker.password_file",
    "'headwater password {user}' makes a new one for Mosquitto, which has to reload it; the users of NATS and RabbitMQ "
    "are in the files of configs/brokers",
)
"""For the broker of a federation, whose users the coordinator makes."""
