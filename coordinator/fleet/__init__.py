"""Agents as the coordinator sees them: who is there, what they send, what is sent to them, and what is rejected.

This room is about agents, whatever run they take part in: nothing here plans a round, and a method is never imported.
An update is checked by ``Collector._check_manifest`` in `uploads`, which also refuses one that comes too late.

Read in this order: `registry` (who is online, and the commands to agents), `uploads` (updates: announced, checked,
accepted or refused), `collection` (what a round has of them, and how many it needs), `downloads` with `carousel` (one
blob to many), `rollout` and `release_commands` (bundles of releases on devices), `refusals`, `rate_limits`,
`message_ranks` and `link_breaks` (agents that send too much, or cannot stay).
"""
