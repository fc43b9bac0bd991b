"""What a method says of its work with a client's samples is what it does: steps are counted while it trains."""

from __future__ import annotations

import pytest

from edge_agent import methods
from edge_agent.methods import fedala
from edge_agent.methods.values import Stage
from edge_agent.training import loops

SAMPLES = 10
BATCH = 5
EPOCHS = 3

every_method = pytest.mark.parametrize("name", methods.names())


class Counter:
    """The batches that learned something, by their number of samples."""

    def __init__(self, monkeypatch) -> None:
        self.sizes: list[int] = []
        run_step = loops._run_step
        one_pass = fedala.one_pass

        def counted_step(client, step, indices):
            self.sizes.append(len(indices))
            return run_step(client, step, indices)

        def counted_pass(model, sides, data, params):
            self.sizes.append(len(data[1]))
            return one_pass(model, sides, data, params)

        monkeypatch.setattr(loops, "_run_step", counted_step)
        monkeypatch.setattr(fedala, "one_pass", counted_pass)

    def check(self, stages, clients: int = 1) -> None:
        """Compare with what these stages say that each client does, and begin anew."""
        passes = sum(stage.passes for stage in stages)
        steps = sum(stage.steps for stage in stages)
        if steps:
            assert (passes, len(self.sizes)) == (0, steps * clients)
        else:
            assert sum(self.sizes) == pytest.approx(passes * SAMPLES * clients)
        self.sizes.clear()


@pytest.fixture
def second_round(federation, make_method, monkeypatch):
    """``second_round(name)``: the federation after its second round, and what was counted in that round."""

    def run(name: str):
        fields = methods.get(name).Params.model_fields
        wanted = {"batch_size": BATCH, "local_epochs": EPOCHS, "ala_most_epochs": 1}
        method = make_method(name, **{field: value for field, value in wanted.items() if field in fields})
        fed = federation(method, rounds=4, labels={"a": [0, 1] * 5, "b": [1, 2] * 5})
        fed.run_round()
        counter = Counter(monkeypatch)
        fed.run_round()
        return fed, counter

    return run


@every_method
def test_a_round_and_the_end_have_as_many_passes_as_the_method_says(name, second_round):
    fed, counter = second_round(name)
    work = fed.method.local_work()
    if any(stage.takes_steps for stage in work.rounds) and name != "fedala":  # it mixes all samples in one batch
        assert max(counter.sizes) == (work.batch_size or BATCH)
    counter.check(work.rounds, clients=2)
    fed.method.personalize(fed.clients["a"], fed.download("a"))
    counter.check(work.end)


@every_method
def test_moments_are_kept_only_where_a_parameter_says_so(name, second_round):
    fed, _ = second_round(name)
    keeps = any(key.startswith("optimizer.") for key in fed.clients["a"].memory)
    assert keeps == (getattr(fed.method.params, "optimizer_state", "reset") == "persist")


def test_images_are_varied_in_training_and_features_are_not(federation, make_method):
    """FedRep's head learns on features that were computed once; its encoder in ten batches of images."""
    fed = federation(make_method("fedrep", head_epochs=3, batch_size=BATCH, local_epochs=5))
    shapes = []
    client = fed.clients["a"]
    client.augment = lambda inputs, generator: shapes.append(tuple(inputs.shape)) or inputs
    fed.run_round(["a"])
    assert shapes == [(BATCH, *fed.task.input_shape)] * 10


def test_what_an_augmentation_makes_of_images_is_what_trains(federation, make_method):
    fed = federation(make_method("fedavg"))
    plain = fed.update("a")
    varied = federation(make_method("fedavg"))
    varied.clients["a"].augment = lambda inputs, generator: inputs.flip(-1)
    mirrored = federation(make_method("fedavg"))
    mirrored.clients["a"].train_inputs = mirrored.clients["a"].train_inputs.flip(-1)
    expected = mirrored.update("a").tensors
    for name, array in varied.update("a").tensors.items():
        assert (array == expected[name]).all()
    assert any((array != expected[name]).any() for name, array in plain.tensors.items())


def test_a_stage_in_words():
    assert Stage("all parts", 5).describe() == "5 of all parts"
    assert Stage("head", 0.8, lr=0.1).describe() == "0.8 of head (step size 0.1)"
    assert Stage("all parts", steps=1).describe() == "1 batch of all parts"
    assert Stage("decoder", 1, lr=0.5, uses_labels=False).describe() == "1 of decoder (step size 0.5, without labels)"
    assert Stage("sums over features").describe() == "sums over features"
    assert not Stage("sums over features").takes_steps
