"""Reproduction of published tables: a definition file for each, a simulation for each cell, and the difference."""
