"""``domainnet:DIR?domain=sketch&classes=fedbn``: DomainNet, 586,575 pictures of 345 things in six styles.

DIR holds ``clipart/aircraft_carrier/*.jpg``, ``infograph``, ``painting``, ``quickdraw``, ``real`` and ``sketch``, and
the official lists ``clipart_train.txt``, ``clipart_test.txt`` and so on (also in ``splits/`` or ``txt/``). Options:
``domain`` (default: all six), ``classes``, ``split=train|test|all`` (default: train), ``n``, ``seed``, ``test_share``
(a split by chance, which needs no lists).

``classes=10`` takes the ten classes with most pictures in all domains that are there; ``classes=bird,zebra`` those;
``classes=fedbn`` the ten that the code of FedBN names, with which most federated papers work.
Source: Peng et al., "Moment Matching for Multi-Source Domain Adaptation", ICCV 2019. The page claims fair use, for
non-commercial research and education only.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from ...core.errors import ConfigError, UnknownName
from ..base import DataSource, Raw
from ._layouts import DomainOptions, Facts, Origin, Split, find
from ._layouts import read as read_layout

FACTS = Facts(
    Origin(
        "domainnet",
        "DomainNet",
        "folders clipart, infograph, painting, quickdraw, real and sketch, each with one for each class, and the lists "
        "<domain>_train.txt and <domain>_test.txt",
        "https://ai.bu.edu/M3SDA/ (the cleaned version)",
        "non-commercial research and education only",
    ),
    domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    num_classes=None,
    side=256,
    inside=("DomainNet", "domainnet"),
    lists={"train": "{domain}_train.txt", "test": "{domain}_test.txt"},
    lists_inside=("splits", "txt"),
)

FEDBN_CLASSES = (
    *("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra"),
)


class DomainNetOptions(DomainOptions):
    """The options of DomainNet: which pictures to take."""

    split: Split = "train"
    classes: str | None = Field(
        None, min_length=1, description="a number: so many of the most frequent; names; or fedbn; default: all"
    )


def read(where: str, options: DomainNetOptions) -> Raw:
    """Return the pictures of the chosen domains and classes, decoded on access."""
    layout = find(FACTS, where, options.domain)
    if options.classes is None:
        return read_layout(layout, options)
    if options.classes.isdigit():
        # Counted over every domain that is there, so that all who hold one of them agree; ties go by name.
        number = int(options.classes)
        counts = layout.counts()
        if not 0 < number <= len(counts):
            raise ConfigError("data source domainnet", [f"classes={number}: expected 1..{len(counts)}"])
        names = sorted(counts, key=lambda name: (-counts[name], name))[:number]
    else:
        names = [name.strip() for name in options.classes.split(",") if name.strip()]
        if names == ["fedbn"]:
            names = list(FEDBN_CLASSES)
        class_names = layout.class_names()
        for name in names:
            if name not in class_names:
                raise UnknownName("class of DomainNet", name, class_names)
    return read_layout(replace(layout, classes=tuple(sorted(set(names)))), options)


SOURCE = DataSource(DomainNetOptions, read, needs_path=True, inspect=read, domains=FACTS.parts)
