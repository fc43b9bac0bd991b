from __future__ import annotations

import pytest
from pydantic import ValidationError

from edge_agent.core.task import ImageInput, Task, WindowInput

TASK = Task(
    input=ImageInput(channels=1, height=28, width=28, mean=(0.1307,), std=(0.3081,)),
    class_names=("zero", "größe"),
    encoder="small_cnn",
    encoder_params={"b": 2, "a": [1, None]},
)


def test_a_task_knows_its_shapes_and_classes():
    assert (TASK.num_classes, TASK.input_shape) == (2, (1, 28, 28))
    assert Task(input=WindowInput(channels=6, length=128), class_names=("a",)).input_shape == (6, 128)
    assert Task(class_names=("a",)).input == ImageInput()


def test_a_task_makes_the_round_trip_through_json():
    assert Task.model_validate_json(TASK.model_dump_json()) == TASK


@pytest.mark.parametrize(
    "kind, fields",
    [
        (ImageInput, {"channels": 2}),
        (ImageInput, {"height": 3}),
        (ImageInput, {"width": 2049}),
        (ImageInput, {"resize": "nearest"}),
        (ImageInput, {"mean": (0.1, 0.2)}),
        (ImageInput, {"std": (1.0, 1.0)}),
        (ImageInput, {"mean": ()}),
        (ImageInput, {"std": ()}),
        (ImageInput, {"std": (0.0,)}),
        (ImageInput, {"std": (0.5, 0.5, -0.5)}),
        (ImageInput, {"std": (float("nan"),)}),
        (ImageInput, {"mean": (float("inf"),)}),
        (WindowInput, {"channels": 0}),
        (WindowInput, {"length": 3}),
        (WindowInput, {"stride": 0}),
        (WindowInput, {"channels": 3, "mean": (0.0, 0.0)}),
        (WindowInput, {"std": (0.0,)}),
        (Task, {"class_names": ()}),
        (Task, {"class_names": ("a",), "encodr": "x"}),
    ],
)
def test_what_could_not_be_computed_with_is_refused(kind, fields):
    with pytest.raises(ValidationError):
        kind(**fields)


@pytest.mark.parametrize("values", [(0.5,), (0.4, 0.5, 0.6)])
def test_one_value_stands_for_all_channels_or_each_has_its_own(values):
    assert ImageInput(mean=values, std=values).mean == values
