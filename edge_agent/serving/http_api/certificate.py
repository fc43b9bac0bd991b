"""The certificate by which the server proves who it is; a renewed one is taken without a restart.

The certificate by which a device is enrolled cannot serve here. The federation's authority issues it for clients alone,
so that no device can pose as a server to the others.
"""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

from ...core.errors import UsageError, cause

log = logging.getLogger(__name__)


class ServerCertificate:
    """A certificate with its key, in files that others renew."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        """Load the files.

        Args:
            cert: The certificate and those of its authorities, as PEM.
            key: Its private key, as PEM; None: it is in ``cert``.

        Raises:
            UsageError: They cannot be read, or do not belong together.
        """
        self._cert = cert
        self._key = key
        self._lock = threading.Lock()
        try:
            self._marks = self._look()
            self._context = self._load()
        except OSError as error:  # ssl.SSLError is one
            raise UsageError(
                f"certificate {cert}, key {key or cert}: {cause(error)}; expected PEM files that belong together"
            ) from error

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection.

        Files that have changed since the last call are loaded first. If they cannot be, the certificate before stays.
        """
        with self._lock:
            try:
                marks = self._look()
                if marks != self._marks:
                    self._context = self._load()
                    self._marks = marks
                    log.info("certificate_loaded file=%s", self._cert)
            except OSError as error:
                # Files that are being replaced may not belong together for a moment: the one before stays.
                log.warning("certificate_not_loaded file=%s reason=%s", self._cert, cause(error))
            return self._context

    def _look(self) -> list[tuple[int, int]]:
        """Return time of change and inode of each file, by which a renewed file is noticed."""
        files = [self._cert] if self._key is None else [self._cert, self._key]
        return [(status.st_mtime_ns, status.st_ino) for status in (file.stat() for file in files)]

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._cert, self._key)
        return context
