"""Readers of public data sets, one file each; the file name is the kind of the source.

A reader only says where files, labels and official splits are, and never downloads anything; what all sources do
(options, limits, preprocessing) is in `edge_agent.data`. Read `_layouts` (image sets of several domains) first: most
readers here are a few lines on it.
"""
