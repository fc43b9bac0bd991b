"""The contract of a method: both halves of a federated algorithm in one file.

A method is the one subclass of `Method` in ``edge_agent/methods/<name>.py``. The coordinator calls ``start``,
``broadcast``, ``downlink`` and ``aggregate``; an agent calls ``local_update``, ``predict`` and ``personalize``. A
method never learns how its tensors travel. This module imports no torch: a head-tier device may read a method's name
and parameters.

Tensor names are those of ``build(task).state_dict()``: the first word is the part (``encoder.conv1.weight`` belongs to
part ``encoder``). Extra arrays that are not weights (prototypes, statistics) start with ``extra.``; arrays of the state
that start with ``server.`` stay at the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ..core.errors import ConfigError, TensorsError
from ..core.task import RUNNING_STATISTICS, State, Task, Tensors
from ..core.weighted_sum import WeightedSum
from .values import ClassStatistics, Client, Exactness, Grade, LocalWork, MethodParams, Norm, Stage, Update

if TYPE_CHECKING:
    import torch

    from ..heads.base import Contribute
    from ..training.loops import Loss
    from ..training.parts import Parts

SERVER_ONLY = "server."
"""The prefix of the names of arrays of the state that are never sent."""

CLASS_MEANS = "class means"
"""The kind in `Method.bounded_extras` of means of classes, whose direction is compared with that of others, too."""

CLASSIFIERS = "classifiers"
"""The kind in `Method.bounded_extras` of classifiers, whose direction is compared with that of others, too."""


def _reads_rounds(kind: type) -> bool:
    """Return whether a function of a method's classes, or one of the same file that it calls, reads ``.rounds``."""
    functions = [part for base in kind.__mro__ for part in vars(base).values()]
    seen = set[CodeType]()
    while functions:
        function = functions.pop()
        function = getattr(function, "__func__", getattr(function, "fget", function))
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        names = set(_names_in(code))
        if "rounds" in names:
            return True
        called = [function.__globals__[name] for name in names if name in function.__globals__]
        functions += [one for one in called if getattr(one, "__module__", "") == function.__module__]
    return False


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and the functions within it read, attributes included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


class Method:
    """One federated algorithm. Subclasses state what travels and override the steps in which they differ."""

    Params: ClassVar[type[MethodParams]] = MethodParams
    shared: Any = ("encoder", "head")
    """Parts that travel; everything else never leaves the device. A property where it depends on ``params``."""

    returned: Any = None
    """Those of the ``shared`` parts that an update carries back; None: all of them.

    A method whose devices use an encoder as it is broadcasts it and returns none: its updates are the arrays of `sends`
    alone, and a part that nobody returns stays as it was in the first state.
    """

    frozen: ClassVar[tuple[str, ...]] = ()
    """Parts that local training leaves as they are: no gradient, in eval mode."""

    norm: Norm = "global"
    own_norm: ClassVar[bool] = True
    """Whether a device that gets the exported encoder may estimate batch norm statistics on its own inputs."""

    evaluate_after: ClassVar[bool] = False
    """Whether a round's evaluation is repeated after local training (as ``acc.after``): some papers quote that one."""

    resumable: ClassVar[bool] = False
    """Whether a `local_update` of its own may be resumed within an epoch after a kill.

    It may where it trains ``client.model`` by calls of `train` alone, each with one optimizer, and everything else that
    it computes follows from the model, ``client.memory``, ``client.rng`` and what was received.
    """

    no_peft: ClassVar[str] = ""
    """Why a run of this method cannot train a part of the encoder alone (`Task.peft`); empty: it can."""

    weighting: Literal["samples", "uniform"] = "samples"
    bounded_extras: Mapping[str, str] = MappingProxyType({})
    """Prefix of extra arrays -> what they are, in plural: their norm is bounded by that of the other updates.

    Of `CLASS_MEANS` (K, ...), zeros for a class that the client lacks, that is the norm of the mean class.
    """

    class_statistics: ClassStatistics | None = None
    """The arrays of an update that describe the client's classes; None: it carries none.

    `coordinator.rounds.class_statistics` compares them with those of the others, class by class.
    """

    heads: ClassVar[tuple[str, ...]] = ("lr", "svm", "mlp", "prototype")
    exactness: ClassVar[Exactness] = {}
    """Grades of the device heads that belong to this method; `card` has those of all."""

    source: ClassVar[str] = ""
    """Paper: authors, title, venue."""

    contribute: ClassVar[Contribute | None] = None
    """The half for devices without torch: a static function from features to the tensors of an update.

    It gives the `sends` arrays. A method that has it must not import torch where its file is loaded. None: the head of
    the method's name has that half, or there is none (`edge_agent.methods.contribution`).
    """

    def __init__(self, params: MethodParams | None = None) -> None:
        self.params: Any = params if params is not None else self.Params()
        if self.params.norm is not None:
            self.norm = self.params.norm

    @property
    def name(self) -> str:
        """The file name, which is the method's name everywhere."""
        return type(self).__module__.rsplit(".", 1)[-1]

    def all_params(self) -> dict[str, Any]:
        """Return the parameters as JSON, defaults included."""
        result: dict[str, Any] = self.params.model_dump(mode="json")
        return result

    def local_work(self) -> LocalWork:
        """Return what a client does with its samples; default: ``local_epochs`` passes over all that is not frozen.

        A method with training of its own says here what that is. A test counts the passes of every method.
        """
        learns = "all parts"
        if self.frozen:
            learns = f"all parts but {' and '.join(self.frozen)}"
        return LocalWork((Stage(learns, self.params.local_epochs),))

    @property
    def head_name(self) -> str:
        """The classifier of a train-tier client: ``model`` for its own layers, else a device head's name."""
        return "model"

    @property
    def leaves_encoder(self) -> bool:
        """Whether devices get the encoder and use it as it is: no update carries it back."""
        return "encoder" in self.shared and "encoder" not in self._returned_parts

    @property
    def _returned_parts(self) -> Any:
        """The parts that an update carries back."""
        return self.shared if self.returned is None else self.returned

    @property
    def shares_classifier(self) -> bool:
        """Whether the shared parts alone, encoder and head, classify."""
        return {"encoder", "head"} <= set(self.shared)

    @property
    def needs_last_round(self) -> bool:
        """Whether something happens in the last round without which the run was in vain, so it may not end earlier."""
        return False

    @property
    def tied_to_rounds(self) -> str:
        """Why a step depends on how many rounds a run has, so that it cannot have more of them later; empty: none does.

        By default what the code says: a method is tied to them that needs its last round, or reads ``client.rounds``.
        """
        if self.needs_last_round:
            return "its last round is unlike the others"
        return "its code reads client.rounds" if _reads_rounds(type(self)) else ""

    @property
    def least_class_count(self) -> int | None:
        """The least samples of a class whose statistics an update carries; None: it carries none of classes.

        By default the parameter ``min_class_count``, which a method has that sends such statistics.
        """
        return getattr(self.params, "min_class_count", None)

    def takes_contributions(self) -> bool:
        """Return whether devices without torch can take part in rounds of this method."""
        from ..heads import contribution

        return type(self).contribute is not None or contribution(self.name) is not None

    def sends(self, model: Parts, task: Task) -> Tensors:
        """Return extra arrays that an update carries beside the parts, as zeros of the very shapes and dtypes.

        Their names start with ``extra.``. Each update carries all of them: what a client does not have (a class, say)
        is marked inside, by a count of 0.
        """
        return {}

    def to_noise(self, extras: Tensors) -> Tensors | None:
        """Return the `sends` arrays as float64 arrays to which Gaussian noise may be added.

        None: there are no such arrays.

        By default a method without such arrays has an answer, any other needs its own.
        """
        return None if extras else {}

    def from_noise(self, noisy: Tensors) -> Tensors:
        """Return valid `sends` arrays, computed from those of `to_noise` with noise, and from nothing else."""
        return noisy

    def objection(self, tensors: Tensors) -> str:
        """Return why an update with right names, shapes and finite values cannot be honest; empty if it can."""
        return ""

    def check(self, task: Task) -> None:
        """Require that the method can do this task; it is called before a run is accepted.

        Raises:
            ConfigError: The method cannot do this task; all reasons are listed.
        """

    def check_peft(self, task: Task) -> None:
        """Require that the method can train that part of the encoder alone which the task names.

        Raises:
            UnknownName: There is no such choice; the message suggests the nearest name.
            ConfigError: The choice does not have these parameters, or the method cannot do it.
        """
        from ..training import peft

        objection = f"method '{self.name}' {self.no_peft}" if self.no_peft else ""
        if "encoder" not in self._returned_parts:
            objection = f"the updates of method '{self.name}' hold no encoder"
        peft.check(task, objection)

    def build(self, task: Task) -> Parts:
        """Return a model of named parts, with fresh weights from torch's global generator (seeded by the caller)."""
        from ..training.parts import encoder_and_head

        return encoder_and_head(task)

    def adapt(self, model: Parts, task: Task) -> Parts:
        """Let only that part of a built model's encoder learn which the task names; returns the model.

        The model has the weights to begin with.

        Raises:
            UnknownName, ConfigError: See `check_peft`; or nothing of this encoder would learn.
        """
        from ..training import peft

        self.check_peft(task)
        adapted = peft.adapt(model, task)
        travels = any(name.startswith("encoder.") for name in self.returned_names(adapted))
        if task.peft is not None and not travels:
            mistake = f"nothing of the encoder would travel with norm = '{self.norm}' of method '{self.name}'"
            raise ConfigError(f"peft '{task.peft}'", [f"{mistake}; set norm = 'global', or choose another peft"])
        return adapted

    def shared_names(self, model: Parts) -> tuple[str, ...]:
        """Return names of the tensors that clients receive, sorted.

        They are the shared parts under this norm policy, and all that is frozen.
        """
        from ..training.parts import names_that_travel

        return tuple(sorted({*names_that_travel(model, self.shared, self.norm), *model.frozen_names}))

    def returned_names(self, model: Parts) -> tuple[str, ...]:
        """Return names of those of the `shared_names` that an update carries back, sorted."""
        from ..training.parts import names_that_travel

        parts = self._returned_parts
        names = names_that_travel(model, parts, self.norm)
        return tuple(name for name in names if name not in model.frozen_names)

    # --- coordinator -----------------------------------------------------------------------------------------------

    def start(self, tensors: Tensors) -> State:
        """Return the first state, from the shared tensors of one fresh model."""
        return dict(tensors)

    def broadcast(self, state: State) -> Tensors:
        """Return what every client of the round receives alike; default: all but what stays at the server."""
        return {name: array for name, array in state.items() if not name.startswith(SERVER_ONLY)}

    def downlink(self, state: State, client: str) -> Tensors:
        """Return what this client alone receives in addition; default: nothing."""
        return {}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state; default: `fold` the updates, which come in the order of clients, then `next_state`.

        Raises:
            TrainingFailed: The updates give no state.
        """
        total = WeightedSum()
        for update in updates:
            self.fold(total, update)
        return self.next_state(state, total)

    def fold(self, total: WeightedSum, update: Update) -> None:
        """Add an update to the sum of a round; default: its tensors, weighted as ``weighting`` says.

        Aggregators do this for a part of the updates each, and the parts are merged. So what is added may depend on
        nothing but the update and the parameters.
        """
        weight = update.weight if self.weighting == "samples" else 1.0
        total.add(weight, update.tensors)

    def next_state(self, state: State, total: WeightedSum) -> State:
        """Return the state after a round from the sum of its updates; default: its tensors are replaced by their means.

        Raises:
            TrainingFailed: The weights sum to zero, or there are no updates.
        """
        return {**state, **total.mean()}

    def server_step_is_sum(self) -> bool:
        """Return whether `aggregate` is nothing but `fold` and `next_state`, so that parts of a round can be summed."""
        return type(self).aggregate is Method.aggregate

    def mean(
        self, updates: Iterable[Update], note: Callable[[Update, Tensors], None] | None = None, **options: Any
    ) -> Tensors:
        """Return the mean of the updates, weighted as ``weighting`` says; ``options`` are those of `weighted_mean`.

        With ``note`` it is the mean of the model's tensors alone. On the way ``note`` gets each update, and copies of
        its ``extra.`` arrays by their names without that word: a view would keep the whole update open.
        """

        def read_weighted() -> Iterator[tuple[float, Tensors]]:
            """Yield weight and model tensors of each update, as it is read."""
            for update in updates:
                weight = update.weight if self.weighting == "samples" else 1.0
                if note is None:
                    yield weight, update.tensors
                    continue
                tensors, extras = _split_extras(update.tensors)
                note(update, extras)
                # An update of extras alone takes no part in the mean of the model's tensors.
                if tensors:
                    yield weight, tensors

        return weighted_mean(read_weighted(), **options)

    def server_step_is_mean(self) -> bool:
        """Return whether the next state is the updates' mean, so that they may be of several rounds."""
        kind = type(self)
        own_steps = (kind.aggregate, kind.fold, kind.next_state)
        return own_steps == (Method.aggregate, Method.fold, Method.next_state)

    # --- client ----------------------------------------------------------------------------------------------------

    @classmethod
    def has_standard_update(cls) -> bool:
        """Return whether local training is nothing but E epochs of cross entropy on all parts that are not ``frozen``.

        Such training may be done for many clients at once without calling ``local_update``.
        """
        return (cls.local_update, cls.loss, cls.sent) == (Method.local_update, Method.loss, Method.sent)

    def one_pass(self) -> bool:
        """Return whether local training is one call of `train`, from the received model and local data alone.

        Such training may be shortened for a slow device, and resumed within an epoch after a kill.
        """
        return type(self).local_update is Method.local_update

    def loss(self, client: Client, received: Tensors) -> Loss:
        """Return the loss of a batch in local training; default: cross entropy of the model's logits."""
        from ..training.loops import cross_entropy

        return cross_entropy(client.model)

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Train on local data from ``received`` (already loaded into ``client.model``); returns what is sent.

        Default: ``local_epochs`` of `loss` on all parts that are not ``frozen``, then `sent`.

        Raises:
            TrainingFailed: The loss is not finite, or the data do not allow a step.
        """
        from ..training.loops import TrainingOptions, train

        train(client, self.loss(client, received), self.params, options=TrainingOptions(frozen=self.frozen))
        return self.sent(client)

    def sent(self, client: Client) -> Tensors:
        """Return the shared tensors that travel back, as they are in the client's model now."""
        from ..training.parts import to_arrays

        return to_arrays(client.model, self.returned_names(client.model))

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities (n, K) float32 of this client's personal model."""
        from ..training.loops import predict_probabilities

        return predict_probabilities(client.model, inputs)

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return class probabilities (n, K) of the shared model; None where the method has no shared classifier."""
        from ..training.loops import predict_probabilities

        return predict_probabilities(client.model, inputs) if self.shares_classifier else None

    def views(self, client: Client, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return features (n, d) of ``inputs`` by name, for analysis: the encoder's first, then what is made of them.

        ``mask`` (n, d), where a method has one, is no features but the weights 0..1 by which it picks the encoder's.
        """
        from ..training.loops import features_of

        return {"encoder": features_of(client.model, inputs)}

    def personalize(self, client: Client, received: Tensors) -> None:
        """Fit the personal parts to the final shared ones after the last round; default: do nothing."""

    # --- export ----------------------------------------------------------------------------------------------------

    def head_params(self, head: str) -> dict[str, Any]:
        """Return parameters that this method gives a device head by default; default: the head's own."""
        return {}

    def card(self, head: str) -> tuple[Grade, str]:
        """Return the grade of a device head under these parameters, and the reason.

        Where batch norm stays with clients no head is exact: a device gets the pooled one.
        """
        foreign_reason = f"not part of {self.name}: another classifier on its frozen features"
        grade, reason = self.exactness.get(head, ("approximate", foreign_reason))
        if self.norm == "global":
            return grade, reason
        if grade == "exact":
            grade = "same form"
        pooled = f"the exported encoder has batch norm pooled over the clients (norm = {self.norm})"
        return grade, f"{reason}; {pooled}, where a client of the run has its own"

    def global_head(self, state: State) -> Tensors | None:
        """Return the shared linear classifier (``weight`` (K, d), ``bias`` (K,)) on raw features, or None."""
        if "head.weight" not in state:
            return None
        return {"weight": state["head.weight"], "bias": state["head.bias"]}

    def shared_statistics(self, state: State) -> Tensors | None:
        """Return statistics of all clients' features for the bundle, from which devices fit heads; None without any.

        They are means over samples, float64: ``gram`` (d (d + 1) / 2,), the upper triangle of z z'; ``sums`` (K, d),
        the features of each class; ``shares`` (K,) of the classes.
        """
        return None


def _split_extras(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return an update's tensors of the model, and copies of its extra arrays by their names without ``extra.``."""
    of_model: Tensors = {}
    extras: Tensors = {}
    for name, array in tensors.items():
        if name.startswith("extra."):
            extras[name.removeprefix("extra.")] = np.array(array)
        else:
            of_model[name] = array
    return of_model, extras


def is_learned(name: str, array: np.ndarray) -> bool:
    """Return whether an array of a state is a weight that gradients move.

    Not so extras, counters, and batch norm's running statistics: a step beyond their mean can make a variance negative.
    """
    return (
        array.dtype.kind == "f"
        and not name.startswith(("extra.", SERVER_ONLY))
        and not name.endswith(RUNNING_STATISTICS)
    )


def require_arrays(origin: str, value: object) -> Tensors:
    """Return what a method's own function has returned, where it is a mapping of name -> NumPy array.

    ``origin`` is the function, for the error.

    Raises:
        TensorsError: The result is not a mapping of names to NumPy arrays.
    """
    if not isinstance(value, Mapping):
        raise TensorsError(f"{origin} returned {type(value).__name__}, expected a dict of name -> NumPy array")
    for name, array in value.items():
        if not isinstance(array, np.ndarray | np.generic):
            hint = "; a tensor becomes one by tensor.detach().cpu().numpy()" if hasattr(array, "detach") else ""
            raise TensorsError(f"{origin} returned '{name}' as {type(array).__name__}, expected a NumPy array{hint}")
    return dict(value)


def weighted_mean(weighted: Iterable[tuple[float, Tensors]], *, may_be_empty: bool = False) -> Tensors:
    """Return the weighted mean of named arrays, folded in one at a time so that memory is one accumulator.

    Sums are exact, so the same updates give the same bits in any order. Integer arrays (counters) take the largest
    value: a mean of counters means nothing.

    Raises:
        TrainingFailed: The weights sum to zero, or there are no updates and ``may_be_empty`` is false.
    """
    total = WeightedSum()
    for weight, tensors in weighted:
        total.add(weight, tensors)
    return total.mean(may_be_empty=may_be_empty)


def pooled_norm(weighted: Iterable[tuple[float, Tensors]]) -> Tensors:
    """Return batch norm tensors of one common encoder from those of many clients.

    Means and variances become those of the mixture of all clients' data (mu = sum w mu_i, var = sum w (var_i + mu_i^2)
    - mu^2), gamma and beta the weighted mean. Each mapping holds tensors of batch norm layers only.

    Raises:
        TensorsError: There is no client, the weights do not sum to more than zero, or a variance lacks its mean.
    """
    total = 0.0
    sums = dict[str, np.ndarray]()
    for weight, tensors in weighted:
        total += weight
        for name, array in tensors.items():
            # Of a variance the second moment about zero, which may be averaged.
            moment = array.astype(np.float64) + _squared_mean(name, tensors)
            sums[name] = sums.get(name, 0.0) + weight * moment
    if not total > 0:
        raise TensorsError(f"batch norm of {len(sums)} tensors has total weight {total}, expected more than 0")
    means = {name: array / total for name, array in sums.items()}
    # From second moments back to variances; of other tensors nothing is subtracted.
    for name, array in means.items():
        if name.endswith(".running_var"):
            means[name] = np.maximum(array - _squared_mean(name, means), 0.0)
    return {name: array.astype(np.float32) for name, array in means.items()}


def _squared_mean(name: str, tensors: Tensors) -> np.ndarray | float:
    """Return the square of the mean that belongs to a variance; 0 for other tensors."""
    if not name.endswith(".running_var"):
        return 0.0
    mean = name.removesuffix("running_var") + "running_mean"
    if mean not in tensors:
        raise TensorsError(f"'{name}' came without '{mean}'; variances can be pooled only together with their means")
    return np.square(tensors[mean].astype(np.float64))
