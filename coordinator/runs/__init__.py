"""Runs and their rounds: selection, dispatch, aggregation, metrics, release of the encoder.

The same code carries rounds of devices and of a simulation. What is asked of agents, and what arrives from them, passes
through `coordinator.fleet`; nothing here knows a broker, a socket or a page.

Read in this order: `run_queue` (runs one after another), `request` and `context` (what a run is, and what it may use),
`selection` and `pace` (who is asked, and for how long a round waits), `aggregation` with `bounds`, `robust` and
`directions` (what becomes of the updates), `results` and `result_notes` (figures), `release` (the bundle at the end),
`privacy` (the budget of all runs), then the rest by name.
"""
