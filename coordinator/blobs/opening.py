"""Which way large blobs go, as ``[blobs]`` of the configuration says."""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from edge_agent.core.errors import UsageError, cause
from edge_agent.core.storage import IDENTITY

from ..config import BlobsConfig, CoordinatorConfig
from ..fleet.blob_urls import BlobUrls
from .endpoint import Address, BlobEndpoint
from .inflow import Inflow
from .ledger import StoreLedger
from .object_store import Bucket, RemoteStore, ServedFolder, StoredBlobs, try_store
from .signing import KEY_BYTES, PathSigner
from .stored_uploads import StoredUploads

BLOBS_IN_STORE = "blobs-in-store.txt"
"""The file of the state folder that names the blobs in a store."""

UPDATES_IN_STORE = "updates-in-store.txt"
"""The file of the state folder that names the updates that agents may have put into a store."""


def open_blob_urls(config: CoordinatorConfig, wake: Callable[[], None]) -> BlobUrls | None:
    """Return what gives large blobs their URLs, started; None where all blobs go over MQTT.

    Args:
        config: The coordinator's configuration.
        wake: Called in another thread when a blob has got its URL.

    Raises:
        UsageError: The address is taken, or the certificate cannot be used.
        MissingCapability: A package that the store needs is not installed.
        StateError: The list of what is in the store cannot be kept.
    """
    blobs = config.blobs
    if blobs is None:
        return None
    if blobs.serve is None:
        return _open_store(config, blobs, wake)
    signer = PathSigner(secrets.token_bytes(KEY_BYTES), time.monotonic, blobs.valid_s)
    endpoint = BlobEndpoint(
        _address_of(config, blobs),
        signer,
        blobs.above_bytes,
        tls_of(config, blobs),
        names_clients=config.identity is not None and blobs.cert is None,
        inflow=Inflow(wake) if blobs.uploads else None,
    )
    endpoint.start()
    return endpoint


def _open_store(config: CoordinatorConfig, blobs: BlobsConfig, wake: Callable[[], None]) -> StoredBlobs:
    """Return what puts blobs into a store, started, and with it what gets updates from there.

    Raises:
        UsageError: The store's protocol is not known.
        MissingCapability: A package that the store needs is not installed.
        StateError: The list of what is in the store cannot be kept.
    """
    store = store_of(blobs)
    uploads = None
    if blobs.uploads and isinstance(store, Bucket):
        ledger = StoreLedger(config.state / UPDATES_IN_STORE, store.where)
        uploads = StoredUploads(store, blobs.above_bytes, Inflow(wake), ledger, blobs.valid_s)
        uploads.start()
    stored = StoredBlobs(
        store,
        blobs.above_bytes,
        wake,
        ledger=StoreLedger(config.state / BLOBS_IN_STORE, store.where),
        valid_s=blobs.valid_s,
        uploads=uploads,
    )
    stored.start()
    return stored


def store_of(blobs: BlobsConfig) -> RemoteStore:
    """Return where blobs are put.

    Raises:
        UsageError: The store's protocol is not known.
        MissingCapability: A package that the store needs is not installed.
    """
    address = blobs.store or ""
    if blobs.is_object_store:
        return Bucket(address, blobs.endpoint, blobs.valid_s)
    return ServedFolder(Path(address), blobs.url or "")


def check_blobs(config: CoordinatorConfig) -> str:
    """Return what ``[blobs]`` does, after a try of it, for 'headwater doctor'.

    Raises:
        UsageError: The store refuses, or the certificate cannot be used.
        MissingCapability: A package that the store needs is not installed.
    """
    blobs = config.blobs
    if blobs is None:
        return "all blobs go over MQTT; there is no [blobs]"
    if blobs.serve is None:
        return try_store(store_of(blobs))
    context_of = tls_of(config, blobs)
    if context_of is not None and _certificate_of(config, blobs).exists():
        context_of()
    return f"served at {_address_of(config, blobs).url or blobs.serve}, those of more than {blobs.above_bytes} bytes"


def _address_of(config: CoordinatorConfig, blobs: BlobsConfig) -> Address:
    """Return where the endpoint listens, and the beginning of its URLs."""
    host, port = blobs.address
    url = blobs.url or ""
    if not url and config.identity is not None and port:
        name = config.identity.host
        shown = f"[{name}]" if ":" in name else name
        url = f"https://{shown}:{port}"
    return Address(host, port, url.rstrip("/"))


def _certificate_of(config: CoordinatorConfig, blobs: BlobsConfig) -> Path:
    """Return the file of the certificate that the endpoint shows."""
    return blobs.cert or config.state / IDENTITY / "broker.pem"


def tls_of(config: CoordinatorConfig, blobs: BlobsConfig) -> Callable[[], ssl.SSLContext] | None:
    """Return the function that makes the settings of TLS; None: HTTP without TLS.

    Certificates are read again for each connection: they are renewed while the coordinator runs. With ``[identity]``,
    clients have to show a certificate of the federation's authority.

    The function raises `UsageError` where a certificate cannot be used.
    """
    if blobs.cert is None and config.identity is None:
        return None
    certificate = _certificate_of(config, blobs)

    def make() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, blobs.key)
            if blobs.cert is None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(config.state / IDENTITY / "ca.pem")
                # Who is revoked is refused from the next connection on.
                context.load_verify_locations(config.state / IDENTITY / "crl.pem")
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        except OSError as error:
            raise UsageError(
                f"the certificate {certificate} cannot be used for blobs ({cause(error)}); see [blobs] cert"
            ) from error
        return context

    return make
