"""What all requests of one server share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .access import Access, WrongTokens
from .events import Watch
from .folder_view import FolderView


@dataclass
class Site:
    """What all pages of one web view share."""

    view: FolderView
    watch: Watch
    access: Access | None
    """None: nobody may act, because the token could not be written."""

    names: frozenset[str] = frozenset()
    """Hosts by which the server is reached, beside loopback ones."""

    is_secure: bool = False
    """Whether it has TLS."""

    enrolment: Callable[[], Any] | None = None
    """Opens the federation's enrolment, where its agents have certificates and the configuration is known."""

    wrong: WrongTokens = field(default_factory=WrongTokens)
    cookie: str = "headwater"
