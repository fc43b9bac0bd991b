"""What to try next: each rule alone, with the figures that it needs, without them, and just beside its threshold."""

from __future__ import annotations

import pytest

from edge_agent import methods, models
from edge_agent.bundle.manifest import LEAVE_ENCODER
from edge_agent.core.errors import ConfigError
from edge_agent.core.next_steps import (
    FEW_EPOCHS,
    FEW_SAMPLES,
    FIT_RULES,
    PERSONAL_METHODS,
    RUN_RULES,
    AllowLocal,
    BlendOnDevices,
    CollectMore,
    CollectOnDevices,
    FitEvidence,
    LargerEncoder,
    MoreRounds,
    MoreSteps,
    NextStep,
    OtherBundle,
    OtherMethod,
    PersonalPart,
    PretrainedEncoder,
    RunEvidence,
    TrainEncoder,
    TryBlend,
    steps_after_fit,
    steps_after_run,
)
from edge_agent.core.task import ImageInput, Task, WindowInput

SETTLED = (0.9, 0.9, 0.9, 0.9)


def evidence(**figures):
    return RunEvidence(**{"method": "fedavg", "num_classes": 10, **figures})


@pytest.mark.parametrize("rule", RUN_RULES, ids=lambda rule: rule.name)
def test_a_rule_says_nothing_where_nothing_is_known(rule):
    assert rule.message(evidence()) == ""


def test_more_rounds_while_the_loss_falls():
    """97 % of 2.0 is 1.94: what is below still falls."""
    falling = evidence(losses=(9.0, 2.0, 1.9, 1.7, 1.5))
    assert MoreRounds().message(falling) == (
        "more rounds (--rounds): the training loss still falls, from 2 to 1.5 in the last 3 rounds"
    )
    assert MoreRounds().message(evidence(losses=(2.0, 2.0, 2.0, 1.93)))
    assert not MoreRounds().message(evidence(losses=(2.0, 2.0, 2.0, 1.94)))
    assert not MoreRounds().message(evidence(losses=(2.0, 1.5, 1.0))), "too few rounds to say"


def test_more_steps_where_few_samples_are_passed_once():
    """40 samples are two steps of 32: 15 such rounds from the starter encoder reached 57 %, with five epochs 100 %."""
    few = {"samples": (40, 40, 400), "local_epochs": 1}
    assert MoreSteps().message(evidence(**few)) == (
        "more and larger steps in a round (--set local_epochs=5 --set lr=0.05): half of the devices have 40 samples or "
        "fewer and pass over them 1 x in a round"
    )
    assert MoreSteps().message(evidence(samples=(40,), local_epochs=FEW_EPOCHS))
    assert MoreSteps().message(evidence(**few, losses=(2.0, 1.5, 1.2, 0.9))), "the loss still falls"
    assert not MoreSteps().message(evidence(**few, losses=SETTLED)), "steps are not what is lacking"
    assert not MoreSteps().message(evidence(samples=(40,), local_epochs=FEW_EPOCHS + 1))
    assert not MoreSteps().message(evidence(samples=(400,), local_epochs=1))
    assert not MoreSteps().message(evidence(samples=(40,))), "a method without epochs"
    assert not MoreSteps().message(evidence(**few, leaves_encoder=True)), "a method without steps"


def test_more_samples_where_half_of_the_devices_have_few():
    """Of four devices the lower middle one counts: two have no more than 40."""
    message = CollectOnDevices().message(evidence(samples=(500, 40, 20, 300)))
    assert message == "more samples: half of the devices have 40 or fewer; collect 60 more on these"
    assert CollectOnDevices().message(evidence(samples=(FEW_SAMPLES - 1,)))
    assert not CollectOnDevices().message(evidence(samples=(FEW_SAMPLES,)))


@pytest.mark.parametrize("method", LEAVE_ENCODER)
def test_an_encoder_is_given_where_samples_are_few_and_trained_where_they_are_many(method):
    few = (40, 40)
    many = (400, 400)
    frozen = {"method": method, "leaves_encoder": True}
    assert "--method afl with --from starter, or a bundle, one" in PretrainedEncoder().message(evidence(samples=few))
    of_windows = evidence(samples=few, input_kind="window")
    assert "--method afl with --from BUNDLE, one round" in PretrainedEncoder().message(of_windows)
    assert not PretrainedEncoder().message(evidence(samples=many))
    has_one = evidence(samples=few, began_trained=True)
    assert (
        PretrainedEncoder()
        .message(has_one)
        .startswith("the encoder as it began (the same --from or --weights with --m")
    )
    assert not PretrainedEncoder().message(evidence(**frozen, samples=few, began_trained=True)), "it has one"
    has_none = PretrainedEncoder().message(evidence(**frozen, samples=few))
    assert has_none.startswith("an encoder that is trained already (--from starter, or a bundle): ")
    assert f"{method} leaves it as it is, and this one has the random weights" in has_none
    assert f"{method} leaves it as it is" in TrainEncoder().message(evidence(**frozen, samples=many))
    assert not TrainEncoder().message(evidence(**frozen, samples=few))
    assert not TrainEncoder().message(evidence(samples=many))


def test_another_method_where_personal_models_are_far_above_the_shared_one():
    message = OtherMethod().message(evidence(method="fedper", personal_over_shared=0.125))
    assert message.startswith("a method that keeps more on the device (--method fedrep or fedavg_ft): clients disagree")
    assert "12.5 points above the shared one" in message


def test_a_personal_part_where_all_answer_with_the_shared_model():
    assert PersonalPart().message(evidence(answers_with_shared=True)) == (
        "a method with a part that stays on the device (--method fedper or fedrep): with fedavg every device answers "
        "with the shared model"
    )
    assert not PersonalPart().message(evidence(answers_with_shared=False))


def test_a_larger_encoder_where_the_loss_stands_high():
    """Even odds for the right class are a loss of log 2 = 0.693; of two classes the limit is half of that."""
    high = {"encoder": "small_cnn", "input_side": 32, "losses": SETTLED, "samples": (400,)}
    assert LargerEncoder().message(evidence(**high)) == (
        "a larger encoder, mobilenet_v3_small in place of small_cnn (task.encoder, or --encoder of a simulation): the "
        "training loss no longer falls and stands at 0.9"
    )
    assert not LargerEncoder().message(evidence(**{**high, "losses": (0.69,) * 4}))
    assert LargerEncoder().message(evidence(**{**high, "losses": (0.4,) * 4, "num_classes": 2}))
    assert not LargerEncoder().message(evidence(**{**high, "losses": (0.34,) * 4, "num_classes": 2}))
    assert not LargerEncoder().message(evidence(**{**high, "losses": (2.0, 1.5, 1.2, 0.9)})), "more rounds first"
    assert not LargerEncoder().message(evidence(**{**high, "samples": (40,)})), "too few samples for it"
    assert not LargerEncoder().message(evidence(**{**high, "input_side": 28})), "that encoder needs 32 pixels"
    assert not LargerEncoder().message(evidence(**{**high, "encoder": "resnet50"})), "none is larger"
    assert not LargerEncoder().message(evidence(**{**high, "input_kind": "window"})), "small_cnn takes images only"


@pytest.mark.parametrize("kind, smaller", list(LargerEncoder.next_larger))
def test_the_larger_encoder_takes_the_input_and_has_more_weights(kind, smaller):
    larger, side = LargerEncoder.next_larger[kind, smaller]

    def task(encoder, side):
        shape = ImageInput(height=side, width=side) if kind == "image" else WindowInput(length=side)
        return Task(input=shape, class_names=("a", "b"), encoder=encoder)

    def weights(encoder):
        # At the size that both are for: 32 pixels or more.
        network = models.create(task(encoder, max(side, 32)))
        return sum(parameter.numel() for parameter in network.parameters())

    models.check(task(larger, side))
    if side > 4:
        with pytest.raises(ConfigError, match=f"at least {side}"):
            models.check(task(larger, side - 1))
    if smaller != "linear":  # whose weights are as many as the input has numbers
        assert weights(larger) > weights(smaller)


def test_a_blend_where_devices_answer_with_their_own_layers():
    assert "'edge-agent fit'" in BlendOnDevices().message(evidence(has_bundle=True, losing_with_own_layers=["a"]))
    assert not BlendOnDevices().message(evidence(has_bundle=False, losing_with_own_layers=["a"])), "nothing to fit on"
    assert not BlendOnDevices().message(evidence(has_bundle=True)), "head auto has tried it"


def test_without_any_figure_another_method_is_named():
    assert steps_after_run(evidence(method="fedavg_ft")) == [
        NextStep("other_method", "a method that keeps more on the device (--method fedper or fedrep)")
    ]


def test_steps_come_in_the_order_of_the_rules():
    run = evidence(losses=(2.0, 1.5, 1.2, 0.9), samples=(40,), personal_over_shared=0.2)
    names = [next_step.step for next_step in steps_after_run(run)]
    assert names == ["more_rounds", "more_samples", "pretrained_encoder", "other_method"]
    assert len({rule.name for rule in RUN_RULES}) == len(RUN_RULES)
    assert len({rule.name for rule in FIT_RULES}) == len(FIT_RULES)


def test_all_methods_that_send_the_encoder_and_get_none_back_are_named():
    """Of a bundle of a new one that is missing in the list, a device would say that it has trained the encoder."""
    assert [name for name in methods.names() if methods.create(name).leaves_encoder] == sorted(LEAVE_ENCODER)


@pytest.mark.parametrize("name", PERSONAL_METHODS)
def test_personal_methods_that_are_named_exist_and_train_the_encoder(name):
    method = methods.create(name)
    assert "encoder" in method.shared
    assert method.returned is None


def test_a_blend_is_named_where_none_was_compared():
    assert "--head auto" in TryBlend().message(FitEvidence(samples=500, compares_blend=False))
    assert not TryBlend().message(FitEvidence(samples=500, compares_blend=True))


def test_the_local_model_is_offered_where_it_was_not_saved():
    assert "--allow-local" in AllowLocal().message(FitEvidence(500, compares_blend=True))
    assert not AllowLocal().message(FitEvidence(500, compares_blend=True, is_local_saved=True))


def test_so_many_samples_are_asked_for_as_are_missing():
    few = FitEvidence(samples=30, compares_blend=True)
    assert CollectMore().message(few) == "more samples: 30 to fit are few; collect 70 more"
    assert not CollectMore().message(FitEvidence(samples=FEW_SAMPLES, compares_blend=True))


def test_another_bundle_is_named_last():
    assert OtherBundle().message(FitEvidence(500, compares_blend=True)).startswith("another bundle")
    steps = steps_after_fit(FitEvidence(30, compares_blend=False))
    assert [next_step.step for next_step in steps] == ["blend", "allow_local", "more_samples", "other_bundle"]


def test_steps_of_earlier_versions_are_read():
    step = NextStep("more_rounds", "more rounds")
    assert NextStep.from_json(step.to_json()) == step
    assert NextStep.from_json("more rounds") == NextStep("", "more rounds")
    assert NextStep.from_json({}) == NextStep("", "")
