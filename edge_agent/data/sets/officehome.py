"""``officehome:DIR?domain=Art``: Office-Home, 15,588 pictures of 65 everyday things from four kinds of places.

DIR holds ``Art/Alarm_Clock/*.jpg``, ``Clipart``, ``Product`` and ``Real World``, or the official archive's folder with
them. Options: ``domain`` (default: all four), ``split=train|test|all`` (default: all), ``n``, ``seed``, ``test_share``.
There is no official split: ``train`` and ``test`` are by chance, a fifth of each class for testing unless
``test_share`` is given; the same ``seed`` gives the same split.
Source: Venkateswara et al., "Deep Hashing Network for Unsupervised Domain Adaptation", CVPR 2017. The page allows
non-commercial research and education only.
"""

from __future__ import annotations

from ._layouts import ByChance, Facts, Origin

FACTS = Facts(
    Origin(
        "officehome",
        "Office-Home",
        "folders Art, Clipart, Product and 'Real World', each with one for each of 65 classes",
        "https://www.hemanthdv.org/officeHomeDataset.html",
        "non-commercial research and education only",
    ),
    domains=("Art", "Clipart", "Product", "Real World"),
    num_classes=65,
    side=224,
    inside=("OfficeHomeDataset_10072016", "OfficeHome", "office_home"),
)

SOURCE = FACTS.source(ByChance)
