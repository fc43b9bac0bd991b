"""Answers over an encrypted connection, and a certificate that is renewed."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import threading
import urllib.request

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from serving_site import png, square

from edge_agent.core.config import ServeConfig, parse
from edge_agent.core.errors import ConfigError, UsageError
from edge_agent.serving.http_api.certificate import ServerCertificate
from edge_agent.serving.http_api.server import HttpLimits
from edge_agent.serving.service import HttpSettings
from edge_agent.serving.settings import http_settings

LOOPBACK = (x509.IPAddress(ipaddress.ip_address("127.0.0.1")),)


def write_certificate(folder, names=LOOPBACK):
    """A certificate of its own authority for these names, and its key; returns both files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "serve")])
    now = dt.datetime.now(dt.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file = folder / "cert.pem"
    key_file = folder / "key.pem"
    # As programs that renew certificates do: a new file in the place of the old one.
    for path, content in (
        (
            key_file,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        ),
        (cert_file, certificate.public_bytes(serialization.Encoding.PEM)),
    ):
        new = path.with_suffix(".new")
        new.write_bytes(content)
        new.replace(path)
    return cert_file, key_file


def ask(port, authority, body=None):
    """Ask as a client that trusts this certificate alone."""
    context = ssl.create_default_context(cafile=authority)
    with urllib.request.urlopen(f"https://127.0.0.1:{port}/classify", body, 30, context=context) as response:
        return response.status, response.read()


def test_answers_are_encrypted_and_a_renewed_certificate_is_taken_without_a_restart(serve, source, tmp_path):
    cert, key = write_certificate(tmp_path)
    before = cert.read_bytes()
    site = serve(source, tls=ServerCertificate(cert, key))
    photo = png(square("red"))
    status, content = ask(site.port, cert, photo)
    assert status == 200
    assert b'"class":"red"' in content
    with pytest.raises(OSError, match=r"reset|closed|refused|Remote end"):
        urllib.request.urlopen(f"http://127.0.0.1:{site.port}/live", timeout=30)
    write_certificate(tmp_path)
    assert cert.read_bytes() != before
    assert ask(site.port, cert, photo)[0] == 200
    old = tmp_path / "old.pem"
    old.write_bytes(before)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(site.port, old, photo)


def test_a_client_that_never_begins_the_handshake_makes_room(serve, source, tmp_path):
    cert, key = write_certificate(tmp_path)
    site = serve(source, tls=ServerCertificate(cert, key), limits=HttpLimits(connections=1))
    with socket.create_connection(("127.0.0.1", site.port), timeout=30) as silent:
        while not site.service.http._server.slots._held:
            threading.Event().wait(0.01)
        assert ask(site.port, cert, png(square("red")))[0] == 200
        assert silent.recv(100) == b""


def test_files_that_are_half_renewed_leave_the_one_before(tmp_path):
    cert, key = write_certificate(tmp_path)
    certificate = ServerCertificate(cert, key)
    before = certificate.context()
    key.write_bytes(b"half")
    assert certificate.context() is before
    key.unlink()
    assert certificate.context() is before
    write_certificate(tmp_path)
    assert certificate.context() is not before


@pytest.mark.parametrize("damage", ["missing", "no certificate", "another key"])
def test_files_that_cannot_be_used_are_said_at_the_start(tmp_path, damage):
    cert, key = write_certificate(tmp_path)
    if damage == "missing":
        cert.unlink()
    elif damage == "no certificate":
        cert.write_text("nothing", encoding="ascii")
    else:
        other = tmp_path / "other"
        other.mkdir()
        key = write_certificate(other)[1]
    with pytest.raises(UsageError, match=r"certificate .*cert\.pem, key .*key\.pem: .*; expected PEM files"):
        ServerCertificate(cert, key)


def test_the_settings_of_the_file_and_the_address_of_the_page(tmp_path):
    cert, key = write_certificate(tmp_path)
    config = parse(ServeConfig, {"host": "::1", "cert": str(cert), "key": str(key)}, where="test")
    settings = http_settings(config, tmp_path / "token")
    assert settings.url(5) == "https://[::1]:5/"
    assert isinstance(settings, HttpSettings)
    # Other machines have to use a name in the certificate.
    names = [x509.DNSName("*.lan"), x509.IPAddress(ipaddress.ip_address("192.0.2.7")), x509.DNSName("porch.lan")]
    certificate = ServerCertificate(*write_certificate(tmp_path, names))
    for host, expected in (("0.0.0.0", "porch.lan"), ("192.0.2.9", "porch.lan"), ("192.0.2.7", "192.0.2.7")):
        assert HttpSettings((host, 0), "token", tls=certificate).url(5) == f"https://{expected}:5/"
    with pytest.raises(ConfigError, match="cert is not set"):
        parse(ServeConfig, {"key": str(key)}, where="test")


def test_a_client_that_agrees_on_no_key_loses_its_place(serve, source, tmp_path):
    cert, key = write_certificate(tmp_path)
    site = serve(source, tls=ServerCertificate(cert, key), limits=HttpLimits(connections=1, request_s=0.3))
    for begin in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", site.port), timeout=30) as silent:
            silent.sendall(begin)
            with contextlib.suppress(ConnectionError):
                while silent.recv(100):
                    pass
    status = 0
    while status != 200:  # its thread ends a moment after its connection
        with contextlib.suppress(OSError):
            status, _ = ask(site.port, cert, png(square("red")))


def test_why_a_large_body_was_refused_is_read_over_an_encrypted_connection(serve, source, tmp_path):
    cert, key = write_certificate(tmp_path)
    site = serve(source, tls=ServerCertificate(cert, key), limits=HttpLimits(body_bytes=1000))
    context = ssl.create_default_context(cafile=cert)
    with (
        socket.create_connection(("127.0.0.1", site.port), timeout=30) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as encrypted,
    ):
        encrypted.sendall(b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n")
        for _ in range(50):
            encrypted.sendall(bytes(80_000))
        assert encrypted.recv(65536).startswith(b"HTTP/1.1 413")
