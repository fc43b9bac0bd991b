"""``officecaltech:DIR?domain=webcam``: Office-Caltech-10, 2,533 pictures of ten office things from four sources.

DIR holds ``amazon/back_pack/*.jpg``, ``caltech``, ``dslr`` and ``webcam``. Options: ``domain`` (default: all four),
``split=train|test|all`` (default: all), ``n``, ``seed``, ``test_share``. There is no official split: ``train`` and
``test`` are by chance, a fifth of each class for testing unless ``test_share`` is given; the same ``seed`` gives
the same split. (FedBN's split is kept in pickles, which are not read here.)
Source: Gong et al., "Geodesic Flow Kernel for Unsupervised Domain Adaptation", CVPR 2012. No licence is stated.
"""

from __future__ import annotations

from ._layouts import ByChance, Facts, Origin

FACTS = Facts(
    Origin(
        "officecaltech",
        "Office-Caltech-10",
        "folders amazon, caltech, dslr and webcam, each with one for each of ten classes",
        "https://github.com/med-air/FedBN (office_caltech_10.zip)",
        "none stated; for research",
    ),
    domains=("amazon", "caltech", "dslr", "webcam"),
    num_classes=10,
    side=256,
    inside=("office_caltech_10", "OfficeCaltech10", "office_caltech_10_dataset/office_caltech_10"),
)

SOURCE = FACTS.source(ByChance)
