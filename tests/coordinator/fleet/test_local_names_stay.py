"""Names of a device's files, folders and classes never leave it with its errors (row 47 of the fault matrix)."""

from __future__ import annotations

import errno
import json
import logging
import pickle

import numpy as np
import pytest
from federation_duties import TASK
from federation_harness import Federation
from PIL import Image

from edge_agent.agent.health import problem_of
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core import errors
from edge_agent.core.config import DataConfig
from edge_agent.core.task import ImageInput, Task
from edge_agent.wire.messages import up

CANARY = "canary"
"""In the name of every file, folder and class of the devices; compared without regard to case."""


class CanaryError(Exception):
    """Of a data source that somebody has written for this device alone."""


def everything_that_left(fed, caplog):
    """What was published, what the coordinator has on disk, and what it has logged."""
    for topic, payload in fed.broker.captured:
        yield f"published on {topic}", payload
    for path in fed.config.state.rglob("*"):
        if path.is_file():
            yield str(path.relative_to(fed.config.state)), path.read_bytes()
    for record in caplog.records:
        if record.name.startswith("coordinator"):
            yield "log of the coordinator", record.getMessage().encode()
    yield "status", json.dumps(fed.coordinator.status()).encode()


def leaks(fed, caplog):
    fed.coordinator.catch_up()
    return [(where, data) for where, data in everything_that_left(fed, caplog) if CANARY.encode() in data.lower()]


PLACE = "data/CANARYFOLDER/CANARYCLASS/canaryfile.png"
ERRORS = [
    errors.DataError(f"images:{PLACE}: class 'CANARYCLASS' is not of the task"),
    errors.ConfigError(PLACE, ["data.source: canary"]),
    errors.UnknownName("head", "canary", ["lr"]),
    errors.WeightsError(f"{PLACE}: canary"),
    errors.UsageError("canary"),
    errors.MissingCapability(f"reading {PLACE} needs more"),
    errors.BundleDamaged(f"{PLACE}: class names CANARYCLASS"),
    errors.FingerprintMismatch(f"head of {PLACE}"),
    errors.TensorsError(f"{PLACE}: not tensors"),
    errors.TrainingFailed(f"{PLACE}: canary"),
    errors.StateError(f"{PLACE}: damaged"),
    CanaryError("canary"),
    KeyError("CANARYCLASS"),
    ValueError(f"cannot read {PLACE}"),
    RuntimeError("CANARYCLASS"),
    PermissionError(errno.EACCES, "Permission denied", PLACE),
    OSError(errno.ENOSPC, "No space left on device", PLACE),
    OSError(errno.EIO, "canary", PLACE),
    UnicodeDecodeError("utf-8", b"canary", 0, 1, "canary"),
]


@pytest.mark.parametrize(
    "error", ERRORS, ids=lambda error: f"{type(error).__name__}-{errno.errorcode.get(getattr(error, 'errno', 0), '')}"
)
@pytest.mark.parametrize("tier", ["train", "head"])
def test_row_47_errors_of_a_device_leave_without_its_names(tmp_path, caplog, error, tier):
    caplog.set_level(logging.DEBUG)
    with Federation(tmp_path, agents=("a0",), capture=True, round={"quorum": 0.5}) as fed:
        fed.add("a1", tier)

        def fails(*_):
            raise error

        for name in ("before", "check"):
            setattr(fed.tasks["a1"], name, fails)
        fed.request(rounds=1)
        fed.until(lambda: any(json.loads(p)["type"] == "fault" for t, p in fed.broker.captured if t.endswith("/up")))
        fed.settle()
        assert leaks(fed, caplog) == []
        (member,) = (one for one in fed.coordinator.status()["agents"] if one["id"] == "a1")
        assert member["fault"]["code"]
        assert member["fault"]["remedy"]
        fed.agents["a1"].write_status()
        whole = (fed.folder / "a1" / "status.json").read_text()
        assert CANARY in whole.lower() or isinstance(error, UnicodeDecodeError)


def test_row_47_real_data_of_undisclosed_classes_stay_unnamed(tmp_path, caplog):
    """The head tier looks at its folder of images as soon as it knows the task, and finds a class of its own."""
    caplog.set_level(logging.DEBUG)
    folder = tmp_path / "CANARYFOLDER"
    for label in ("circle", "CANARYCLASS"):
        (folder / label).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(np.full((8, 8), 40 * number, np.uint8)).save(folder / label / f"canary-{number}.png")
    task = Task(
        class_names=("circle", "square"),
        input=ImageInput(channels=1, height=8, width=8),
        encoder=TASK.encoder,
    )
    data = DataConfig(source=f"images:{folder}", strict=True)
    with Federation(
        tmp_path,
        agents=(),
        task=task,
        tasks=lambda config, tier: TaskRunner(config.model_copy(update={"data": data}), tier),
        cohort={"min_agents": 1},
        capture=True,
    ) as fed:
        fed.add("a0", "head")
        fed.wait(5.0)
        agent = fed.agents["a0"]
        assert "CANARYCLASS" in agent.condition.problem.message
        (member,) = fed.coordinator.status()["agents"]
        assert member["fault"]["code"] == "data"
        assert leaks(fed, caplog) == []


def test_message_that_says_so_reaches_the_coordinator_also_out_of_another_process():
    error = errors.TrainingFailed("loss became nan in epoch 2 of 5", is_public=True)
    told = problem_of("work", pickle.loads(pickle.dumps(error))).to_coordinator()
    assert (told.error, told.code, told.message) == ("TrainingFailed", "training", "loss became nan in epoch 2 of 5")


def test_class_of_somebody_else_goes_by_the_nearest_one_that_is_known():
    class PatientCanary(errors.DataError):
        pass

    assert problem_of("work", PatientCanary("x")).error == "DataError"
    assert problem_of("work", CanaryError("x")).error == "Exception"


def test_codes_are_codes():
    codes = {problem_of("work", error).code for error in ERRORS}
    assert {"data", "config", "bundle-damaged", "training", "state", "disk", "internal"} <= codes
    assert all(up.Fault(error="X", code=code, message="x").code == code for code in codes)
