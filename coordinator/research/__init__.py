"""The commands of researchers: analyses of finished runs, reproductions of published tables, and measurements.

Lives here: `analyze` (measures of features and models), `reproduce` (cells of a paper's table) and `bench` (yardsticks
of a machine). The extra ``research`` brings what they need. Does not live here: anything that a coordinator, a
simulation or a device runs. Only the modules of the three commands import this room, once one of them is requested.

To read: ``analyze/__init__`` with the keys of its result, then ``reproduce/cells`` and ``bench/measuring``.
"""
