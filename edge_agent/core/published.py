"""The published values of a method's parameters: where each is said, and for which data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import UnknownName, UsageError

Source = Literal["paper", "authors' code", "others' code", "recalled", "not published"]
"""Who says a value.

paper: its text, tables or formulas. authors' code: only that. others' code: that of another paper for the same data, or
of a library of methods. recalled: known, and not read again. not published: nobody says it.
"""

SOURCES: tuple[Source, ...] = get_args(Source)


DATA_SETS = ("cifar-10", "digits5", "domainnet", "fashion-mnist", "mnist", "officecaltech", "officehome", "pacs")
"""The data sets for which methods that ship have values of their own; a method of others may have more."""


@dataclass(frozen=True)
class Published:
    """One published value of a parameter.

    Attributes:
        value: The value; None where the source says that there is one and not which.
        source: Who says it.
        location: Where it is said, such as a section or a script.
        data: The data set that it is for, in small letters; empty: it is said for all.
    """

    value: Any
    source: Source
    location: str = ""
    data: str = ""


def published_of(params: type) -> dict[str, tuple[Published, ...]]:
    """Return field -> its published values, as the class of parameters and those that it derives from state them."""
    stated: dict[str, tuple[Published, ...]] = {}
    for base in reversed(params.__mro__):
        stated |= vars(base).get("published", {})
    return stated


def data_sets_of(params: type) -> tuple[str, ...]:
    """Return the data sets for which a method has published values of its own, by name."""
    stated = published_of(params).values()
    return tuple(sorted({each.data for values in stated for each in values if each.data and each.value is not None}))


def values_for(params: type, data: str, method: str) -> Mapping[str, Any]:
    """Return field -> the value that is published for one data set alone; empty where all values hold for any.

    Args:
        params: The method's class of parameters.
        data: The data set; capital letters do not matter.
        method: The method's name, for the message.

    Raises:
        UnknownName: No method has values for such a data set; the nearest one is suggested.
        UsageError: The method has values for other data sets, and none for this one.
    """
    sets = data_sets_of(params)
    wanted = data.lower()
    if wanted not in {*DATA_SETS, *sets}:
        raise UnknownName("data set of published values", data, {*DATA_SETS, *sets})
    if sets and wanted not in sets:
        raise UsageError(
            f"{method} has published values for {' and '.join(sets)} that differ, and none for '{data}'; take paper "
            f"alone in place of paper_for, and set those that 'headwater methods {method}' shows yourself"
        )
    values: dict[str, Any] = {}
    for name, stated in published_of(params).items():
        for each in stated:
            if each.data == wanted and each.value is not None:
                values[name] = each.value
    return values


def published_in(params: type, given: Mapping[str, Any], data: str | None) -> dict[str, Published]:
    """Return field -> the published value that a run has, of the fields whose value in the run is one.

    Args:
        params: The method's class of parameters.
        given: The parameters of the run.
        data: The data set whose values the run asked for, which come first; None: it asked for none.
    """
    wanted = (data or "").lower()
    result: dict[str, Published] = {}
    for name, stated in published_of(params).items():
        same = [each for each in stated if each.value is not None and each.value == given.get(name)]
        # A value that two data sets share is that of the one that was asked for.
        same.sort(key=lambda each: each.data != wanted)
        if same:
            result[name] = same[0]
    return result
