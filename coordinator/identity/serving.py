"""What serves a federation with certificates on this machine: Mosquitto's files, the broker, and revocation.

The certificates of broker and coordinator are made from the authority at each start, and again before they end.
"""

from __future__ import annotations

import getpass
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from edge_agent.core.config import BrokerConfig, TlsConfig
from edge_agent.core.errors import HeadwaterError, MissingCapability, StateError, UsageError
from edge_agent.core.locks import lock_holder
from edge_agent.core.storage import read_regular, write_private
from edge_agent.identity.certificates import show_utc
from edge_agent.identity.enrolment_port import CertificateRequest
from edge_agent.wire.messages.down import Renewed
from edge_agent.wire.messages.up import Renew
from edge_agent.wire.mqtt import MqttTransport

from ..broker import ManagedMosquitto, find_mosquitto, held_port, limits_text
from ..broker.access import COORDINATOR_USER, mosquitto_acl
from ..config import IdentityConfig
from ..journal.store import utc_now
from .authority import Authority, pem_of
from .enrolment import Enrolment
from .ledger import Revoked, is_revoked
from .port import EnrolmentPort

log = logging.getLogger(__name__)

SERVER_LIFE = timedelta(days=365)
RENEW_BEFORE = timedelta(days=180)
SESSION_LIFE = timedelta(minutes=5)
"""Of the certificate with which the coordinator takes a revoked agent's session over."""


class BrokerFiles:
    """The files of a federation's Mosquitto, below the coordinator's state folder."""

    def __init__(self, enrolment: Enrolment) -> None:
        self.enrolment = enrolment
        self.folder = enrolment.folder
        self.settings = self.folder / "mosquitto.conf"
        self.rules = self.folder / "mosquitto.acl"
        self.broker = self.folder / "broker.pem"
        self.coordinator = self.folder / "coordinator.pem"

    def write(self, now: datetime) -> None:
        """Write configuration, topic rules, list of revoked certificates, and those certificates that are due."""
        config = self.enrolment.config
        folder = self.folder.resolve()
        self.write_rules()
        write_private(self.settings, mosquitto_settings(config, folder).encode())
        with self.enrolment.ledger.changing():
            self.enrolment.write_crl()
        self.renew(now)

    def write_rules(self) -> None:
        """Write the topic rules; a broker that runs is told by `IdentityService.tick`."""
        with self.enrolment.ledger.changing():
            rules = mosquitto_acl(self.enrolment.federation, self.enrolment.relays())
            write_private(self.rules, rules.encode())

    def renew(self, now: datetime) -> bool:
        """Make the certificates of broker and coordinator that are due; return whether any was."""
        authority = self.enrolment.authority
        hosts = server_names(self.enrolment.config)
        has_new = False
        for path, names in ((self.broker, hosts), (self.coordinator, None)):
            if is_due(path, authority, names, now):
                key = ec.generate_private_key(ec.SECP256R1())
                if names is None:
                    certificate = authority.for_client(COORDINATOR_USER, key.public_key(), now, SERVER_LIFE)
                else:
                    certificate = authority.for_server(names, key.public_key(), now, SERVER_LIFE)
                write_private(path, pem_of(key) + certificate.public_bytes(Encoding.PEM))
                has_new = True
        return has_new

    def client(self, url: str, file: Path | None = None) -> BrokerConfig:
        """Return how the coordinator connects; ``file``: with this key and certificate instead of its own."""
        tls = TlsConfig(ca=self.folder / "ca.pem", cert=self.coordinator if file is None else file)
        return BrokerConfig(url=url, tls=tls)


def mosquitto_settings(config: IdentityConfig, folder: Path) -> str:
    """Return a Mosquitto configuration: no client without a certificate, which gives its user and its id.

    With the id from the certificate, no client can take over the session of another one.
    """
    lines = [
        f"listener {config.port} {config.bind}",
        f"user {getpass.getuser()}",
        f"cafile {folder / 'ca.pem'}",
        f"certfile {folder / 'broker.pem'}",
        f"keyfile {folder / 'broker.pem'}",
        f"crlfile {folder / 'crl.pem'}",
        "tls_version tlsv1.2",
        "require_certificate true",
        "use_identity_as_username true",
        "use_username_as_clientid true",
        "allow_anonymous false",
        f"acl_file {folder / 'mosquitto.acl'}",
        "retain_available false",
        *limits_text(),
    ]
    return "\n".join([*lines, ""])


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written anew: its number and its time; zeros where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (status.st_ino, status.st_mtime_ns)


def server_names(config: IdentityConfig) -> list[str]:
    """Return the names and addresses that devices and the coordinator may use, as a certificate spells them."""
    names = [config.host]
    if config.bind not in {"0.0.0.0", "::", "localhost"}:  # noqa: S104 - compared, not bound
        names.append(config.bind)
    machine = socket.gethostname()
    if machine.isascii():  # a certificate holds no other name
        names.append(machine)
    names += ["localhost", "127.0.0.1", "::1"]
    return list(dict.fromkeys(_canonical(name) for name in names))


def _canonical(host: str) -> str:
    """Return an address in its usual spelling, and a name as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def is_due(path: Path, authority: Authority, hosts: list[str] | None, now: datetime) -> bool:
    """Return whether a new certificate has to be made, because the one in a file is missing, wrong or about to end.

    Args:
        path: The file with the certificate.
        authority: The authority that must have issued it.
        hosts: The names and addresses that it must have; None: any.
        now: The time.
    """
    try:
        content = read_regular(path)
        certificate = x509.load_pem_x509_certificate(content[content.index(b"-----BEGIN CERTIFICATE") :])
        certificate.verify_directly_issued_by(authority.certificate)
        if hosts is not None and _names_in(certificate) != set(hosts):
            return True
    except Exception:  # noqa: BLE001 - whatever is wrong with it, another one is made
        return True
    return certificate.not_valid_after_utc - now < RENEW_BEFORE


def _names_in(certificate: x509.Certificate) -> set[str]:
    """Return the names and addresses of a server's certificate."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return {*names.get_values_for_type(x509.DNSName), *addresses}


def checks(
    state: Path, federation: str, config: IdentityConfig, now: datetime | None = None
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Return name and function of each check of a federation's identity, for 'headwater doctor'.

    The functions return what they found, or raise an error that says what to do.
    """
    at = now or utc_now()

    def authority() -> str:
        certificate = Enrolment(state, federation, config).authority.certificate
        begin = certificate.not_valid_before_utc
        end = certificate.not_valid_after_utc
        if not begin <= at <= end:
            raise StateError(
                f"the authority's certificate holds from {begin:%Y-%m-%d} to {end:%Y-%m-%d}, and this machine's clock "
                f"says {at:%Y-%m-%d %H:%M} UTC; set the clock ('timedatectl set-ntp true')"
            )
        return f"{Enrolment(state, federation, config).authority.fingerprint}, until {end:%Y-%m-%d}"

    def broker() -> str:
        issuer = Enrolment(state, federation, config)
        names = server_names(config)
        if is_due(BrokerFiles(issuer).broker, issuer.authority, names, at):
            return f"'headwater serve' makes a new certificate for {', '.join(names)}"
        return f"holds for {', '.join(names)}"

    def mosquitto() -> str:
        """Return which program serves, and that its ports are free or by whom it was started."""
        program = find_mosquitto()
        if program is None:
            raise MissingCapability("mosquitto is not installed; apt-get install mosquitto")
        holder = lock_holder(state)
        if holder is not None:
            return f"{program}, started by {holder}"
        for port in (config.port, config.enroll_port):
            with held_port(config.bind, port):
                pass
        return f"{program}; ports {config.port} and {config.enroll_port} of {config.bind} are free"

    return iter([("authority", authority), ("certificate", broker), ("mosquitto", mosquitto)])


class IdentityService:
    """Broker, enrolment port and revocation of a serving coordinator. Start it, and call `tick` now and then."""

    def __init__(self, enrolment: Enrolment) -> None:
        self.enrolment = enrolment
        self.files = BrokerFiles(enrolment)
        config = enrolment.config
        self.broker = ManagedMosquitto(config.bind, config.port, self.files.settings)
        self.port = EnrolmentPort(enrolment, self.files.broker)
        self._crl = (0, 0)
        self._rules = (0, 0)
        self._listed = Revoked()
        self._revoked = frozenset[str]()
        self._ending: list[threading.Thread] = []
        self._renew_at = self._warn_at = float("-inf")

    def start(self, now: datetime) -> None:
        """Write the broker's files, and start the broker and the enrolment port.

        Raises:
            MissingCapability: mosquitto is not installed.
            UsageError: a port is taken.
            BrokerAway: the broker does not start.
        """
        self.files.write(now)
        self._rules = _stamp(self.files.rules)
        self._look()
        self.broker.start()
        self.port.start()
        log.info("identity federation=%s authority=%s", self.enrolment.federation, self.enrolment.authority.fingerprint)

    def stop(self) -> None:
        """Stop the enrolment port and the broker, and wait for sessions that are just being ended."""
        self.port.stop()
        self.broker.stop()
        for thread in self._ending:
            thread.join()

    def client(self) -> BrokerConfig:
        """Return the configuration with which the coordinator connects to its broker."""
        return self.files.client(self.broker.url)

    def admits(self, agent: str) -> bool:
        """Return whether messages of this agent count; they do not once all of its certificates are revoked."""
        if agent in self._revoked:
            if is_revoked(self.enrolment.folder, agent):
                return False
            self._revoked -= {agent}
        return True

    def generation(self, agent: str) -> int:
        """Return the generation of the key of this agent's commands; each revocation begins another."""
        return self._listed.generations.get(agent, 0)

    def most_samples(self, agent: str) -> int | None:
        """Return the most samples that its enrolment lets this agent declare; None: no limit."""
        record = self.enrolment.ledger.get(agent)
        return None if record is None else record.max_samples

    def renewed(self, agent: str, message: Renew) -> Renewed:
        """Return the answer to an agent that asks for a new certificate."""
        try:
            request = CertificateRequest(
                federation=self.enrolment.federation,
                name=agent,
                csr=message.csr,
                serial=message.serial,
                signature=message.signature,
            )
            certificate = self.enrolment.certify(request)
        except UsageError as error:
            log.warning("renewal_refused agent=%s reason=%s", agent, error)
            return Renewed(refused=str(error)[:1000])
        until = show_utc(certificate.not_after)
        log.info("certificate_renewed agent=%s key=%s until=%s", agent, certificate.key, until)
        return Renewed(certificate=certificate.der)

    def tick(self, clock_s: float, now: datetime) -> list[str]:
        """Follow revocations, and renew the broker's certificate; return the agents of whom one was revoked since.

        The broker knows of the revocations by then, and the agents' sessions are being ended.
        """
        try:
            return self._tick(clock_s, now)
        except (HeadwaterError, OSError) as error:  # a full disk: no reason to end rounds
            if clock_s >= self._warn_at:
                self._warn_at = clock_s + 60
                log.error("identity_not_followed reason=%s; tried again", error)
            return []

    def _tick(self, clock_s: float, now: datetime) -> list[str]:
        """Do what `tick` says.

        Raises:
            HeadwaterError, OSError: A file cannot be read or written.
        """
        if clock_s >= self._renew_at:
            if self.files.renew(now):
                self.broker.reload()
            self._renew_at = clock_s + 3600
        rules = _stamp(self.files.rules)
        if rules != self._rules:
            self._rules = rules
            self.broker.reload()
            log.info("topic_rules_changed relays=%s", ", ".join(sorted(self.enrolment.relays())) or "none")
        if _stamp(self.enrolment.crl) == self._crl:
            return []
        agents = self._look()
        self.broker.reload()
        for name in agents:
            if self.admits(name):
                log.info("agent_enrolled_again agent=%s: sessions with its old certificate end now", name)
            else:
                log.warning("agent_revoked agent=%s: its session ends now", name)
        if agents:
            # In a thread: each session takes a connection to the broker, and no message waits for that.
            thread = threading.Thread(target=self._end_sessions, args=(agents, now), name="revoke", daemon=True)
            running = [earlier for earlier in self._ending if earlier.is_alive()]
            self._ending = [*running, thread]
            thread.start()
        return agents

    # --- inside ------------------------------------------------------------------------------------------------------

    def _look(self) -> list[str]:
        """Read who is revoked, and return the agents with a certificate that was not revoked at the last look."""
        stamp = _stamp(self.enrolment.crl)  # before the list: one that changes meanwhile is read again
        listed = self.enrolment.revoked()
        before = self._listed.certificates
        self._listed = listed
        self._revoked = frozenset(listed.agents)
        self._crl = stamp
        return sorted({entry.agent for serial, entry in listed.certificates.items() if serial not in before})

    def _end_sessions(self, names: list[str], now: datetime) -> None:
        """Take over the sessions of these agents: Mosquitto reads the list of revoked certificates at connect only."""
        for name in names:
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = self.enrolment.authority.for_client(name, key.public_key(), now, SESSION_LIFE)
            file = self.files.folder / f"ending-{name}.tmp"
            try:
                write_private(file, pem_of(key) + certificate.public_bytes(Encoding.PEM))
                config = self.files.client(self.broker.url, file).model_copy(update={"wait": False})
                transport = MqttTransport(config, name)
                transport.start()
                transport.close()
                log.info("session_ended agent=%s", name)
            except (HeadwaterError, OSError) as error:
                log.error("session_not_ended agent=%s reason=%s: restart the coordinator", name, error)
            finally:
                file.unlink(missing_ok=True)
