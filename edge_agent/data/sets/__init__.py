"""Readers of public data sets, one file each; the file name is the kind of the source."""
