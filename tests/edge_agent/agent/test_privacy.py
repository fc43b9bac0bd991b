"""What a policy makes of counts and reports; numbers by hand."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from edge_agent.core.config import PrivacyConfig
from edge_agent.core.errors import PrivacyRefused
from edge_agent.privacy.policy import check_job, public_report, sample_count
from edge_agent.wire.messages.down import Job
from edge_agent.wire.messages.fields import BlobRef
from edge_agent.wire.messages.up import Report


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


JOB = Job(run="run-1", round=1, rounds=2, seed=0, method="fedavg", blobs=(), deadline_s=9,
          task=BlobRef(digest="0" * 64, size_bytes=1, chunk_bytes=64))  # fmt: skip


@pytest.mark.parametrize("purpose, session", [
    ("contribute", ""), ("batch_norm_stats", ""), ("activation_ranges", ""),
    ("batch_norm_stats", "1" * 32), ("activation_ranges", "1" * 32),
])  # fmt: skip
def test_device_that_insists_on_a_secure_sum_refuses_what_no_mask_is_put_on_whatever_session_it_names(purpose, session):
    with pytest.raises(PrivacyRefused, match="'required', and the coordinator would see the single update"):
        check_job(
            PrivacyConfig(secure_sum="required"), JOB.model_copy(update={"purpose": purpose, "session": session}), None
        )


@pytest.mark.parametrize("purpose, session", [
    ("train", "1" * 32), ("contribute", "1" * 32), ("secure_keys", "1" * 32), ("secure_shares", "1" * 32),
    ("secure_unmask", "1" * 32), ("personalize", ""),
])  # fmt: skip
def test_device_that_insists_on_a_secure_sum_takes_part_in_one_and_personalizes(purpose, session):
    policy = PrivacyConfig(secure_sum="required")
    check_job(policy, Job(**{**JOB.model_dump(by_alias=True), "purpose": purpose, "session": session}), None)


@pytest.mark.parametrize("purpose, session", [
    ("batch_norm_stats", "1" * 32), ("activation_ranges", "1" * 32), ("personalize", "1" * 32),
    ("secure_keys", ""), ("secure_shares", ""), ("secure_unmask", ""),
])  # fmt: skip
def test_job_with_a_session_where_no_secure_sum_is_or_without_one_where_it_is_is_no_message(purpose, session):
    with pytest.raises(ValidationError, match="session"):
        Job(**{**JOB.model_dump(by_alias=True), "purpose": purpose, "session": session})
