"""Reproduction of published tables: a definition file for each, a simulation for each cell, and the difference.

Read in this order: `cells` (the definition file and the simulations that it asks for), `outcome` (their results beside
the published ones). The definitions themselves are in ``configs/reproduce``; no value of a paper is written here.
"""
