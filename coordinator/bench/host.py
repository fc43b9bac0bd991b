"""A coordinator under measurement: the real one, which also knows the benchmark's method and encoder."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from ..service.app import coordinator, load_config, stop_on_signals
from . import noop, w1
from .processes import say


def main() -> None:
    """Serve as ``headwater serve`` does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    import torch  # now, so that "idle" is what a coordinator with torch takes

    torch.set_num_threads(1)
    noop.register()
    w1.register()
    with coordinator(load_config(arguments.config)) as service, stop_on_signals() as stop:
        say("ready")
        service.serve(stop)


if __name__ == "__main__":
    main()
