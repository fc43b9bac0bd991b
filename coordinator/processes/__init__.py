"""Child processes of the coordinator: started, supervised and spoken to in one way.

What a child computes is passed in as the name of a function; nothing here knows a run, a method or a broker.

Read in this order: `supervisor` (start, limits and restarts), `pipe` (what the two processes say to each other),
`worker_main` (the child's entry), `compute` (one function call after the other in a child), `cluster` (the connection
to a Ray cluster, whose workers may be on other machines).
"""
