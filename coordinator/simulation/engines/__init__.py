"""Where the clients of a simulation compute: in this process, or in several at once.

An engine decides where and when a client computes, never what: all engines end in the same bits on one machine, but for
those that say otherwise.

Read in this order: `base` (the contract, the choice, and the engine ``serial``), `pool` (worker processes) with
`kept_workers` (those that stay between simulations), `stacked` (a cohort at once on one device), `fastest` (one of
these three by a trial), `ray_cluster` (several machines).
"""
