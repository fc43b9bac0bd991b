"""Control messages: small JSON objects, checked before use.

Read in this order: `fields` (names, bounds and base classes), `up` (from agents), `down` (from a coordinator), `codec`
(as bytes), `proven` (messages of other programs, with a proof) and `site_sums` (those between a coordinator and a relay
that sums updates). Errors cross the wire as `up.Fault`, never as a traceback. Topics are in `wire.topics`.
"""
