"""``python -m edge_agent``: the same as the command ``edge-agent``."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
