"""Comparisons of methods: the same number of trials for each on validation samples, then paired seeds on the best.

What lives here: the search, the runs, and the record of both. What may not: how a simulation works, and which values a
method's parameters may have.

Read in this order: `records` (what a comparison has found so far, as its file keeps it), `settings` (what is compared),
`tuners` and `optuna_search` (how parameters are searched), `simulated_runs` (one simulation and its outcome),
`comparing` (what is due, and what it has found), `runners` (where simulations run), `interface` (the whole, as a call).
"""
