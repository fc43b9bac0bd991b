"""The web view of fleet, runs and releases: a process that reads the state folder, and never the coordinator's loop.

`server` starts it, `app` has its routes, `pages` what they show, `actions` what an operator can do with a token.
`folder_view` holds what the state folder says, `run_curves` the figures of runs. Rounds do not wait for any of it.
"""
