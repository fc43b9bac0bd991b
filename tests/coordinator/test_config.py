from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from coordinator.config import CohortConfig, CoordinatorConfig, RoundConfig
from edge_agent.core.config import load, parse
from edge_agent.core.errors import ConfigError

MINIMAL = {"task": {"class_names": ["cat", "dog"]}}
CONFIGS = Path(__file__).parents[2] / "configs"


def written(tmp_path, text):
    path = tmp_path / "coordinator.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_task_is_all_that_has_to_be_said():
    config = parse(CoordinatorConfig, MINIMAL, where="test")
    assert config.broker is None
    assert (config.embedded.bind, config.embedded.port) == ("127.0.0.1", 1883)
    assert (config.round.quorum, config.round.deadline_s, config.round.grace_s, config.round.lease_s) == (
        0.8,
        600,
        10,
        45,
    )
    assert (config.run.method, config.run.rounds, config.cohort.fraction) == ("fedavg", 10, 1.0)


def test_a_bound_on_updates_is_switched_off_by_the_word_none(tmp_path):
    path = written(tmp_path, '[task]\nclass_names = ["cat"]\n[aggregation]\nmax_share = "none"\n')
    settings = load(CoordinatorConfig, path).aggregation
    assert settings.max_share is None
    assert settings.repeat_share == 2
    path = written(tmp_path, '[task]\nclass_names = ["cat"]\n[aggregation]\nmax_share = "never"\n')
    with pytest.raises(ConfigError, match=r"aggregation\.max_share"):
        load(CoordinatorConfig, path)


def test_relative_paths_count_from_the_file(tmp_path):
    path = written(
        tmp_path,
        'state = "kept"\n[embedded]\npassword_file = "users"\n[task]\nclass_names = ["cat"]\n',
    )
    config = load(CoordinatorConfig, path)
    assert config.state == tmp_path / "kept"
    assert config.embedded.password_file == tmp_path / "users"


def test_a_broker_that_is_there_and_one_to_start_exclude_each_other(tmp_path):
    text = '[broker]\nurl = "mqtt://broker.example"\n[task]\nclass_names = ["cat"]\n'
    assert load(CoordinatorConfig, written(tmp_path, text)).broker is not None
    with pytest.raises(ConfigError, match="exclude each other"):
        load(CoordinatorConfig, written(tmp_path, text + "[embedded]\nport = 1884\n"))


def test_all_mistakes_are_listed_at_once_with_the_nearest_key(tmp_path):
    text = '[task]\nclass_names = ["cat"]\n[round]\nquorm = 0.5\ndeadline_s = -1\n[run]\nrounds = 0\n'
    with pytest.raises(ConfigError) as caught:
        load(CoordinatorConfig, written(tmp_path, text))
    assert len(caught.value.mistakes) == 3
    report = str(caught.value)
    assert "round.quorm: unknown key; did you mean 'quorum'?" in report
    assert "round.deadline_s = -1" in report
    assert "run.rounds = 0" in report


def test_cohort_bounds_must_be_in_order():
    with pytest.raises(ConfigError, match="max_agents = 2 is below min_agents = 5"):
        parse(CohortConfig, {"min_agents": 5, "max_agents": 2}, where="test")


@pytest.mark.parametrize("quorum", [0, -0.1, 1.01, float("nan"), "most"])
def test_impossible_quorum_is_refused(quorum):
    with pytest.raises(ConfigError, match="quorum"):
        parse(RoundConfig, {"quorum": quorum}, where="test")


def models_in(model, seen):
    seen.add(model)
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel) and part not in seen:
                models_in(part, seen)
    return {found for found in seen if found.__module__ == "coordinator.config"}


def test_every_field_is_described():
    models = models_in(CoordinatorConfig, set())
    assert len(models) == 17
    for model in models:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_every_number_has_a_bound():
    for model in models_in(CoordinatorConfig, set()):
        for name, field in model.model_fields.items():
            parts = {field.annotation, *getattr(field.annotation, "__args__", ())}
            if parts & {int, float}:
                assert len(field.metadata) >= 2, f"{model.__name__}.{name} has no bound on one side"


def test_example_file_is_valid_and_says_the_defaults():
    """What configs/coordinator.toml shows as default is the default, so that its comments can be believed."""
    config = load(CoordinatorConfig, CONFIGS / "coordinator.toml")
    default = parse(CoordinatorConfig, {"task": config.task.model_dump()}, where="defaults", base=CONFIGS)
    for name in ("embedded", "run", "cohort", "round", "export", "evaluate_every", "federation"):
        shown = getattr(config, name)
        meant = getattr(default, name)
        assert shown == meant, name
