"""The agent's program with a version of the wire protocol that no coordinator understands: ``old_agent.py run ...``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from edge_agent.wire import messages

    messages.PROTOCOL = messages.OLDEST_PROTOCOL - 1
    for kind in (messages.Control, *messages.Control.__subclasses__()):
        kind.model_fields["v"].default = messages.PROTOCOL
        kind.model_rebuild(force=True)
    real = messages.encode
    messages.encode = lambda message, protocol=messages.PROTOCOL: real(message, protocol)
    from edge_agent.cli import main

    sys.exit(main())
