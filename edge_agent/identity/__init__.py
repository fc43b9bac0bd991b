"""Who an agent is to its federation: token, key, certificate and renewal.

Read in this order: `tokens`, `keys`, `signed_request` (what is signed, by whom, for what and until when, in all of
Headwater), `enrolment_port` (one line of JSON each way, over TLS to the coordinator), `certificates` (enrolment) and
`renewal`, whose requests are signed with the key of the certificate that they replace. When a renewal is due is decided
in `edge_agent.agent.certificate`; what the coordinator does with it is in `coordinator.identity.enrolment`. The
coordinator keeps the public half of each key only. ``cryptography`` takes 13 MB of memory: an agent renews in a child
process, and itself loads only the 7 MB that check an announcement.
"""
