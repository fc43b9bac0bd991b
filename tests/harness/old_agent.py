"""The agent's program with a version of the wire protocol that no coordinator understands: ``old_agent.py run ...``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from edge_agent.wire.messages import codec, fields

    fields.PROTOCOL = fields.OLDEST_PROTOCOL - 1
    for kind in (fields.Control, *fields.Control.__subclasses__()):
        kind.model_fields["v"].default = fields.PROTOCOL
        kind.model_rebuild(force=True)
    real = codec.encode
    codec.encode = lambda message, protocol=fields.PROTOCOL: real(message, protocol)
    from edge_agent.cli import main

    sys.exit(main())
