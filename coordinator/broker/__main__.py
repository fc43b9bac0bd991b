"""The embedded broker's own process: ``python -m coordinator.broker --bind 127.0.0.1 --port 1883``."""

from __future__ import annotations

import argparse

from .serve import serve


def main() -> None:
    """Serve until standard input ends, which it does when the parent process is gone, however it went."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.broker", description=__doc__)
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, required=True, help="TCP port")
    parser.add_argument("--federation", default="home", help="whose topics the users of the password file may use")
    parser.add_argument("--password-file", help="users and hashes; without it everybody may connect")
    options = parser.parse_args()
    serve(options.bind, options.port, options.federation, options.password_file)


if __name__ == "__main__":
    main()
