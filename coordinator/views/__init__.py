"""Views of the journal: what follows from its entries, for those who decide and for those who show.

Here live folds: classes with ``add(entry)`` that take entries in order and say where something stands. A fold decides
nothing and writes nothing, so that a restart, a second process or a test that feeds it the same entries arrives at the
same result. Files beside the journal, messages and settings have no place here.

Read in this order: `runs` (where a run stands, round by round), `releases` (which bundle each device is to run),
`traffic` (bytes of each agent), `spans` (a run as a trace).
"""
