"""The command ``edge-agent serve``: answers inputs with a personal model until it is stopped."""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle import starter
from ..bundle.starter import bundle_path
from ..core import formats
from ..core.errors import UsageError
from . import output
from .arguments import bundle_of, cache_of, head_folder, own_head
from .where import check_exists, config_of_folder, state_of

if TYPE_CHECKING:
    from ..core.config import AgentConfig, ServeConfig
    from ..serving.pair_source import PairSource
    from ..serving.service import Device, HttpSettings, Service

_FORGET_S = 30.0
"""Seconds to wait for the broker from which the device is removed."""


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent serve``."""
    model = parser.add_argument_group("the model")
    which = model.add_mutually_exclusive_group()
    which.add_argument(
        "--bundle",
        type=bundle_path,
        metavar="PATH",
        help="bundle file (*.hwb), together with --head (default with --head: starter, the encoder of pictures that "
        "comes with this package)",
    )
    which.add_argument(
        "--state", type=Path, metavar="DIR", help="state folder of a device; a new head or bundle there is taken over"
    )
    which.add_argument(
        "--config", type=Path, default=Path("agent.toml"), help="the agent's TOML file (default: agent.toml)"
    )
    model.add_argument(
        "--head",
        type=Path,
        metavar="DIR",
        help="saved head for --bundle; default: the bundle's shared classifier, where it has one",
    )
    model.add_argument(
        "--precision",
        choices=("auto", "fp32", "int8"),
        default="auto",
        help="precision of the encoder (default: the head's)",
    )
    model.add_argument(
        "--threads", type=int, metavar="N", help="threads of the encoder, 0 = as many as cores (default: 1)"
    )
    model.add_argument(
        "--sound",
        metavar="OPTIONS",
        help="how sounds are converted to inputs: the options of the data that the encoder was trained on, such as "
        "'rate=16000&form=image'; without it sounds are rejected",
    )
    model.add_argument(
        "--cache", type=Path, metavar="DIR", help="folder of unpacked bundles (default: headwater in ~/.cache)"
    )
    inputs = parser.add_argument_group("inputs besides HTTP requests")
    inputs.add_argument(
        "--camera",
        action="append",
        default=[],
        metavar="CAMERA",
        help="answer a camera: auto, rpicam (ribbon cable of a Raspberry Pi), the number of a USB camera, /dev/videoN, "
        "an address of pictures (http://host/picture.jpg) or of a stream (rtsp://host/stream); may be repeated",
    )
    inputs.add_argument(
        "--watch",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="answer new files in this folder, which stay there; may be repeated",
    )
    inputs.add_argument(
        "--every", dest="every_s", type=float, metavar="S", help="seconds between two pictures of a camera (default: 1)"
    )
    inputs.add_argument(
        "--mqtt-in",
        action="append",
        default=[],
        metavar="TOPIC",
        help="answer each message of this topic on the broker of --mqtt: the bytes of a picture or a recording",
    )
    inputs.add_argument(
        "--sensor",
        action="append",
        default=[],
        metavar="SOURCE",
        help="answer the windows of a stream of samples, one a line: - (standard input), a pipe, a serial device, a "
        "CSV file, or mqtt:TOPIC; may be repeated",
    )
    inputs.add_argument(
        "--hop", type=int, metavar="N", help="samples between the starts of two windows (default: the task's stride)"
    )
    inputs.add_argument(
        "--rate", type=float, metavar="HZ", help="samples per second, if the stream has no column 'time'"
    )
    inputs.add_argument(
        "--speed", type=float, metavar="X", help="replay a file at X times real time (default: at once)"
    )
    where = parser.add_argument_group("the HTTP server")
    where.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1, this machine only)")
    where.add_argument("--port", type=int, metavar="N", help="port, 0 = any free one (default: 8480)")
    where.add_argument("--unix", type=Path, metavar="PATH", help="listen on this Unix socket instead")
    where.add_argument(
        "--host-name",
        dest="host_names",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which browsers may address this server; may be repeated",
    )
    where.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file of the token, created if it is missing (default: serve/token in the state folder, with --bundle "
        "or --head in the folder of --cache)",
    )
    where.add_argument(
        "--cert", type=Path, metavar="FILE", help="certificate of this server (PEM): encrypts connections"
    )
    where.add_argument(
        "--key", type=Path, metavar="FILE", help="private key of the certificate (PEM; default: in the same file)"
    )
    mqtt = parser.add_argument_group("publishing answers (MQTT, found by Home Assistant)")
    mqtt.add_argument("--mqtt", metavar="URL", help="broker, such as mqtt://homeassistant.local or mqtts://host:8883")
    mqtt.add_argument("--mqtt-user", metavar="NAME", help="user at the broker")
    mqtt.add_argument("--mqtt-password-file", type=Path, metavar="FILE", help="file whose first line is the password")
    mqtt.add_argument(
        "--mqtt-ca",
        type=Path,
        metavar="FILE",
        help="certificates of the authorities that an mqtts broker is verified by",
    )
    mqtt.add_argument("--name", metavar="NAME", help="name of the device there (default: this machine's name)")
    mqtt.add_argument(
        "--discovery-prefix", metavar="TOPIC", help="discovery prefix of Home Assistant (default: homeassistant)"
    )
    mqtt.add_argument(
        "--expire",
        dest="expire_s",
        type=int,
        metavar="S",
        help="seconds without an answer after which the device is unavailable (default: 300)",
    )
    mqtt.add_argument(
        "--share-image", action="store_true", help="publish the last image, too; it leaves the device then"
    )
    mqtt.add_argument(
        "--mqtt-forget", action="store_true", help="remove this device from the broker and Home Assistant, and exit"
    )
    mqtt.add_argument(
        "--vote", type=int, metavar="N", help="number of equal answers in a row that change the state (default: 1)"
    )


def serve(arguments: argparse.Namespace) -> int:
    """Answer inputs over HTTP with a personal model, until stopped: for programs, and for people on a page.

    POST /classify takes the raw bytes of an image, a .npy array, a CSV table or a sound. The answer has the class, its
    probability, and whether the input is unlike all training samples. GET / is a page, /v2 follows the Open Inference
    Protocol, /metrics is for Prometheus, /live and /ready are for supervisors.

    With --camera, --watch, --mqtt-in or --sensor it also answers inputs that nobody sends, and shows them on the page.
    A camera that is unplugged, or that delivers the same picture again and again, is reported there and opened again.

    By default only this machine can connect. With another --host every request needs the token that is printed at the
    start. Requests that change the device's samples always need it. With --state or --config, a head or bundle that a
    fit, a release or a rollback puts in use is taken over; no request fails meanwhile.

    Example:
      edge-agent serve --head my-head
      edge-agent serve --state /var/lib/headwater-agent --host 0.0.0.0
    """
    from ..core.children import stop_on_signals
    from ..serving.service import serving
    from ..serving.settings import http_settings, io_settings

    # 1. The settings. Every mistake in them is found here, before anything is started.
    source = _pair_source(arguments)
    device = _device(arguments, source)
    serve_config = _merge_options(arguments, device.config)
    if arguments.mqtt_forget:
        return _remove_device(arguments, serve_config)
    settings = http_settings(serve_config, _token_file(arguments, serve_config))
    io = io_settings(serve_config)

    # 2. Serve. The address is printed once the service answers, because the port is known only then.
    def print_start(service: Service) -> None:
        _print_start(arguments, settings, service)

    with stop_on_signals() as stop, serving(source, settings, device, io, print_start):
        stop.wait()
    if stop.signal == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _remove_device(arguments: argparse.Namespace, serve_config: ServeConfig) -> int:
    """Remove the device from the broker, and so from Home Assistant.

    Raises:
        UsageError: No broker is named.
        BrokerAway: The broker does not answer in time.
    """
    from ..serving.mqtt.login import ANSWERS_ADVICE
    from ..serving.mqtt.publisher import remove_device
    from ..serving.settings import mqtt_settings
    from ..wire.mqtt import MqttTransport

    settings = mqtt_settings(serve_config)
    if settings is None:
        raise UsageError(
            "--mqtt-forget removes a device from a broker; name it with --mqtt, and the device with --name"
        )
    device = settings.topics.device
    transport = MqttTransport(settings.broker, f"headwater-forget-{device}", advice=ANSWERS_ADVICE)
    remove_device(transport, settings.topics, _FORGET_S, time.monotonic)
    result = {"forgotten": device, "broker": settings.broker.names}
    return output.result(arguments, result, lambda: [f"{device} is removed from {settings.broker.names}"])


def _pair_source(arguments: argparse.Namespace) -> PairSource:
    """Return where the pair comes from.

    Raises:
        UsageError: A named file or folder is missing, or the options exclude each other.
    """
    from ..serving.pair_source import NamedPair, StatePair

    threads = 1 if arguments.threads is None else arguments.threads
    if arguments.bundle is None and arguments.head is not None:
        if arguments.state is not None:
            raise UsageError("--head goes with --bundle; the head of a state folder is the one in use there")
        arguments.bundle = bundle_path(starter.NAME)
    if arguments.bundle is None:
        state = state_of(arguments, ", or without an agent a head that 'edge-agent fit' has saved (--head DIR)")
        check_exists(state, "a device's state folder")
        return StatePair(state, arguments.precision, threads)
    # A state folder that is named as the bundle stands for its device, as for 'edge-agent predict'.
    if arguments.head is None and own_head(arguments.bundle) is not None:
        return StatePair(arguments.bundle, arguments.precision, threads)
    bundle = bundle_of(arguments)
    return NamedPair(bundle, head_folder(arguments.head), arguments.precision, threads)


def _device(arguments: argparse.Namespace, source: PairSource) -> Device:
    """Return the device whose samples may be corrected, or the reason why corrections are rejected."""
    from ..agent.head_tier import why_not_from_added
    from ..core.config import AgentConfig, load
    from ..serving.pair_source import StatePair
    from ..serving.service import Device

    if not isinstance(source, StatePair):
        advice = "'edge-agent import BUNDLE --state DIR', add samples, then 'edge-agent serve --state DIR'"
        return Device(why_not=f"corrections need the state folder of a device: {advice}")
    if arguments.bundle is None and arguments.state is None:
        return Device(load(AgentConfig, arguments.config))
    state = arguments.state if arguments.bundle is None else arguments.bundle
    config = config_of_folder(state)
    why_not = why_not_from_added(config)
    if why_not:
        return Device(config, f"the head cannot be fitted here: {why_not}; start with the agent's file (--config)")
    return Device(config)


def _merge_options(arguments: argparse.Namespace, config: AgentConfig | None) -> ServeConfig:
    """Return ``[serve]`` of the configuration, if there is one, with the options of the command line on top.

    Raises:
        ConfigError: An option is invalid; all mistakes are listed.
    """
    from ..core.config import ServeConfig, parse

    from_file = {} if config is None or config.serve is None else config.serve.model_dump()
    options = {}
    for name in ServeConfig.model_fields:
        value = getattr(arguments, name, None)
        # An option that is not on the command line is None, an empty list, or a switch that is off. 0 is a value.
        is_given = value is not None and value is not False and value != []
        if is_given:
            options[name] = value
    return parse(ServeConfig, {**from_file, **options}, where="options of edge-agent serve")


def _token_file(arguments: argparse.Namespace, serve: ServeConfig) -> Path:
    """Return the file of the token: the one that is named, or one in the state folder or the folder of bundles."""
    if serve.token_file is not None:
        return serve.token_file
    folder = cache_of(arguments) if arguments.bundle is not None else state_of(arguments)
    return folder / "serve" / "token"


def _print_start(arguments: argparse.Namespace, settings: HttpSettings, service: Service) -> None:
    """Print the pair in use, the address of the page and how to send an input, as text or JSON."""
    url = settings.url(service.http.port)
    page = url if isinstance(settings.address, Path) else f"{url}#token={settings.token}"
    content: dict[str, Any] = {"url": url, "page": page, "token": settings.token, "pair": None}
    if service.predictor.is_ready:
        pair = service.predictor.pair
        content["pair"] = {**pair.id.as_json(), "precision": pair.encoder.precision, "classes": list(pair.class_names)}
    if arguments.json:
        print(json.dumps(content), flush=True)
        return
    answers = f"nothing yet: {service.watch.problem}"
    if service.predictor.is_ready:
        pair = service.predictor.pair
        classes = f", {len(pair.class_names)} classes" if pair.class_names else ""
        answers = (
            f"{pair.id.head}{classes}; bundle '{pair.bundle.manifest.name}' {pair.id.bundle}, {pair.encoder.precision}"
        )
    header = "" if settings.is_local else f"-H 'Authorization: Bearer {settings.token}' "
    command = f"curl {header}--data-binary @FILE {url}classify"
    if isinstance(settings.address, Path):
        command = f"curl --unix-socket {settings.address} --data-binary @FILE http://localhost/classify"
    rows: list[tuple[str, object]] = [("answers", answers), ("page", page), ("try", command)]
    if not settings.is_local and settings.tls is None:
        rows.append(
            ("note", "the connection is not encrypted: others on this network can read the answers and the token")
        )
    print("\n".join(formats.pairs(rows)), flush=True)
