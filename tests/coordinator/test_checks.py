"""What ``serve`` and ``run`` refuse before they begin: every mistake at once, with the nearest name."""

from __future__ import annotations

import pytest

from coordinator.config import CoordinatorConfig
from coordinator.service.preflight import check_defaults, checked_method
from edge_agent.core.errors import ConfigError, UnknownName, UsageError


def config(*, encoder="linear", encoder_params=None, **sections):
    task = {
        "class_names": ["up", "down"],
        "encoder": encoder,
        "encoder_params": {"feature_dim": 4} if encoder_params is None else encoder_params,
        "input": {"kind": "image", "channels": 1, "height": 4, "width": 4},
    }
    return CoordinatorConfig.model_validate({"task": task, **sections})


def test_a_sound_configuration_is_taken():
    check_defaults(config(run={"method": "fedavg", "params": {"lr": 0.1}}), None)


def test_an_unknown_method_is_told_with_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'fedavg'"):
        check_defaults(config(run={"method": "fedavgg"}), None)


def test_wrong_parameters_of_the_method_are_listed(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_defaults(config(run={"method": "fedavg", "params": {"lr": -1, "local_epoch": 2}}), tmp_path)
    assert len(caught.value.mistakes) == 2
    assert "did you mean 'local_epochs'" in str(caught.value)


def test_mistakes_of_method_encoder_and_data_are_told_at_once(tmp_path):
    wrong = config(encoder="linaer", run={"method": "fedavgg"}, export={"calibration": "imags:x"})
    with pytest.raises(ConfigError) as caught:
        check_defaults(wrong, tmp_path / "c.toml")
    said = str(caught.value)
    assert all(f"did you mean '{name}'" in said for name in ("fedavg", "linear", "images"))
    assert (caught.value.where, len(caught.value.mistakes)) == (str(tmp_path / "c.toml"), 3)


@pytest.mark.parametrize(
    "params, hint", [({"feature_dims": 4}, "did you mean 'feature_dim'"), ({"feature_dim": 0}, "feature_dim = 0")]
)
def test_wrong_parameters_of_the_encoder_are_told(params, hint):
    with pytest.raises(ConfigError, match=hint):
        checked_method(config(encoder_params=params), "fedavg", {})


def test_a_run_that_may_end_early_is_refused_where_the_last_round_matters():
    early = config(encoder_params={"feature_dim": 8}, export={"every": 2, "patience": 3, "release": "each_run"})
    with pytest.raises(UsageError, match=r"export\.patience = 3 may end a run of method 'spherefed'"):
        checked_method(early, "spherefed", {})
    checked_method(early, "spherefed", {"calibrate": False})
    checked_method(early, "fedavg", {})


def test_data_for_calibration_that_are_not_there_are_told(tmp_path):
    with pytest.raises(UsageError, match="gone"):
        checked_method(config(export={"calibration": f"images:{tmp_path / 'gone'}"}), "fedavg", {})


def test_a_task_that_the_method_cannot_do_is_told():
    task = config(encoder="fedrir_cnn", encoder_params={}).task
    odd = task.model_copy(update={"input": task.input.model_copy(update={"height": 30, "width": 28})})
    wrong = config().model_copy(update={"task": odd})
    with pytest.raises(ConfigError, match="height is 30") as caught:
        checked_method(wrong, "fedrir", {})
    assert len(caught.value.mistakes) == 1
    checked_method(wrong, "fedrir", {"without_mcsl": True})
