"""What the coordinator does with its own data: hosted clients, warm starts, and accuracy on proxy samples.

Hosted clients are agents like all others, in child processes of the coordinator. They run the program of a device, keep
the same state and speak the same protocol; only the transport differs: a pipe instead of a broker. So their updates
pass the same checks, they count for the same quorum, and a run with them ends in the same bits. Nothing here imports
torch in the coordinator's own process.

Read in this order: `placement` (which process, device or cluster a client gets), `transport` (messages to and from
these processes), `agents` (such a process), `lanes`, `remote_session` and `on_ray` (one whose clients compute on a
cluster), `in_memory`, `run_hooks` (what happens around a run), `own_data` (warm start and proxy), `spread` (a warm
start on several devices) and `machines` (on several machines).
"""
