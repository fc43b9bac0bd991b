"""Comparisons of methods: the same number of trials for each on validation samples, then paired seeds on the best.

What lives here: the search, the runs, the record of both, and what people read of it. What may not: how a simulation
works, and which values a method's parameters may have.

Read in this order: `records` (what a comparison has found so far, as its file keeps it), `settings` (what is compared),
`shared_settings` (the types of what all its simulations have), `tuners` and `optuna_search` (how parameters are
searched), `simulated_runs` (one simulation and its outcome), `comparing` (what is due, and what it has found),
`runners` (where simulations run), `interface` (the whole, as a call), `row_statistics` (what its runs say: means,
paired differences, hurt clients), `table_model` (what a table is), `facts` (what all rows have in common, in words),
`notes` (what stands below tables), `tables` (what each table holds), `table_formats` (a table in four forms),
`client_files` (all clients of all runs), `findings` (the same in a few sentences), `plots` (charts), `page` (all of it
in one page), `outputs` (all files that people read, made of the records alone), `logged` (the same for logs of
experiments, with all rounds of its runs).
"""
