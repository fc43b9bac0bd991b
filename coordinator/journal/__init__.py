"""The journal: what happened in a federation, as typed facts in an append-only, hash-chained store.

Here live the facts (one class for each kind of entry), the contract of a store, and the stores behind it. Nothing here
knows what a run, a fleet or a release currently looks like: that is derived from the facts by the folds in
`coordinator.views`. Nothing else in the coordinator reads or writes the JSON of an entry.

Read in this order: `kinds` (the names), `entries` (the facts and their fields), `store` (what an entry is, and what
every store promises about order and durability), `deferring` (entries that become durable together), `sqlite` (the
store of a state folder), `memory` (for tests, and the shortest example of a store), `postgres_connection` (how a
database is reached), `postgres_lease` (which coordinator serves), `postgres_standbys` (which ones would take over),
`postgres` (the store that coordinators on several machines share) and `schemes` (which store a URL names).

Another store derives from ``Journal`` in `store` and writes the members of ``JournalStore``; one that several machines
reach derives from ``SharedJournal``, and gets a line in `schemes`. `coordinator.state.journal_location` knows which one
a state folder has.

Some modules know of a file of SQLite: `postgres` copies its entries to one, `coordinator.state.backup` copies it,
`coordinator.service.standby` tries whether it can be written, and `coordinator.service.app` tells a full disk by its
errors.
"""
