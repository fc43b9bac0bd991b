"""The rounds of a run, of each kind behind one contract.

What lives here: how a round is planned, opened, collected and closed (`round`), the three kinds of rounds
(`synchronous`, `buffered`, `secure`), what agents are asked to do (`assignment`), and the step of the server with
which a round ends (`server_step`). What may not: the queue of runs, exports, releases and reports, which are of a whole
run and live in `coordinator.runs`; anything that formats for people.

Read in this order: `round`, which has the protocol and what a crash repeats; `synchronous`; `server_step`;
`active_run` and `assignment`; then `buffered` with `staleness`, and `secure` with `secure_sum`.
"""
