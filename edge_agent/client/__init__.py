"""A client's part of a run: training session of one client, and of many clients at once."""
