"""What agents say: checked, counted as a sign of life, and handed to whoever it concerns."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from edge_agent import __version__
from edge_agent.errors import MessageError
from edge_agent.task import Task
from edge_agent.wire import messages as wire
from edge_agent.wire.chunks import decode_frame

from ..fleet.commands import Orders
from ..fleet.downloads import Distributor
from ..fleet.duplicate_ids import Doubles
from ..fleet.registry import Roster
from ..fleet.uploads import Collector
from ..runs.release import Releases
from ..state.journal import utc_now

if TYPE_CHECKING:
    from ..runs.round_loop import RunLoop

log = logging.getLogger(__name__)

MAX_PRESENCE_BYTES = 100


class Inbox:
    """Takes the messages of all agents of one coordinator."""

    def __init__(
        self,
        roster: Roster,
        doubles: Doubles,
        orders: Orders,
        distributor: Distributor,
        collector: Collector,
        releases: Releases,
        *,
        task: Task,
        loop: Callable[[], RunLoop | None],
        is_alone: Callable[[], bool],
    ) -> None:
        """``task`` is that of the next run, ``loop`` the run under way.

        ``is_alone``: whether no other coordinator serves the federation.
        """
        self._roster, self._doubles, self._orders = roster, doubles, orders
        self._distributor, self._collector, self._releases = distributor, collector, releases
        self._task, self._loop, self._is_alone = task, loop, is_alone

    def take(self, agent: str, kind: str, payload: bytes) -> None:
        """One message of an agent; ``kind`` is that of its topic, as `Topics.sender` tells it.

        Raises:
            HeadwaterError: the message is not what it should be; it costs itself and nothing else.
        """
        if kind == "ub":
            self._collector.chunk(agent, decode_frame(payload))
        elif kind == "s":
            self._on_presence(agent, payload)
        else:
            self._on_control(agent, wire.parse_from_agent(payload))

    def _on_presence(self, agent: str, payload: bytes) -> None:
        """The last will of an agent's connection: news only of the newest one, which its hello has named."""
        if len(payload) > MAX_PRESENCE_BYTES:
            raise MessageError(f"presence of {len(payload)} bytes, at most {MAX_PRESENCE_BYTES} are read")
        state, *said = payload.decode("ascii", "replace").split(" ")
        member = self._roster.get(agent)
        if state != "offline" or member is None or not said or said[0] != member.boot:
            return
        if said[1:] != [str(member.connection)]:
            log.info("will_ignored agent=%s of=%s: not of its connection %d", agent, said[1:2], member.connection)
            return
        log.info("agent_offline agent=%s", agent)
        self._lose(agent)

    def _on_control(self, agent: str, message: wire.Control) -> None:
        if isinstance(message, wire.Hello):
            self._on_hello(agent, message)
            return
        if self._doubles.is_claiming(agent, message.boot):
            return
        is_known = self._roster.heard(agent, message.boot)
        if not is_known and not isinstance(message, wire.Bye):
            self._orders.send(agent, wire.Who())
        if isinstance(message, wire.Bye):
            if is_known:  # else it is of another start of that id
                self._lose(agent)
            return
        if is_known or not self._is_of_another_start(agent, message):
            self._on_work(agent, self._orders.with_run_name(agent, message))

    def _is_of_another_start(self, agent: str, message: wire.Control) -> bool:
        """Whether a message that is not of the start on the roster says nothing of that start, and changes nothing.

        ``edge-agent doctor`` sends heartbeats under the id of an agent that works meanwhile. What else an agent says
        before its hello is taken: an update is known by its content, and an agent whose lease ran out is still itself.
        """
        if isinstance(message, wire.Heartbeat):
            return True
        member = self._roster.get(agent)
        return isinstance(message, wire.Fault) and member is not None and member.boot != message.boot

    def _on_work(self, agent: str, message: wire.Control) -> None:
        if isinstance(message, wire.UpdateManifest):
            self._collector.manifest(agent, message)
        elif isinstance(message, wire.Have | wire.Want | wire.Progress):
            self._on_download(agent, message)
        else:
            self._on_run_message(agent, message)

    def _on_download(self, agent: str, message: wire.Have | wire.Want | wire.Progress) -> None:
        if isinstance(message, wire.Have):
            self._distributor.have(agent, message.digest)
        elif isinstance(message, wire.Progress):
            self._distributor.progress(agent, message.digest, message.seen)
        elif not self._distributor.want(agent, message.digest, message.ranges):
            self._releases.offer_again(agent, message.digest)

    def _on_run_message(self, agent: str, message: wire.Control) -> None:
        loop = self._loop()
        if isinstance(message, wire.Fault):
            self._roster.failed(agent, message)
            if loop is not None and loop.run == message.run:
                loop.on_fault(agent, message)
        elif isinstance(message, wire.Report):
            self._on_report(agent, message)
        elif isinstance(message, wire.Heartbeat):
            if not self._roster.is_as(agent, message.condition):
                self._orders.send(agent, wire.Who())  # what it has to say was said to another start of ours
            if loop is not None:
                loop.on_heartbeat(agent, message)

    def _on_report(self, agent: str, message: wire.Report) -> None:
        """What an agent of the roster got. Anybody else's word comes again after their hello if it was asked for."""
        loop = self._loop()
        if self._roster.reported(agent, message) and loop is not None and loop.run == message.run:
            loop.answers.report(agent, message)

    def _on_hello(self, agent: str, message: wire.Hello) -> None:
        if not self._doubles.admits(agent, message):
            return
        if message.federation not in {"", self._orders.federation}:  # it decides whether its own coordinator is gone
            self._orders.announce_to(agent)
            return
        if message.federation and not self._orders.may_give(agent, message.epoch, self._is_alone):
            return
        before = self._roster.get(agent)
        self._collector.greet(agent)
        self._roster.hello(agent, message)
        if before is None or before.boot != message.boot or not before.is_present:
            self._distributor.forget(agent)
            event = "agent_joined" if before is None else "agent_back"
            log.info("%s agent=%s tier=%s samples=%s", event, agent, message.tier, message.samples or "unknown")
        now = utc_now().isoformat(timespec="seconds")
        welcome = wire.Welcome(software=__version__, lease_s=self._roster.lease_s, time=now)
        self._orders.send(agent, welcome)
        if (loop := self._loop()) is not None:
            loop.invite(agent)
        if message.tier == "head":
            self.tell_task(agent, self._task if loop is None else loop.request.task)
            self._releases.offer(agent, message.bundle_id)

    def tell_task(self, agent: str, task: Task) -> None:
        """Let an agent that would see the task only with a bundle look at its data and head now."""
        with contextlib.suppress(MessageError):  # too long for a message, with thousands of classes
            self._orders.send(agent, wire.TaskNotice(task=task))

    def _lose(self, agent: str) -> None:
        self._roster.gone(agent)
        self._distributor.forget(agent)
