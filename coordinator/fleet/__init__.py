"""Agents as the coordinator sees them: who is there, what they send, what is sent to them, and what is rejected.

This room is about agents, whatever run they take part in: nothing here plans a round, and a method is never imported.
An update is checked by ``Collector._check_manifest`` in `uploads`, which also refuses one that comes too late.

Read in this order: `members` (what an agent says of itself), `roster` with `leases` (who is online), `duplicate_ids`
(which start of an agent has its id), `run_ids` (how agents and journal name a run), `command_sender` (what is sent to
agents), `uploads` (updates: announced, checked, accepted or refused) with `upload_urls` (large ones by HTTP) and
`receipt_memory` (answers to an update that is offered again), `collection` (what a round has of them, and how many it
needs), `downloads` with `carousel` (one blob to many) and `blob_urls` (large blobs by HTTP), `rollout` and
`release_commands` (bundles of releases on devices), `rejections` (counts of what was rejected), `refusals`,
`rate_limits`, `message_ranks` and `link_breaks` (agents that send too much, or cannot stay).
"""
