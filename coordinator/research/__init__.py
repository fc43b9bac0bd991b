"""Commands for researchers: analysis of finished runs, reproduction of published tables, and measurements of a machine.

Each folder stands for itself: `analyze`, `reproduce` and `bench`. Only the commands with these names import this room;
a coordinator that serves devices never does.
"""
