from __future__ import annotations

import numpy as np
import torch

from edge_agent.wire.tensors import encode

LABELS = {"a": [0, 1, 2, 1, 0], "b": [2, 2, 1, 0]}


def test_no_byte_of_an_encoder_is_ever_in_a_message(tiny):
    fed = tiny("lg_fedavg", LABELS)
    for _ in range(2):
        updates = fed.run_round()
        messages = [encode(update.tensors) for update in updates] + [encode(fed.method.broadcast(fed.state))]
        assert [fed.method.downlink(fed.state, name) for name in LABELS] == [{}, {}]
        for client in fed.clients.values():
            rows = client.model.encoder.layers[1].weight.detach().numpy()
            assert not [row for row in rows for message in messages if row.tobytes() in message]
        assert all(set(update.tensors) == {"head.weight", "head.bias"} for update in updates)


def test_encoders_stay_different_and_the_head_is_the_mean_by_samples(tiny):
    fed = tiny("lg_fedavg", LABELS)
    one, other = fed.run_round()
    by_hand = (5 * one.tensors["head.weight"].astype(float) + 4 * other.tensors["head.weight"]) / 9
    np.testing.assert_allclose(fed.state["head.weight"], by_hand, rtol=1e-6)
    assert not torch.equal(*(client.model.encoder.layers[1].weight for client in fed.clients.values()))


def test_it_trains_everything_as_fedavg_does(tiny):
    # From one and the same model a round sends the very head that FedAvg sends.
    average, fed = (tiny(name, LABELS, local_epochs=2) for name in ("fedavg", "lg_fedavg"))
    for name in LABELS:
        average.download(name)
        fed.clients[name].model.load_state_dict(average.clients[name].model.state_dict())
    for whole, head in zip(average.run_round(), fed.run_round(), strict=True):
        assert all(np.array_equal(whole.tensors[name], array) for name, array in head.tensors.items())
    inner = fed.clients["a"].model.encoder.layers[1].weight
    assert torch.equal(inner, average.clients["a"].model.encoder.layers[1].weight)


def test_there_is_no_shared_classifier_to_speak_of(tiny):
    fed = tiny("lg_fedavg", LABELS, rounds=1).run()
    client = fed.clients["a"]
    assert fed.method.predict_global(client, client.train_inputs) is None
    assert fed.method.global_head(fed.state) is None
