"""Child processes of the coordinator."""
