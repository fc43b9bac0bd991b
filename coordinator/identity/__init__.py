"""Secrets of a federation, below ``identity`` in the state folder."""
