"""Comparisons of methods: the same number of trials for each on validation samples, then paired seeds on the best.

Read in this order: `records` (what a comparison has found so far, as its file keeps it), `row_statistics` (what its
runs say: means, paired differences, hurt clients), `tables` (one model of a table, in five forms), `outputs` (all files
that people read, made of the records alone).
"""
