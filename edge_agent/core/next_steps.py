"""Steps to try next where a model that a device fits alone beats the personal one: each rule is one small class.

``headwater run`` and ``headwater simulate`` have the figures of a run, ``edge-agent fit`` those of one device. A rule
reads the figures that it needs, and names a step only where these speak for it; where they are not known it names none.
The caller, who has the accuracies, decides whether to look for steps at all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import ClassVar, Generic, TypeVar

LOSS_ROUNDS = 3
"""The number of rounds over which a fall of the training loss is measured."""

STILL_FALLING = 0.97
"""A loss below this share of that before `LOSS_ROUNDS` rounds still falls: rounds differ by a percent or two."""

FEW_SAMPLES = 100
"""A device with fewer training samples has few: with batches of 32 an epoch has three steps."""

FEW_EPOCHS = 2
"""A client that makes no more passes over few samples in a round makes a handful of steps."""

PERSONAL_METHODS = ("fedper", "fedrep", "fedavg_ft")
"""Methods with a personal part that work with their default parameters."""


@dataclass(frozen=True)
class NextStep:
    """One thing to try.

    Attributes:
        step: Its rule, by the name that JSON has.
        message: What to do, with the option that does it, and which figures speak for it.
    """

    step: str
    message: str

    @classmethod
    def from_json(cls, body: Mapping[str, object] | str) -> NextStep:
        """Return a step of the summary of a run; earlier versions wrote the message alone."""
        if isinstance(body, str):
            return cls("", body)
        return cls(str(body.get("step", "")), str(body.get("message", "")))

    def to_json(self) -> dict[str, str]:
        """Return the step as summaries and ``--json`` have it."""
        return {"step": self.step, "message": self.message}


@dataclass(frozen=True)
class RunEvidence:
    """What a coordinator knows of a run that has ended.

    Attributes:
        method: Name of its method.
        num_classes: Classes of the task.
        encoder: Name of the encoder.
        input_kind: image or window.
        input_side: The shorter side of an image in pixels, or the length of a window in samples.
        losses: Mean training loss of each round that has one, in order.
        samples: Samples of each client that has any.
        personal_over_shared: Mean of acc.personal minus acc.global over clients, where it is above 0 by more than
            noise; None: it is not, or not known.
        answers_with_shared: Whether acc.personal is acc.global at every client: the personal model is the shared one.
        losing_with_own_layers: Clients that are better off alone and answer with the layers that they have trained.
        has_bundle: Whether the encoder was exported.
        local_epochs: Passes over its samples that a client makes in a round; None: not known.
        began_trained: Whether the encoder began with weights that were trained before, not with random ones.
        leaves_encoder: Whether devices use the encoder as it is (`Method.leaves_encoder`): few samples are enough then.
    """

    method: str
    num_classes: int
    encoder: str = ""
    input_kind: str = "image"
    input_side: int = 0
    losses: Sequence[float] = ()
    samples: Sequence[int] = ()
    personal_over_shared: float | None = None
    answers_with_shared: bool = False
    losing_with_own_layers: Sequence[str] = ()
    has_bundle: bool = False
    local_epochs: int | None = None
    began_trained: bool = False
    leaves_encoder: bool = False

    @property
    def typical_samples(self) -> int | None:
        """The number of samples that half of the clients do not exceed; None: no client has any."""
        if not self.samples:
            return None
        return median_low(self.samples)

    @property
    def has_few_samples(self) -> bool:
        """Whether half of the clients have few samples."""
        return self.typical_samples is not None and self.typical_samples < FEW_SAMPLES

    @property
    def earlier_loss(self) -> float | None:
        """The mean loss `LOSS_ROUNDS` rounds before the last one; None: the run is too short to compare."""
        if len(self.losses) <= LOSS_ROUNDS:
            return None
        return self.losses[-1 - LOSS_ROUNDS]

    @property
    def is_loss_falling(self) -> bool:
        """Whether the training loss still falls, as far as that is known."""
        return self.earlier_loss is not None and self.losses[-1] < STILL_FALLING * self.earlier_loss


@dataclass(frozen=True)
class FitEvidence:
    """What a device knows of one fit on a bundle's encoder.

    Attributes:
        samples: Samples that the head was fitted on.
        compares_blend: Whether a blend with the local model was fitted, or compared with the other heads.
        is_local_saved: Whether the model of acc.local was saved in the head's place.
    """

    samples: int
    compares_blend: bool
    is_local_saved: bool = False


Evidence = TypeVar("Evidence", RunEvidence, FitEvidence)
"""The figures that a rule reads: those of a run, or those of one fit on a device."""


class Rule(ABC, Generic[Evidence]):
    """One reason why federated learning did not help, and what to do about it."""

    name: ClassVar[str]
    """The name that the rule has in JSON."""

    @abstractmethod
    def message(self, evidence: Evidence) -> str:
        """Return what to try, with the figures that speak for it; empty where they do not, or are not known."""


class MoreRounds(Rule[RunEvidence]):
    """The training loss still falls: the run was too short."""

    name = "more_rounds"

    def message(self, evidence: RunEvidence) -> str:
        """See `Rule.message`."""
        if not evidence.is_loss_falling:
            return ""
        return (
            f"more rounds (--rounds): the training loss still falls, from {evidence.earlier_loss:.3g} to "
            f"{evidence.losses[-1]:.3g} in the last {LOSS_ROUNDS} rounds"
        )


class MoreSteps(Rule[RunEvidence]):
    """Devices have few samples and pass over them once or twice a round, which is a handful of small steps."""

    name = "more_steps"

    def message(self, evidence: RunEvidence) -> str:
        """See `Rule.message`."""
        typical = evidence.typical_samples
        if typical is None or not evidence.has_few_samples or evidence.leaves_encoder:
            return ""
        passes_few_times = evidence.local_epochs is not None and evidence.local_epochs <= FEW_EPOCHS
        has_settled = evidence.earlier_loss is not None and not evidence.is_loss_falling
        if not passes_few_times or has_settled:
            return ""
        return (
            "more and larger steps in a round (--set local_epochs=5 --set lr=0.05): half of the devices have "
            f"{typical} samples or fewer and pass over them {evidence.local_epochs} x in a round"
        )


class CollectOnDevices(Rule[RunEvidence]):
    """Devices have few samples: with so few a personal part learns little."""

    name = "more_samples"

    def message(self, evidence: RunEvidence) -> str:
        """See `Rule.message`."""
        typical = evidence.typical_samples
        if typical is None or not evidence.has_few_samples:
            return ""
        return (
            f"more samples: half of the devices have {typical} or fewer; collect {FEW_SAMPLES - typical} more on these"
        )


class PretrainedEncoder(Rule[RunEvidence]):
    """Devices have few samples and are asked to train an encoder with them, or nobody has trained it."""

    name = "pretrained_encoder"

    def message(self, evidence: RunEvidence) -> str:
        """See `Rule.message`."""
        # For pictures an encoder comes with the package; for recordings a bundle has to be named.
        source = "starter, or a bundle" if evidence.input_kind == "image" else "BUNDLE"
        # 1. A method that leaves the encoder as it is needs one that was trained.
        if evidence.leaves_encoder:
            if evidence.began_trained or evidence.typical_samples is None:
                return ""
            return (
                f"an encoder that is trained already (--from {source}): {evidence.method} leaves it as it is, and this "
                "one has the random weights that it began with"
            )
        # 2. A method that trains the encoder needs samples.
        if not evidence.has_few_samples:
            return ""
        if evidence.began_trained:
            return (
                "the encoder as it began (the same --from or --weights with --method afl, one round): few samples are "
                "enough for a classifier on it, not to train it"
            )
        return (
            f"an encoder that is trained already and stays as it is (--method afl with --from {source}, one round): "
            "few samples are enough for a classifier on it, not for an encoder"
        )


class TrainEncoder(Rule[RunEvidence]):
    """The encoder stayed as it was, and devices have the samples to train it."""

    name = "train_encoder"

    def message(self, evidence: RunEvidence) -> str:
        """See `Rule.message`."""
        if not evidence.leaves_encoder or evidence.typical_samples is None or evidence.has_few_samples:
            return ""
        return (
            f"a method that trains the encoder (--method fedavg_ft): {evidence.method} leaves it as it is, and half of "
            f"the devices have {evidence.typical_samples} samples or more"
        )


class PersonalPart(Rule[RunEvidence]):
    """All clients answer with the shared model: nothing of it can suit one client alone."""

    name = "personal_part"

    def message(self, evidence: RunEvidence) -> str:
        """See `Rule.message`."""
        if not evidence.answers_with_shared:
            return ""
        return (
            f"a method with a part that stays on the device ({_other_methods(evidence)}): with {evidence.method} every "
            "device answers with the shared model"
        )


class OtherMethod(Rule[RunEvidence]):
    """The shared model suits clients far less than their personal ones: what they learn disagrees."""

    name = "other_method"

    def message(self, evidence: RunEvidence) -> str:
        """See `Rule.message`."""
        gap = evidence.personal_over_shared
        if gap is None:
            return ""
        return (
            f"a method that keeps more on the device ({_other_methods(evidence)}): clients disagree, personal models "
            f"are {100 * gap:.1f} points above the shared one in the mean, by more than noise"
        )


class LargerEncoder(Rule[RunEvidence]):
    """The training loss stands high, with samples enough: the encoder is too small for the task."""

    name = "larger_encoder"
    next_larger: ClassVar[Mapping[tuple[str, str], tuple[str, int]]] = {
        ("image", "linear"): ("small_cnn", 4),
        ("image", "small_cnn"): ("mobilenet_v3_small", 32),
        ("image", "starter_cnn"): ("mobilenet_v3_large", 32),
        ("image", "mobilenet_v3_small"): ("mobilenet_v3_large", 32),
        ("image", "mobilenet_v3_large"): ("efficientnet_b0", 32),
        ("image", "mobilenet_v2"): ("efficientnet_b0", 32),
        ("image", "efficientnet_b0"): ("resnet50", 32),
        ("image", "resnet18"): ("resnet34", 32),
        ("image", "resnet34"): ("resnet50", 32),
        ("window", "linear"): ("cnn1d", 8),
    }
    """(Kind of input, encoder) -> the next larger encoder for it, and the least side that it needs."""

    def message(self, evidence: RunEvidence) -> str:
        """See `Rule.message`."""
        has_settled = evidence.earlier_loss is not None and not evidence.is_loss_falling
        if not has_settled or evidence.has_few_samples:
            return ""
        # A loss is low where the right class has better than even odds on samples that are learned from; of two
        # classes, where even odds are guessing, where it is below half of the loss of guessing.
        low_loss = min(math.log(2), math.log(evidence.num_classes) / 2)
        if evidence.losses[-1] < low_loss:
            return ""
        larger, least_side = self.next_larger.get((evidence.input_kind, evidence.encoder), ("", 0))
        if not larger or evidence.input_side < least_side:
            return ""
        return (
            f"a larger encoder, {larger} in place of {evidence.encoder} (task.encoder, or --encoder of a simulation): "
            f"the training loss no longer falls and stands at {evidence.losses[-1]:.3g}"
        )


class BlendOnDevices(Rule[RunEvidence]):
    """Devices answer with the layers that they train, where a blend with the local model would be possible."""

    name = "blend"

    def message(self, evidence: RunEvidence) -> str:
        """See `Rule.message`."""
        if not evidence.has_bundle or not evidence.losing_with_own_layers:
            return ""
        return (
            "a blend on the devices that lose ('edge-agent fit' with this run's bundle): they answer with the layers "
            "that they have trained; head auto also tries these features together with the model alone"
        )


RUN_RULES: tuple[Rule[RunEvidence], ...] = (
    MoreRounds(),
    MoreSteps(),
    CollectOnDevices(),
    PretrainedEncoder(),
    TrainEncoder(),
    PersonalPart(),
    OtherMethod(),
    LargerEncoder(),
    BlendOnDevices(),
)
"""All rules for runs, in the order in which their steps are shown."""


def steps_after_run(run: RunEvidence, rules: Iterable[Rule[RunEvidence]] = RUN_RULES) -> list[NextStep]:
    """Return what can be tried after a run with which clients are worse than alone; at least one step."""
    steps = _named_steps(run, rules)
    # Where no figure speaks for anything, what differs most from the run at the least cost is another method.
    if not steps:
        steps.append(NextStep(OtherMethod.name, f"a method that keeps more on the device ({_other_methods(run)})"))
    return steps


def _other_methods(run: RunEvidence) -> str:
    """Return the option that names two methods with a personal part, neither of them the run's own."""
    names = [name for name in PERSONAL_METHODS if name != run.method]
    return f"--method {' or '.join(names[:2])}"


class TryBlend(Rule[FitEvidence]):
    """No blend of the head with the local model was tried."""

    name = "blend"

    def message(self, evidence: FitEvidence) -> str:
        """See `Rule.message`."""
        if evidence.compares_blend:
            return ""
        return "--head auto without --no-blend: it also tries the head together with the model of acc.local"


class AllowLocal(Rule[FitEvidence]):
    """The better model is there and was not saved."""

    name = "allow_local"

    def message(self, evidence: FitEvidence) -> str:
        """See `Rule.message`."""
        if evidence.is_local_saved:
            return ""
        return "--allow-local saves that model in the head's place"


class CollectMore(Rule[FitEvidence]):
    """The device has few samples."""

    name = "more_samples"

    def message(self, evidence: FitEvidence) -> str:
        """See `Rule.message`."""
        if evidence.samples >= FEW_SAMPLES:
            return ""
        return f"more samples: {evidence.samples} to fit are few; collect {FEW_SAMPLES - evidence.samples} more"


class OtherBundle(Rule[FitEvidence]):
    """The encoder's features say less of these samples than the raw inputs do."""

    name = "other_bundle"

    def message(self, evidence: FitEvidence) -> str:
        """See `Rule.message`."""
        return (
            "another bundle, with an encoder for such data (--bundle): the features of this one say less about these "
            f"{evidence.samples} samples than the raw inputs; 'headwater bundle' makes one of any pretrained network"
        )


FIT_RULES: tuple[Rule[FitEvidence], ...] = (TryBlend(), AllowLocal(), CollectMore(), OtherBundle())
"""All rules for one fit, in the order in which their steps are shown."""


def steps_after_fit(fit: FitEvidence, rules: Iterable[Rule[FitEvidence]] = FIT_RULES) -> list[NextStep]:
    """Return what can be tried after a fit whose head is worse than the model alone."""
    return _named_steps(fit, rules)


def _named_steps(evidence: Evidence, rules: Iterable[Rule[Evidence]]) -> list[NextStep]:
    """Return the steps of the rules for which the figures speak, in the rules' order."""
    steps = []
    for rule in rules:
        message = rule.message(evidence)
        if message:
            steps.append(NextStep(rule.name, message))
    return steps
