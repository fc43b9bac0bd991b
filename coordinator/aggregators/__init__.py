"""Aggregators: processes that take, check, store and sum the updates of a part of the agents.

What lives here: both sides of them, the side of the coordinator and the program ``headwater aggregate``, and what
passes between the two. What may not: how updates are checked (`coordinator.fleet.uploads`), what a pass over them
computes (`coordinator.rounds.passes`), and who takes part in a round.

Read in this order: `messages` (what both say), `open_round` (what is collected now, as a file), `requests` (a pass over
a part of the updates, as files), `remote` (the coordinator's side: who serves which partition), `reports` (what the
other side has to tell), `aggregator` (the other side), `app` (the program), and `sites` (the coordinator's side of
relays that sum the updates of their site).

Everything that matters is on disk in the folder that all of them share. An update counts when the coordinator has
journaled it, whichever process has received it. So nothing is lost when an aggregator is killed: another one, or the
coordinator itself, serves its partition, finds the updates in the store, and gets the same sums.
"""
