"""The agent: its event loop, tasks, transfers, installed bundles and local state."""
