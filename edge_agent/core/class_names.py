"""Class names from the command line: separated by commas, or in a file with one on each line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .errors import UsageError, cause
from .storage import read_regular_text


def parse_class_names(classes: str) -> tuple[str, ...]:
    """Return the names that an option ``--classes`` gives, in their order.

    Args:
        classes: Names separated by commas; without a comma the path of a file with one name on each line.

    Raises:
        UsageError: The file cannot be read, a name occurs twice, or there is no name.
    """
    # 1. The names, one in each line or between two commas.
    lines = classes.split(",")
    if "," not in classes:
        try:
            lines = read_regular_text(Path(classes)).splitlines()
        except (OSError, ValueError) as error:  # also text that is no UTF-8, and a path that is none
            raise UsageError(
                f"--classes {classes}: {cause(error)}; give names separated by commas, or a file with one on each line"
            ) from error
    names = tuple(line.strip() for line in lines if line.strip())
    # 2. Answers are told apart by these names, so each of them is given once.
    if not names:
        raise UsageError(f"--classes {classes}: no names; give names separated by commas")
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise UsageError(f"--classes {classes}: given twice: {', '.join(repeated[:5])}; give each name once")
    return names
