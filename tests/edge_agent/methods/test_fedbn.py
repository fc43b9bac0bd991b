from __future__ import annotations

import numpy as np
import torch

from edge_agent import methods
from edge_agent.core.task import ImageInput, Task
from edge_agent.methods.values import Update
from edge_agent.wire.tensors import encode


def test_batch_norm_of_a_resnet_is_known_by_type_also_where_its_name_says_nothing():
    task = Task(input=ImageInput(channels=3, height=32, width=32), class_names=("a", "b"), encoder="resnet18")
    method = methods.create("fedbn")
    model = method.build(task)
    shared = method.shared_names(model)
    assert "encoder.layer2.0.downsample.0.weight" in shared
    assert not [name for name in shared if ".bn" in name or ".downsample.1." in name]
    # 20 convolutions, weight and bias of the head; 20 batch norm layers stay.
    assert len(shared) == 22
    assert sum(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()) == 20


def test_the_mean_is_uniform():
    # 1 of one sample and 5 of three: 3, where the mean by samples would be 4.
    updates = [Update("a", 1.0, {"w": np.float32([1.0])}), Update("b", 3.0, {"w": np.float32([5.0])})]
    assert methods.create("fedbn").aggregate({}, updates)["w"] == 3.0


def test_batch_norm_is_everybodys_own_and_the_rest_is_common(federation):
    fed = federation("fedbn").run()
    for name in fed.clients:
        fed.download(name)
    models = [client.model.state_dict() for client in fed.clients.values()]
    for name in models[0]:
        alike = all(torch.equal(model[name], models[0][name]) for model in models[1:])
        is_norm = name.startswith("encoder.layers.1.") and not name.endswith("num_batches_tracked")
        assert alike == (name in fed.shared) or not is_norm, name
    assert not [name for name in fed.shared if ".layers.1." in name]


def test_without_batch_norm_and_with_equal_clients_it_is_fedavg(tiny):
    labels = {"a": [0, 1, 2, 1], "b": [2, 2, 1, 0]}
    one, other = (tiny(name, labels).run() for name in ("fedbn", "fedavg"))
    assert encode(one.state) == encode(other.state)
