"""``python -m coordinator`` is the command ``headwater``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
