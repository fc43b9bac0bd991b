"""What a head-tier device needs: memory while idle and with an encoder, CPU time until it is ready, time of a head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from edge_agent import __version__
from edge_agent.config import BrokerConfig
from edge_agent.errors import MeasuringFailed
from edge_agent.wire import messages as wire
from edge_agent.wire.messages import Topics
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.transport import Message

from ...broker import find_mosquitto
from .device_inputs import SIDE, real_features, resnet18
from .figures import Row
from .processes import Measured, Usage, answer, module, usage, wait_for
from .rounds import FEDERATION, agent_file, broker

if TYPE_CHECKING:
    from edge_agent.bundle import Bundle, EncoderPrecision

HEADS = {"lr": "LR", "svm": "SVM", "dualfed": "DualFed", "fedpick": "FedPick"}
LIMIT_S = 60.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def rows(folder: Path, cache: Path, repeats: int = 5) -> Iterator[Row]:
    """All figures of a device; ``cache`` keeps features and the exported encoder for the next time.

    Raises:
        MissingCapability: what is needed to export an encoder, or to run one, is not installed.
        MeasuringFailed: a process ended, or did not answer.
    """
    yield from idle_rows(folder, repeats)
    bundle = resnet18(cache)
    for precision in bundle.manifest.variants:
        yield from encoder_rows(bundle, precision, folder)
    features = real_features(cache)
    for head in HEADS:
        yield from head_rows(head, features, folder)


def idle_rows(folder: Path, repeats: int) -> Iterator[Row]:
    """A head-tier agent that is connected and has no bundle yet."""
    folder.mkdir(parents=True, exist_ok=True)
    with broker("mosquitto" if find_mosquitto() else "amqtt") as running:
        result = [_idle_agent(folder, f"device-{number}", running.config()) for number in range(1 + repeats)]
    del result[0]  # the first one compiles the modules, as an installation does once
    yield Row("idle agent", median([idle.rss_mb for _, idle in result]), "MB")
    yield Row("idle agent, its own pages", median([idle.own_mb for _, idle in result]), "MB")
    yield Row("CPU until ready", min(ready.cpu_s for ready, _ in result), "s")
    yield Row("CPU until ready, median", median([ready.cpu_s for ready, _ in result]), "s")


def encoder_rows(bundle: Bundle, precision: EncoderPrecision, folder: Path) -> Iterator[Row]:
    """ResNet18 in a process with all of the agent's code, one thread, one image at a time."""
    # The first child makes the .ort file, which the second only maps into memory.
    for _ in range(2):
        timed, its_usage = _child(folder, "encoder", bundle.folder, precision)
    name = f"ResNet18 {precision}"
    yield Row(f"{name} loaded and run", its_usage.rss_mb, "MB")
    yield Row(f"{name}, of it not pages of files", its_usage.own_mb, "MB")
    yield Row(f"{name}, the most while loading", its_usage.peak_mb, "MB")
    yield Row(f"{name}, load", timed["load_s"], "s")
    yield Row(f"{name}, one {SIDE} x {SIDE} image", 1000 * timed["seconds"], "ms")


def head_rows(head: str, features: tuple[Path, Path], folder: Path) -> Iterator[Row]:
    """Fitting one head on the features of 600 samples: CPU time, accuracy, memory of that process."""
    timed, _ = _child(folder, "fit", head, *features)
    name = f"{HEADS[head]} head, 600 x 512 x 10"
    name += f", {timed['epochs']:.0f} epochs" if "epochs" in timed else ""
    yield Row(f"{name}, CPU", timed["seconds"], "s")
    yield Row(f"{name}, accuracy", timed["accuracy"], "")
    yield Row(f"{name}, the process", timed["peak_mb"], "MB")


def _child(folder: Path, *arguments: object) -> tuple[dict[str, float], Usage]:
    """What a child process without torch has timed, and its usage."""
    folder.mkdir(parents=True, exist_ok=True)
    with module(
        "child", arguments, folder, module="coordinator.research.bench.device_child", environment=ONE_THREAD
    ) as child:
        result: dict[str, float] = json.loads(answer(child))
        return result, usage(child.process.pid)


def _idle_agent(folder: Path, name: str, at: BrokerConfig) -> tuple[Usage, Usage]:
    """Usage of ``edge-agent run`` when its hello arrives, and while it is idle."""
    path = agent_file(folder, name, at.url, f"images:{_some_images(folder / 'images')}", tier="head")
    host = MqttTransport(at, "bench")
    host.subscribe(*Topics(FEDERATION).for_coordinator())
    host.start()
    try:
        # Compiled modules go to a folder of ours, also where the caller has forbidden to write any.
        compiled = {"PYTHONPYCACHEPREFIX": str(folder / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}
        with module(name, ["run", "--config", path], folder, module="edge_agent", environment=compiled) as agent:
            _wait_for_hello(host, agent)
            ready = usage(agent.process.pid)
            welcome = wire.Welcome(
                software=__version__, lease_s=LIMIT_S, boot="bench", seq=1, federation=wire.new_id(), epoch=1
            )
            host.publish(Topics(FEDERATION).down(name), wire.encode(welcome))
            status = folder / name / "status.json"
            wait_for(lambda: _is_welcomed(status), [agent], what="the agent to be welcomed", limit_s=LIMIT_S)
            return ready, usage(agent.process.pid)
    finally:
        host.close()


def _some_images(folder: Path) -> Path:
    """A folder with two classes of a hundred small images each: an agent checks its data before it connects."""
    for name in ("left", "right"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(100):
            (folder / name / f"{number}.pgm").write_bytes(b"P5 32 32 255\n" + bytes([number]) * 32 * 32)
    return folder


def _wait_for_hello(host: MqttTransport, agent: Measured) -> None:
    waits = 0
    while waits < LIMIT_S:
        event = host.receive(1.0)
        waits += event is None
        agent.check()
        if not isinstance(event, Message) or not event.topic.endswith("/up"):
            continue
        if isinstance(wire.parse_from_agent(event.payload), wire.Hello):
            return
    raise MeasuringFailed(f"{agent.name} sent no hello within {LIMIT_S:.0f} s; {agent.stderr_tail()}")


def _is_welcomed(status: Path) -> bool:
    try:
        return bool(json.loads(status.read_bytes()).get("welcomed"))
    except (OSError, ValueError):
        return False
