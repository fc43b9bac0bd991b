"""Agents as the coordinator sees them: who is there, what they send, what is sent to them, and what is rejected.

This room is about agents, whatever run they take part in: nothing here plans a round, and a method is never imported.

Read in this order: `registry` (who is online, and the commands to agents), what carries updates up and blobs down, with
`carousel` (one blob to many), `rollout` and `release_commands` (bundles of releases on devices), `refusals`,
`rate_limits`, `message_ranks` and `link_breaks` (agents that send too much, or cannot stay).
"""
