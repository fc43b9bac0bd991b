"""Who belongs to a federation: its authority, tokens, the ledger of agents, and the enrolment port.

Here lives what the coordinator signs, issues and revokes. What a device does with its certificate is in
`edge_agent.identity`, and who may publish which topic in `coordinator.broker`. Nothing here knows a run. A certificate
is renewed by ``Enrolment._renew`` in `enrolment`, whichever way the request came; the device decides when in
``CertificateRenewal._due_step`` of `edge_agent.agent.certificate`, and asks and installs in ``Renewal`` of
`edge_agent.identity.renewal`.

Read in this order: `ledger` (agents with their tokens and certificates), `authority` (the key that signs), `enrolment`
(a token becomes a certificate, and a certificate a newer one), `port` (the network side of it, also for a renewal after
the certificate has expired), `serving` (what the broker needs, and renewals that arrive as messages), `revoked` and
`restore` (who is shut out, also after a backup).
"""
