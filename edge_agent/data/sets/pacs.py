"""``pacs:DIR?domain=sketch&split=train``: PACS, 9,991 pictures of seven things as photos, art, cartoons and sketches.

DIR holds ``kfold/art_painting/dog/*.jpg`` and so on, or is that folder, and the official lists
``art_painting_train_kfold.txt`` and ``art_painting_crossval_kfold.txt`` beside them. Options: ``domain`` (some of
art_painting, cartoon, photo, sketch; default: all), ``split=train|test|all`` (default: train), ``n``, ``seed``,
``test_share`` (a split by chance, which needs no lists).

``split=test`` is the official ``crossval`` list, a tenth of a domain. The official ``test`` lists hold whole domains,
training images included, for testing on a domain without training clients: ``split=all`` gives those.
Source: Li, Yang, Song, Hospedales, "Deeper, Broader and Artier Domain Generalization", ICCV 2017. No licence is stated.
"""

from __future__ import annotations

from ._layouts import DomainOptions, Facts, Origin, Split

FACTS = Facts(
    Origin(
        "pacs",
        "PACS",
        "folders art_painting, cartoon, photo and sketch (in kfold/), each with one for each of seven classes, and the "
        "lists <domain>_train_kfold.txt and <domain>_crossval_kfold.txt",
        "https://dali-dl.github.io/project_iccv2017.html",
        "none stated; for research",
    ),
    domains=("art_painting", "cartoon", "photo", "sketch"),
    num_classes=7,
    side=227,
    inside=("kfold", "images", "images/kfold", "PACS", "PACS/kfold", "pacs_data"),
    lists={"train": "{domain}_train_kfold.txt", "test": "{domain}_crossval_kfold.txt"},
    lists_inside=("pacs_label", "splits"),
    # Published results on PACS exclude this image: the archive's copy cannot be decoded.
    damaged=frozenset({"sketch/dog/n02103406_4068-1.png"}),
)


class PacsOptions(DomainOptions):
    """The options of PACS: which pictures to take."""

    split: Split = "train"


SOURCE = FACTS.source(PacsOptions)
