"""A whole federation on one machine: the coordinator's own round loop, its journal, and clients that an engine serves.

`plan` has the settings, `prepared` the data and models made from them, `run` the simulation itself. Nothing is imported
here: the settings are needed where torch is not.
"""
