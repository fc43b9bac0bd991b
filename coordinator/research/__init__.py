"""The commands of researchers: analyses of finished runs, reproductions of published tables, and measurements.

What lives here: ``analyze`` (measures of features and models), ``reproduce`` (cells of a paper's table) and ``bench``
(measurements of a machine). The extra ``research`` installs what they need. What may not: anything that a coordinator,
a simulation or a device runs. Only the modules of the three commands import this room, once one of them is requested.

Begin with ``analyze/__init__``, which has the keys of its result; then ``footing`` (what a row of a comparison rests
on), ``reproduce/cells`` and ``bench/measuring``.
"""
