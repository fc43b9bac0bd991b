"""What devices say they got out of a run, and who still owes a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edge_agent.wire.messages import Report

from .context import Fleet, Steps, Waiting

REPORT_DEADLINE_S = 120.0
"""How long the end of a run waits for the devices' own figures."""


class Answers:
    """Reports and faults of one run."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.reports: dict[str, Report] = {}
        self.faults: dict[str, str] = {}
        self._ask: Callable[[str], None] | None = None
        self._asked: tuple[str, ...] = ()
        self._about = ""

    def report(self, agent: str, message: Report) -> None:
        """An agent tells what it got; a later report replaces an earlier one. One of an earlier release is too late."""
        if message.about and message.about != self._about:
            return
        self.reports[agent] = message
        self.faults.pop(agent, None)

    def fault(self, agent: str, reason: str) -> None:
        """An agent could not do what it was asked: it is not waited for."""
        self.faults[agent] = reason

    def is_asked(self, agent: str) -> bool:
        """Whether an answer of this agent is being waited for, or has come while others are waited for."""
        return agent in self._asked

    def about(self, bundle_id: str) -> None:
        """From now on, figures of this released bundle are wanted, and of no other."""
        self._about = bundle_id

    def collect(self, agents: tuple[str, ...], ask: Callable[[str], None], limit_s: float = REPORT_DEADLINE_S) -> Steps:
        """Until each of ``agents`` that is still there has answered, or the time is up. ``ask`` is for `ask_again`."""
        self._asked, self._ask = agents, ask
        until = self._fleet.heard_s() + limit_s
        while (owing := self.owing()) and self._fleet.heard_s() < until:
            yield Waiting("agents evaluate the final model", owing, until + self._fleet.roster.deaf_s, about="reports")
        self._asked, self._ask = (), None

    def take(self, agents: Iterable[str]) -> dict[str, Report]:
        """What these agents have said so far, which is then forgotten, faults too: they are going to be asked anew."""
        asked = set(agents)
        for agent in asked:
            self.faults.pop(agent, None)
        return {agent: self.reports.pop(agent) for agent in sorted(asked & self.reports.keys())}

    def owing(self) -> tuple[str, ...]:
        """Those that were asked, are there, and have said nothing yet."""
        return tuple(agent for agent in self._asked if self._owes(agent))

    def ask_again(self, agent: str) -> None:
        """An agent that owes an answer seems to do nothing for it: the question or the answer was lost."""
        if self._ask is not None and agent in self._asked and self._owes(agent):
            self._ask(agent)

    def _owes(self, agent: str) -> bool:
        patience = self._fleet.roster.patience(agent)
        return agent not in self.reports and agent not in self.faults and (patience is None or patience > 0)
