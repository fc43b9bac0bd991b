"""Defaults of ours beside the published values, which one definition holds."""

from __future__ import annotations

import pytest

from edge_agent import methods
from edge_agent.core.errors import ConfigError

PUBLISHED = {
    "afl": {"ridge": 0.0, "intercept": False, "scale": 1.0, "min_class_count": 1},
    "fedcof": {"scale": 1.0, "min_class_count": 1},
    "dualfed": {"contrastive_weight": 40.0, "batch_size": 256, "refresh_stats": False},
    "fedpick": {"batch_size": 32, "refresh_stats": False},
    "fedrir": {
        "lr": 5e-4,
        "batch_size": 100,
        "specific_dim": 512,
        "id_mode": "official",
        "id_weight": 1.0,
        "refresh_stats": False,
    },
}
"""AFL and FedCOF: plain sums and means of all samples.

DualFed: Sec. 5.3 and the official script for PACS. FedPick: FedBN's code, as its own is lost.

FedRIR: Sec. 4.2, Eq. 10 and the authors' code."""


@pytest.mark.parametrize("name", methods.names())
def test_published_values_are_what_papers_and_their_code_say(name):
    assert methods.paper_values(methods.get(name).Params) == PUBLISHED.get(name, {})
    made = methods.create(name, paper=True).params
    assert all(getattr(made, field) == value for field, value in PUBLISHED.get(name, {}).items())


@pytest.mark.parametrize("name", methods.names())
def test_a_default_of_ours_says_so_and_the_other_fields_do_not_differ(name):
    fields = methods.get(name).Params.model_fields
    ours, paper = (methods.create(name, paper=flag).params.model_dump() for flag in (False, True))
    differing = {field for field in fields if ours[field] != paper[field]}
    assert differing == set(methods.paper_values(methods.get(name).Params))
    assert all("ours" in (fields[field].description or "") for field in differing)


def test_what_is_given_wins_over_both():
    assert methods.create("dualfed", {"contrastive_weight": 3.0}, paper=True).params.contrastive_weight == 3.0
    with pytest.raises(ConfigError, match="lambda_weight: unknown key"):
        methods.create("dualfed", {"lambda_weight": 3.0}, paper=True)
