"""Comparisons of methods: the same number of trials for each on validation samples, then paired seeds on the best.

Read in this order: `records` (what a comparison has found so far, as its file keeps it).
"""
