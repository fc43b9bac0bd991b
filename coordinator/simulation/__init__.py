"""A whole federation on one machine: the coordinator's own round loop, its journal, and clients that an engine serves.

Nothing here repeats what rounds do: this room replaces only devices and the network. Nothing is imported by this file:
the settings are needed where torch is not.

Read in this order: `plan` (the settings), `settings` (the same as arguments of a function), `resuming` (which of them
may change), `setup` with `datasets`, `users`, `index_tables` and `own_parts` (data and models made from them),
`observer` (who sees each closed round), `run` (the simulation itself), `memory_plan` and `memory_watch` (whether it
fits, and stops in time), `client_pool`, `timed_clients` with `device_speeds` (clients as fast as devices),
`client_tasks` and `device_heads` (the clients), `engines` (where they compute), `results` with `figures` (the keys that
they have) and `failures`, `finished` (a run that is over, read from its folder); then `trained` (the model of a run, as
a bundle) and `notebook` (what a program has of a run).
"""
