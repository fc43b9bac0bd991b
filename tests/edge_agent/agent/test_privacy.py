"""What a policy makes of counts and reports; numbers by hand."""

from __future__ import annotations

import pytest

from edge_agent.agent.privacy import public_report, sample_count
from edge_agent.config import PrivacyConfig
from edge_agent.wire.messages import Report


@pytest.mark.parametrize(
    "exact, rounded",
    # 2^(k + 1/2) is between 5 and 6 (5.66), 11 and 12 (11.3), 90 and 91 (90.5).
    [(0, 0), (1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (11, 8), (12, 16), (90, 64), (91, 128), (1000, 1024)],
)
def test_rounded_count_is_the_power_of_two_nearest_by_ratio(exact, rounded):
    assert sample_count(PrivacyConfig(samples="rounded"), exact) == rounded
    assert sample_count(PrivacyConfig(), exact) == exact


REPORT = Report(
    run="run-1", samples=90, support=6, one_class=True, acc_local=0.5, acc_global=0.6, acc_personal=0.7,
    local_model="lr", better_alone=True, metrics={"loss": 1.0, "seconds": 2.0},
)  # fmt: skip


def test_report_leaves_as_it_is_by_default():
    assert public_report(PrivacyConfig(), REPORT) == REPORT


def test_report_without_metrics_says_nothing_of_the_data_but_rounded_counts():
    report = public_report(PrivacyConfig(metrics=(), samples="rounded"), REPORT)
    assert report == Report(run="run-1", samples=64, support=8)


def test_report_keeps_the_scores_that_patterns_name():
    report = public_report(PrivacyConfig(metrics=("acc.p*", "seconds")), REPORT)
    assert (report.acc_personal, report.acc_global, report.acc_local) == (0.7, None, None)
    assert report.metrics == {"seconds": 2.0}
    assert not report.better_alone
