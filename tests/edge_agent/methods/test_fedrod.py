from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_agent.wire.tensors import encode

SKEWED = {"a": [0, 0, 0, 0, 1], "b": [1, 2, 2, 2]}


def test_the_personal_branch_sends_no_gradient_to_what_is_shared(tiny):
    fed = tiny("fedrod", SKEWED)
    client = fed.clients["a"]
    model = client.model
    fed.method.loss(client, {})(client.train_inputs, client.train_labels).backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    # The same by hand: classes of the client, 4 and 1 times, the third never.
    model.zero_grad()
    generic = model.head(model.features(client.train_inputs))
    balanced = generic + torch.tensor([4.0, 1.0, 0.0]).log()
    F.cross_entropy(balanced, client.train_labels).backward()
    for name, weight in model.named_parameters():
        if not name.startswith("personal_head"):
            torch.testing.assert_close(found[name], weight.grad, msg=name)
    assert model.personal_head.weight.grad is None
    features = model.features(client.train_inputs).detach()
    F.cross_entropy(generic.detach() + model.personal_head(features), client.train_labels).backward()
    torch.testing.assert_close(found["personal_head.weight"], model.personal_head.weight.grad)


def test_with_equal_counts_the_shared_parts_are_fedavgs(tiny):
    labels = {"a": [0, 1, 2, 0, 1, 2], "b": [2, 1, 0]}
    average, fed = (tiny(name, labels, lr=0.1) for name in ("fedavg", "fedrod"))
    fed.state = dict(average.state)
    for one in (average, fed):
        one.run()
    for name, array in average.state.items():
        np.testing.assert_allclose(fed.state[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_personal_answer_is_of_the_sum_of_logits(tiny):
    fed = tiny("fedrod", SKEWED, rounds=1).run()
    client = fed.clients["a"]
    fed.download("a")
    with torch.no_grad():
        z = client.model.features(client.train_inputs)
        generic = client.model.head(z)
        personal = client.model.personal_head(z)
    inputs = client.train_inputs
    torch.testing.assert_close(fed.method.predict(client, inputs), torch.softmax(generic + personal, dim=1))
    torch.testing.assert_close(fed.method.predict_global(client, inputs), torch.softmax(generic, dim=1))


def test_the_personal_head_learns_what_is_frequent_here_and_never_travels(tiny):
    fed = tiny("fedrod", SKEWED, lr=0.1, local_epochs=10)
    for _ in range(3):
        updates = fed.run_round()
    client = fed.clients["a"]
    fed.download("a")
    found = fed.method.predict(client, client.train_inputs)
    assert found[:, 0].mean() > fed.method.predict_global(client, client.train_inputs)[:, 0].mean() + 0.1
    personal = client.model.personal_head.weight.detach().numpy().tobytes()
    assert not [1 for update in updates if personal in encode(update.tensors)]
    assert not [name for name in fed.state if name.startswith("personal")]


@pytest.mark.parametrize("labels", [[1, 1, 1, 1], [0, 2, 2, 0]])
def test_absent_classes_leave_finite_gradients(tiny, labels):
    fed = tiny("fedrod", {"a": labels}, rounds=2).run()
    assert all(np.isfinite(array).all() for array in fed.state.values())
