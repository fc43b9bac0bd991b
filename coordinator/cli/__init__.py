"""``headwater``: the commands of the data center and the workstation.

Each command is one module here. Errors of our tree become one message on stderr and their exit code; ``--json`` prints
one JSON object on stdout, and nothing else goes there.
"""

from __future__ import annotations

import sys

from edge_agent.errors import HeadwaterError, MissingCapability

__all__ = ["main"]


def main() -> None:
    """Run one command and exit with its code."""
    try:
        from .app import app
    except ImportError as error:
        module = error.name or str(error)
        print(f"headwater: {MissingCapability.package(module, 'coordinator', 'this command')}", file=sys.stderr)
        sys.exit(MissingCapability.exit_code)
    try:
        app(standalone_mode=True)
    except HeadwaterError as error:
        print(f"headwater: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("headwater: stopped", file=sys.stderr)
        sys.exit(130)
