"""Who belongs to a federation: its authority, tokens, the ledger of agents, and the enrolment port.

Here lives what the coordinator signs, issues and revokes. What a device does with its certificate is in
`edge_agent.identity`, and who may publish which topic in `coordinator.broker`. Nothing here knows a run.

Read in this order: `ledger` (agents with their tokens and certificates), `authority` (the key that signs), `enrolment`
(a token becomes a certificate), `port` (the network side of it), `revoked` and `restore` (who is shut out, also after a
backup), `serving` (what the broker needs from it).
"""
