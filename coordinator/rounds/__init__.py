"""The rounds of a run, of each kind behind one contract.

What lives here: how a round is planned, opened, collected and closed, what agents are asked to do, who is asked, and
the step of the server with which a round ends. What may not: the queue of runs, exports, releases and reports, which
are of a whole run and live in `coordinator.runs`; anything that formats for people. What is asked of agents, and what
arrives from them, passes through `coordinator.fleet`.

Read in this order: `round` (the contract, and what a crash repeats), `synchronous`, `server_step`, `active_run` and
`assignment`; then `buffered` with `staleness`, and `secure` with `secure_sum`. `selection` and `pace` say who is asked
and for how long a round waits, `aggregation` with `bounds`, `directions`, `class_statistics` and `robust` what becomes
of the updates, `passes` how they are read for it, and `partitioned` who else may take and read them; `server_side` with
`compute_requests` what the compute process does for them.
"""
