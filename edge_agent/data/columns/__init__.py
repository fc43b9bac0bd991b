"""Columns of Arrow tables as inputs and labels: what the sources ``arrow`` and ``parquet`` share. No data source.

A table has a row for each sample. A column of inputs holds encoded images (bytes, or Hugging Face's struct of bytes and
path), paths of images, or numbers in lists, nested or of a fixed size. A column of labels holds integers or text. Cells
are read one by one when they are asked for, so that a table need not fit into memory. Nothing in a table is executed.

pyarrow comes with the extra ``tables`` and is imported by `import_pyarrow` alone, once a table is read.

Read in this order: `table` (the options, and what each form of file has to offer), `source` (from a table to samples),
`choice` (which columns), `kinds` (what their types say), `labels` (columns of one value for each sample), `cells` (the
inputs), `files` (several files of one set).
"""

from .choice import INPUT_KEYS, LABEL_KEYS
from .files import choose_splits, mistakes_in_types, parts_among
from .kinds import without_extension
from .source import table_source
from .table import ColumnOptions, import_pyarrow

__all__ = [
    "INPUT_KEYS",
    "LABEL_KEYS",
    "ColumnOptions",
    "choose_splits",
    "import_pyarrow",
    "mistakes_in_types",
    "parts_among",
    "table_source",
    "without_extension",
]
