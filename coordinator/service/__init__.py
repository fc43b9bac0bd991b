"""The coordinator as a service: its event loop, start and stop, checks before the start, and its status."""
