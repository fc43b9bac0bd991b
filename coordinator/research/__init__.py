"""The commands of researchers: analyses of finished runs, reproductions, comparisons of methods, and measurements.

What lives here: ``analyze`` (measures of features and models), ``reproduce`` (cells of a paper's table), ``compare``
(methods tuned alike, with paired seeds) and ``bench`` (measurements of a machine). The extra ``research`` installs
what they need. What may not: anything that a coordinator, a simulation or a device runs. Only the modules of the
commands import this room, once one of them is requested.

Begin with ``analyze/__init__``, which has the keys of its result; then ``footing`` (what a row of a comparison rests
on), ``reproduce/cells``, ``compare/records`` and ``bench/measuring``.
"""
