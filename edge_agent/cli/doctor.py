"""Check a device, an agent's configuration and the way to its broker."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import formats
from ..core.checks import Step, try_step
from ..core.errors import BrokerAway, HeadwaterError, MissingCapability
from ..wire.broker_steps import walk_to_broker
from . import output

if TYPE_CHECKING:
    from ..core.capabilities import Capabilities
    from ..core.config import AgentConfig


_TIERS = {
    "train": "train: trains encoders and fits heads",
    "head": "head: runs encoders and fits heads",
    "idle": "none yet",
}


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent doctor``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", type=Path, metavar="FILE", help="check every step of the agent in this TOML file")
    which.add_argument(
        "--broker",
        metavar="URL",
        help="check every step to this broker: mqtt://host or mqtts://host; several are separated by commas",
    )
    parser.add_argument("--ca", type=Path, metavar="FILE", help="trusted authorities for mqtts (default: the system's)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds for each step (default: 5)")


def doctor(arguments: argparse.Namespace) -> int:
    """Show what this device can do, what would let it do more, and whether an agent's configuration works.

    With --config, the steps of an agent are tried as far as they succeed: tier, state folder, data, head, then the
    broker's name, port, certificate and login, the topics of the agent, and whether a coordinator answers on them. An
    agent with this configuration may run meanwhile, undisturbed; a fault of it counts. Classes of the data are compared
    with the task that a coordinator named last, or with that of the bundle in use. Each broker of a list is tried.
    --broker checks the steps to a broker alone. The verdict at the end is "ready" only when nothing has failed, and
    then the exit code is 0; else it is that of the first step that failed, 75 where the broker is not reached.

    Example:
      edge-agent doctor --config agent.toml
    """
    from ..core.capabilities import find
    from ..core.config import AgentConfig, BrokerConfig, load, parse, urls_of

    device = find()
    config = None
    ca = arguments.ca
    steps: list[Step] = []
    if arguments.config is not None:
        config = load(AgentConfig, arguments.config)
        own = list(look(config))
        ca = ca or (config.broker.tls.ca if config.broker.tls else None)
        steps = list(_way(config, ca, arguments.timeout))
    else:
        own = [try_step("tier", lambda: _check_tier(device, device.tier))]
    if arguments.broker is not None:
        broker = parse(BrokerConfig, {"url": urls_of(arguments.broker)}, where="--broker")
        steps = list(walk_to_broker(broker, ca, arguments.timeout))
    content = {
        **device.model_dump(mode="json"),
        "tier": device.tier,
        "advice": list(device.advice()),
        "verdict": _verdict(device, config, own, steps),
    }
    for whose, some in (("agent", own), ("broker", steps)):
        content[whose] = [{"step": step.name, "ok": step.is_ok, "detail": step.detail} for step in some]
    output.result(arguments, content, lambda: _lines(device, config, own, steps))
    return next((step.exit_code for step in (*own, *steps) if not step.is_ok), 0)


def _way(config: AgentConfig, ca: Path | None, timeout_s: float) -> Iterator[Step]:
    """Yield the steps to the broker and a coordinator.

    A broker that takes the client's id from its certificate would end the session of an agent that runs. Then what that
    agent reports is shown instead.
    """
    from ..core.locks import lock_holder
    from ..core.storage import read_json
    from ..identity.certificates import IdentityFolder

    holder = lock_holder(config.state) if IdentityFolder(config.state).file.exists() else None
    yield from walk_to_broker(config.broker, ca, timeout_s, None if holder is not None else config)
    if holder is not None:
        status = read_json(config.state / "status.json") or {}
        reason = status.get("waits_for") or "it has just been started"

        def agent() -> str:
            if not status.get("welcomed"):
                raise BrokerAway(f"{holder} is not welcomed by a coordinator: {reason}")
            return f"{holder} is connected and welcomed; login and topics are not tried beside it"

        yield try_step("agent", agent, meaning="has no coordinator that welcomes it")


def look(config: AgentConfig) -> Iterator[Step]:
    """Yield what an agent with this configuration finds on its own device: tier, state, data, key of commands, head."""
    from .. import heads
    from ..agent.app import choose_tier
    from ..core.capabilities import find
    from ..core.config import check_tls, own_methods
    from ..core.storage import check_writable
    from ..identity.certificates import IdentityFolder, check_identity
    from ..privacy.policy import check_policy

    head = config.head
    yield try_step("tier", lambda: _check_tier(find(), choose_tier(config)))
    yield try_step("state", lambda: check_writable(config.state), f"{config.state} can be written")
    yield try_step("data", lambda: _check_data(config))
    yield try_step(
        "privacy",
        lambda: check_policy(config.privacy, own_methods(config.training)) or "'edge-agent privacy' shows what leaves",
    )
    yield try_step("commands", lambda: _check_key(config))
    yield try_step("head", lambda: heads.check(head.name, head.params), f"'{head.name}' with its parameters is known")
    if IdentityFolder(config.state).file.exists():
        yield try_step("certificate", lambda: check_identity(config, time.time()))
        yield try_step("enrolment", lambda: _ask_standing(config))
        yield try_step("clock", lambda: _compare_clocks(config))
    elif not config.broker.uses_tls and not config.broker.is_local:
        yield try_step("tls", lambda: check_tls(config.broker))
    yield from _look_at_running_agent(config)


def _check_data(config: AgentConfig) -> str:
    """Return what the local data fit.

    Raises:
        HeadwaterError: they are not there, cannot be used, or are not those of the last task.
    """
    from ..agent.data_check import last_task
    from ..data import probe
    from ..data.partition import check_own

    task = last_task(config.state)
    check_own(config.data, config.id, task, own_classes=config.head.own_classes)
    if config.data.partition is None:
        probe(config.data.source, config.data.folder)
    if task is None:
        return f"{config.data.source} is there; which classes it needs is known after the first contact"
    return f"{config.data.source} is there and fits the last task"


def _look_at_running_agent(config: AgentConfig) -> Iterator[Step]:
    """Yield a step about the agent that runs with this state folder: it fails where that agent has a fault.

    Its status file is renewed every few seconds, so what it says of a running agent is true now.
    """
    from ..core import errors
    from ..core.locks import lock_holder
    from ..core.storage import read_json
    from ..version import __version__

    try:
        holder = lock_holder(config.state)
        if holder is None:
            return
        status = read_json(config.state / "status.json") or {}
    except (HeadwaterError, OSError) as error:
        yield Step("running agent", is_ok=False, detail=str(error), exit_code=HeadwaterError.exit_code)
        return
    fault = status.get("fault")
    if status.get("condition") in {"fault", "stalled"} and isinstance(fault, dict):
        kind = getattr(errors, str(fault.get("error")), HeadwaterError)
        yield Step(
            "running agent",
            is_ok=False,
            detail=f"{fault.get('error')}: {fault.get('message')}; {fault.get('remedy')}",
            exit_code=getattr(kind, "exit_code", HeadwaterError.exit_code),
        )
        return
    other = formats.other_version(status.get("version"), __version__, "the agent")
    detail = f"{holder} has no fault; {other}" if other else f"{holder} has no fault"
    yield Step("running agent", is_ok=True, detail=detail)


def _ask_standing(config: AgentConfig) -> str:
    from ..identity.renewal import Renewal

    try:
        return f"the coordinator says that the certificate counts until {Renewal(config.state).standing()}"
    except BrokerAway as error:
        return f"not asked: {error}"


def _compare_clocks(config: AgentConfig) -> str:
    from ..identity.certificates import IdentityFolder, check_clock
    from ..identity.enrolment_port import ask

    folder = IdentityFolder(config.state)
    identity = folder.read()
    if identity is None:
        return "no certificate"
    try:
        answer = ask((identity.host, identity.port), folder.ca_der(), {"ask": "authority"}, checks_time=False)
    except BrokerAway as error:
        return f"not compared: {error}"
    return f"{check_clock(answer, time.time()):+.0f} s from the coordinator's"


def _check_key(config: AgentConfig) -> str:
    from ..wire.seal import read_key

    if read_key(config) is None:
        return "not authenticated: anyone who may publish on its topics commands it; set broker.command_key_file"
    return "authenticated: only those of the coordinator that made this agent's key are obeyed"


def _check_tier(device: Capabilities, tier: str) -> str:
    if tier == "idle":
        raise MissingCapability(f"no encoder can run here; {next(iter(device.advice()), 'see the packages above')}")
    return f"'{tier}' can be done here"


def _lines(device: Capabilities, config: AgentConfig | None, own: list[Step], steps: list[Step]) -> list[str]:
    lines = formats.pairs(
        [
            ("python", f"{device.python}, {'64' if device.is_64bit else '32'} bit"),
            ("system", f"{device.system}, {device.machine}"),
            ("board", device.board),
            ("processor", f"{device.cores} cores"),
            ("memory", f"{formats.size(device.memory_bytes)}, {formats.size(device.available_bytes)} available"),
            ("accelerators", ", ".join(device.accelerators) or "none found"),
            ("packages", ", ".join(f"{name} {version}" for name, version in device.packages.items())),
            ("suggested tier", _TIERS[device.tier]),
        ]
    )
    lines += [f"note: {advice}" for advice in device.advice()]
    for whose, some in (("agent", own), ("broker", steps)):
        lines += [f"{whose} {step.name}: {'ok' if step.is_ok else 'FAILED'}: {step.detail}" for step in some]
    return [*lines, f"verdict: {_verdict(device, config, own, steps)}"]


def _verdict(device: Capabilities, config: AgentConfig | None, own: list[Step], steps: list[Step]) -> str:
    """Return what all steps come to, in one line: ready when none has failed."""
    wrong = next((step for step in own if not step.is_ok), None)
    failed = next((step for step in steps if not step.is_ok), None)
    if wrong is not None:
        return f"not ready: {wrong.name}: {wrong.detail}"
    tier = device.tier if config is None or config.tier == "auto" else config.tier
    if failed is not None:
        why = f"the broker {failed.meaning} ({failed.name}: {failed.detail})"
        return f"not ready: {why}; the device itself can be an agent of tier '{tier}'"
    ready = f"ready as an agent of tier '{tier}'"
    if not steps:
        return f"{ready}; --config FILE tries an agent's configuration, its login included"
    return f"{ready}, and the broker answers" + ("" if config is None else ", and so does a coordinator")
