"""The web view of fleet, runs and releases: a process that reads the state folder, and never the coordinator's loop.

Read in this order: `server` (starts it), `app` (its routes), `access` and `connections` (who may ask, and how many at
once), `folder_view` (what the state folder says), `run_curves` (the figures of runs), `fleet_table` (search, order and
pages of the table of agents), `pages` (what is shown) with `render` (templates) and `pictures` (charts), `events` (news
for open pages), `actions` (what an operator can do with a token), `metrics` and `health` (for monitoring), `served` and
`asset_files` (what a browser is given besides). Rounds do not wait for any of it.
"""
