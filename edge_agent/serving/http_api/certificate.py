"""The TLS certificate of the server. A renewed one is loaded without a restart.

The certificate that a device gets by enrolment cannot be used here: the federation's authority issues it for clients
only, so that no device can impersonate a server.
"""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

from ...core.errors import UsageError, cause
from ...core.storage import read_regular
from ...identity.certificates import subject_names

log = logging.getLogger(__name__)


class ServerCertificate:
    """A certificate and its key, in files that another program may renew."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        """Load the files.

        Args:
            cert: PEM file with the certificate and those of its authorities.
            key: PEM file with the private key; None: it is in ``cert``.

        Raises:
            UsageError: A file cannot be read, or certificate and key do not belong together.
        """
        self._cert = cert
        self._key = key
        self._lock = threading.Lock()
        try:
            self._versions = self._file_versions()
            self._context = self._load()
        except OSError as error:  # ssl.SSLError is one
            raise UsageError(
                f"certificate {cert}, key {key or cert}: {cause(error)}; expected PEM files that belong together"
            ) from error

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for a new connection.

        Files that have changed since the last call are loaded first. If that fails, the previous certificate is used.
        """
        with self._lock:
            try:
                versions = self._file_versions()
                if versions != self._versions:
                    self._context = self._load()
                    self._versions = versions
                    log.info("certificate_loaded file=%s", self._cert)
            except OSError as error:
                # While the files are being replaced, they may not belong together. The next call tries again.
                log.warning("certificate_not_loaded file=%s reason=%s", self._cert, cause(error))
            return self._context

    def names(self) -> list[str]:
        """Return the names and addresses that the certificate is valid for, without wildcards; names come first."""
        try:
            names = subject_names(read_regular(self._cert))
        except OSError:
            return []
        return [name for name in names if "*" not in name]

    def _file_versions(self) -> list[tuple[int, int]]:
        """Return time of change in nanoseconds and inode of each file; they differ after a file was renewed."""
        files = [self._cert] if self._key is None else [self._cert, self._key]
        versions = []
        for file in files:
            status = file.stat()
            versions.append((status.st_mtime_ns, status.st_ino))
        return versions

    def _load(self) -> ssl.SSLContext:
        """Return a context with the certificate in the files, for TLS 1.2 and later."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._cert, self._key)
        return context
