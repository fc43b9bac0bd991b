"""How far a federation grows on given machines, computed from costs that were measured.

Here lives arithmetic: counts of what a fleet does in a round and while idle, times the cost of one of each. Nothing
here measures anything (``coordinator.research.bench.costs`` does, and writes a file of costs), reads a state folder, or
talks to a broker. Each figure can say of which counts and costs it is made.

Read in this order: `work` (the counts), `costs` (what one of each costs, and on which machine), `settings` (fleet and
machines that are planned), `demand` (what coordinator, aggregators and brokers need), `limits` (what is reached first,
and at how many agents), `plan` (all of it together).
"""

from __future__ import annotations
