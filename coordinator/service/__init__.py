"""The coordinator as a service: its event loop, start and stop, checks before the start, and its status.

Here everything comes together: this room imports runs, fleet, state and identity, and none of them imports it. Rules of
rounds, releases and transfers do not belong here; the loop only hands each event to the part that it is for.

Read in this order: `app` (start, signals, stop), `coordinator` (the loop), `preflight` (checks before anything starts),
`status` (what is written for people), and for several coordinators of one federation `peers`, `listening`, `inquiry`,
`first_start` and `standby`.
"""
