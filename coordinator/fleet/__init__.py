"""Agents as the coordinator sees them: who is there, what they send, what is sent to them, and what is rejected."""
