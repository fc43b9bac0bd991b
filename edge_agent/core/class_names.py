"""Class names from the command line: with commas between them, or a file with one a line."""

from __future__ import annotations

from pathlib import Path

from .errors import UsageError, cause
from .storage import read_regular_text


def parse_class_names(classes: str) -> tuple[str, ...]:
    """Return the names that an option ``--classes`` gives, in their order.

    Args:
        classes: Names with commas between them; without a comma the path of a file that has one a line.

    Raises:
        UsageError: The file cannot be read, a name occurs twice, or there is none.
    """
    lines = classes.split(",")
    if "," not in classes:
        try:
            lines = read_regular_text(Path(classes)).splitlines()
        except (OSError, ValueError) as error:  # also text that is no UTF-8, and a path that is none
            raise UsageError(
                f"--classes {classes}: {cause(error)}; give names with commas between them, or a file with one a line"
            ) from error
    names = tuple(line.strip() for line in lines if line.strip())
    if not names:
        raise UsageError(f"--classes {classes}: no names; give names with commas between them")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"--classes {classes}: twice: {', '.join(twice[:5])}; give each name once")
    return names
