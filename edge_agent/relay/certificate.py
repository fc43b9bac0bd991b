"""The renewal of a relay's certificate while the relay runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.children import Worker
from ..core.errors import EnrolmentRefused, HeadwaterError
from ..identity.renewal import Renewal, renew_beside

log = logging.getLogger(__name__)


class RelayCertificate:
    """Renews the certificate from half of its life on, by the coordinator's enrolment port.

    A relay is no agent, so it cannot ask by a message. The next connection uses the new certificate.
    """

    def __init__(self, state: Path, worker: Worker, clock: Callable[[], float]) -> None:
        """Watch the certificate in a state folder; nothing is ever due where there is none."""
        self._state = state
        self._worker = worker
        self._clock = clock
        self._renewal = Renewal(state)
        self._is_enrolled = self._renewal.is_enrolled
        self._is_busy = False
        self.problem = ""
        """Why the last try has failed; empty: it has not."""

    def tick(self) -> None:
        """Begin a renewal that is due, and take the result of one that is over."""
        self._worker.collect()
        if not self._is_enrolled or self._is_busy:
            return
        try:
            if not self._renewal.is_due(self._clock()):
                return
        except HeadwaterError as error:
            self._failed(error)
            return
        self._is_busy = True
        self._worker.submit("renew", lambda: renew_beside(self._state, "by_port"), self._after)

    def close(self) -> None:
        """Begin no more renewals; one that is under way comes to its end."""
        self._worker.close()

    def _after(self, result: Any, error: BaseException | None) -> None:
        """Note what came of a renewal."""
        self._is_busy = False
        if error is not None:
            self._failed(error)
            return
        self.problem = ""
        log.info("certificate_renewed until=%s", result["until"])

    def _failed(self, error: BaseException) -> None:
        """Log why the certificate was not renewed; it is tried again."""
        self.problem = str(error)
        level = logging.ERROR if isinstance(error, EnrolmentRefused) else logging.WARNING
        log.log(level, "certificate_not_renewed reason=%s", error)
