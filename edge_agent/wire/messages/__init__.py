"""Control messages: small JSON objects, checked before use.

Read in this order: `fields` (names, bounds and base classes), `up` (from agents), `down` (from a coordinator), `codec`
(as bytes). Errors cross the wire as `up.Fault`, never as a traceback. Topics are in `wire.topics`.
"""
