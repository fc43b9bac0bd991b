"""Views of the journal: what follows from its entries, for those who decide and for those who show.

Here live folds: classes with ``add(entry)`` that take entries in order and say where something stands. A fold decides
nothing and writes nothing, so that a restart, a second process or a test that feeds it the same entries arrives at the
same result. Files beside the journal, messages and settings have no place here.

Read in this order: `follower` (how the folds of a process are fed), `runs` (where a run stands, round by round) and
`run_list` (all of them in short), `releases` (which bundle each device is to run), `fleet` (what agents have
reported), `traffic` (bytes of each agent), `history` (what one agent did before), `timeline` (a run as events for
people), `counts` (what monitoring counts), `spans` (a run as a trace).
"""
