"""Runs, from their request to their summary: queue, loop, export, release, figures, audit.

The same code carries runs of devices and of a simulation. What its rounds do is in `coordinator.rounds`; nothing here
knows a broker, a socket or a page.

Read in this order: `run_queue` (runs one after another), `run_loop` (one run, as its protocol), `results`,
`result_notes` and `run_summary` (figures and warnings), `release` (the bundle at the end), `gains` (what each run has
brought over the one before), then the rest by name.
"""
