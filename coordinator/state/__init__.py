"""What survives a restart: the files of a state folder, and the values that are read back from them.

The journal itself is in `coordinator.journal` and what follows from its entries in `coordinator.views`; here lie the
files beside it. Nothing here decides what a run or a release does next. A new column of the tables of agents goes to
`fleet_columns`; what no agent has yet begins in the classes ``AgentStatus`` of `coordinator.service.status` and
``AgentRow`` of `fleet_rows`.

Read in this order: `journal_location` (where the journal is), `store` (the state folder), `status_file` (what the
coordinator last wrote about its work) and `privacy_spent`, `run_lines` (the lines of ``metrics.jsonl``), `starts`
(federation id and epochs), `retention` and `backup`, `release_keys` and `command_keys`, `fleet_columns`, `fleet_rows`,
`release_rows` and `history` (fleet and releases as they are shown), `noise`, `log_file` and `fault_log`.
"""
