"""Simulation settings, saved in the folder of the run so that it can be resumed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from edge_agent.bundle.starter import bundle_path
from edge_agent.core.config import PRECISION, Precision, mistakes_of
from edge_agent.core.errors import ConfigError
from edge_agent.core.registry import is_reference, own_name
from edge_agent.core.task import MAX_LABEL, Frozen, ImageInput, InputSpec

CLIENTS = 20
SIZE = 600
MIN_SIZE = 10
FEDPAC_NORMALISATION = {"mean": (0.1307,), "std": (0.3081,)}
"""The normalisation in FedPAC's code for grey images."""

_GIVEN_BY_DATA = ("domains", "subjects", "users")
_OPTIONS_OF = {
    "alpha": ("dirichlet", "fedrir_dirichlet", "quantity"),
    "size": ("fedpac", "iid"),
    "test_size": ("fedpac",),
    "starts": ("fedpac",),
    "iid_share": ("fedpac",),
    "classes_each": ("pathological", "fedrir_pathological"),
    "min_size": ("dirichlet", "pathological", "quantity", "fedrir_dirichlet", "fedrir_pathological"),
    "clients": (
        *("dirichlet", "fedpac", "fedrir_dirichlet", "fedrir_pathological", "iid", "pathological", "quantity"),
        *_GIVEN_BY_DATA,
    ),
}
"""Option -> rules that use it; with any other rule it is an error."""


def is_saved_partition(partition: str | None) -> bool:
    """Return whether ``partition`` names the file of a saved partition or of an index table, and not a rule."""
    return partition is not None and partition.endswith((".json", ".csv", ".parquet"))


EngineName = Literal["serial", "pool", "ray", "stacked", "fastest"]

ABOUT = ("name", "tags", "note", "log")
"""Fields that say what a run is called and where it is logged."""

HOW_NOT_WHAT = ("engine", "workers", "address", "stacked_always", "max_memory", *ABOUT)
"""Fields that do not change the results, on a CPU not a bit: a run may be resumed with others.

Only engine ``stacked`` adds numbers in another order: its results equal those of the others up to rounding.
"""


class Plan(Frozen):
    """One simulated run: method, data, who gets what, and how long."""

    method: str = Field("fedavg", max_length=1000, description="a file name in edge_agent/methods, or PATH.py:CLASS")
    params: dict[str, Any] = Field(default_factory=dict, description="a parameter of the method")
    paper: bool = Field(
        False,
        description="parameters have the paper's values where our defaults differ; 'headwater methods NAME' shows",
    )
    paper_for: str | None = Field(
        None,
        max_length=MAX_LABEL,
        description="as paper, with the values for this data set, such as pacs, where the published ones differ",
    )
    data: tuple[str, ...] = Field(
        min_length=1, max_length=1000, description="Data source as on devices, or PATH.py:FUNCTION; several for domains"
    )
    folder: Path = Field(Path(), description="relative paths in data count from here")
    partition: str = Field(
        "iid",
        min_length=1,
        description="iid, dirichlet, pathological, quantity, fedpac, fedrir_dirichlet, fedrir_pathological, domains, "
        "subjects, users, a saved partition.json, or an index table (.csv, .parquet, .json) with the columns client, "
        "row and perhaps part",
    )
    clients: int | None = Field(
        None, ge=1, le=100_000, description=f"number of clients; default: {CLIENTS}, or as many as the data name"
    )
    alpha: float | None = Field(
        None,
        gt=0,
        description="small: few classes for each client (dirichlet, fedrir_dirichlet), most samples at few clients "
        "(quantity)",
    )
    size: int | None = Field(None, ge=1, description=f"samples of one client (iid, fedpac); default of fedpac: {SIZE}")
    test_size: int | None = Field(None, ge=1, description="test samples of one client (fedpac); default: size")
    starts: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] | None = Field(
        None, description="sample of each class where fedpac's pointers start, training and test; default: 0, 0"
    )
    iid_share: float | None = Field(
        None, ge=0, le=1, description="share of a client's samples spread over all classes (fedpac); default: 0.2"
    )
    classes_each: int | None = Field(
        None, ge=1, description="classes of one client (pathological, fedrir_pathological); default: 2"
    )
    min_size: int | None = Field(
        None,
        ge=1,
        description=f"drawn again until every client has so many samples; default: {MIN_SIZE}, of fedrir_dirichlet 400",
    )
    test_fraction: float = Field(
        0.25, gt=0, lt=1, description="share of each client's samples held out where the data have no test part"
    )
    validation: float | None = Field(
        None, gt=0, lt=1, description="evaluate on this share of the training samples; test samples stay unused"
    )
    fraction: float = Field(1.0, gt=0, le=1, description="share of the clients in a round")
    fraction_max: float | None = Field(
        None, gt=0, le=1, description="draw the share for each round between fraction and this"
    )
    full_last_round: bool = Field(False, description="all clients take part in the last round, whatever fraction says")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that a client of a round leaves, or trains and never delivers"
    )
    mode: Literal["synchronous", "buffered"] = Field(
        "synchronous",
        description="buffered: a round closes with its first updates, those of slower devices count in later rounds; "
        "needs speeds",
    )
    buffer: int | None = Field(
        None, ge=1, le=100_000, description="updates that close a buffered round; default: 10, or all clients"
    )
    max_staleness: int | None = Field(
        None, ge=0, le=10_000, description="rounds after which a buffered update is given up; default: 10"
    )
    speeds: str | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="kinds of devices, drawn by the seed: profiles such as pi4,jetson, or a CSV file with name, "
        "seconds_per_sample, down_mbit_s, up_mbit_s; rounds then have simulated seconds",
    )
    new_clients: int = Field(
        0,
        ge=0,
        le=100_000,
        description="the last so many clients by name never train; after the run they fit a head: acc.new",
    )
    head_clients: int = Field(
        0,
        ge=0,
        le=100_000,
        description="the first so many clients by name are devices without torch, which take part where the method has "
        "a half for them; after the run they fit a head",
    )
    head: str | None = Field(
        None,
        max_length=100,
        description="head that new clients and clients without torch fit: a file name in edge_agent/heads, or auto for "
        "the best in cross-validation; default: the first of the method's",
    )
    rounds: int = Field(10, ge=1, le=1_000_000, description="number of rounds")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of partition, first weights, cohorts and clients")
    encoder: str | None = Field(
        None,
        max_length=1000,
        description="an encoder in edge_agent/models, or PATH.py:NAME; default: one that suits the inputs",
    )
    encoder_params: dict[str, Any] = Field(default_factory=dict, description="a keyword argument of the encoder")
    weights: Path | None = Field(
        None,
        description="the encoder's first weights: a safetensors file, such as ImageNet's, a bundle of the same "
        "encoder, or starter",
    )
    peft: str | None = Field(
        None,
        max_length=MAX_LABEL,
        description="what of the encoder learns and travels: lora, bn or last_block; default: all of it",
    )
    peft_params: dict[str, Any] = Field(default_factory=dict, description="a parameter of peft, such as rank=8 of lora")
    input: dict[str, Any] = Field(
        default_factory=dict, description="a field of the input spec, such as mean=0.13 or height=32"
    )
    standardise: bool = Field(False, description="mean and std of the inputs are those of the training samples")
    augment: Literal["crop_flip", "flip_turn", "views"] | None = Field(
        None,
        description="random views of images in training, whatever the method: crop_flip (a frame of 4 pixels), "
        "flip_turn (up to 30 degrees), or views, those of contrastive learning",
    )
    evaluate_every: int = Field(1, ge=0, le=1_000_000, description="evaluate each so many rounds; 0 = only at the end")
    evaluate_after: bool = Field(False, description="also evaluate after local training, whatever the method says")
    local: bool = Field(
        default=True, description="find what each client reaches alone (acc.local), a second or two for each"
    )
    keep_every: int = Field(
        0, ge=0, le=1_000_000, description="keep the states of every so many rounds, for 'headwater analyze'; 0 = last"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    precision: Precision = Field("float32", description=PRECISION)
    threads: int = Field(
        1, ge=0, le=256, description="torch threads of a worker; 0 = torch's own choice; only 1 is repeatable"
    )
    engine: EngineName | None = Field(
        None,
        description="serial: one client after another; pool: worker processes; ray: workers on a cluster; stacked: "
        "many clients in one pass, equal up to rounding; fastest: serial, pool or stacked, by a short trial; default: "
        "serial or pool, whichever suits the machine",
    )
    workers: int | None = Field(
        None, ge=1, le=1024, description="workers of pool and ray; default: the cores of machine or cluster"
    )
    max_memory: str | None = Field(
        None,
        pattern=r"^[0-9]{1,9}(\.[0-9]{1,3})? ?[MG]B$",
        description="the most memory of all processes together, such as 8GB: fewer workers where it is too little, and "
        "a stop that can be resumed before it is reached; default: what is available",
    )
    address: str | None = Field(
        None,
        min_length=1,
        max_length=300,
        description="ray: a running cluster, HOST:PORT or auto; default: a new one on this machine",
    )

    stacked_always: bool = Field(
        False, description="stacked: train in one pass even where a trial finds one after another faster"
    )

    name: str = Field("", max_length=200, description="what the run is called in logs and on its page")
    tags: dict[Annotated[str, Field(min_length=1, max_length=100)], str] = Field(
        default_factory=dict, max_length=100, description="a tag of the run, kept in its summary and logs"
    )
    note: str = Field("", max_length=10_000, description="what is to be remembered of the run, for its page and logs")
    log: tuple[str, ...] = Field(
        (),
        max_length=20,
        description="also log to csv, jsonl, parquet, tensorboard, mlflow or wandb, with :FOLDER or :ADDRESS behind it",
    )

    @field_validator("tags", mode="before")
    @classmethod
    def _tags_are_text(cls, value: Any) -> Any:
        """Return tags whose values are text: ``--tag trial=3`` and a number in a file mean the same."""
        if not isinstance(value, dict):
            return value
        return {name: tag if isinstance(tag, str) else json.dumps(tag) for name, tag in value.items()}

    @model_validator(mode="after")
    def _says_one_thing(self) -> Plan:
        # All mistakes at once, so that nobody mends them one by one.
        mistakes = [*self._mistakes_of_data(), *self._options_without_effect(), *self._mistakes_of_engine()]
        mistakes += self._mistakes_of_time()
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self

    def _mistakes_of_data(self) -> Iterator[str]:
        """Yield what contradicts itself in data, partition and selection."""
        rule = self.rule
        if rule in _OPTIONS_OF["alpha"] and self.alpha is None:
            yield f"partition {rule} needs alpha, for example --alpha 0.5"
        if len(set(self.data)) < len(self.data):
            yield "the same data source is given twice"
        if rule is None and "test_fraction" in self.model_fields_set:
            yield f"test_fraction = {self.test_fraction} has no effect on a saved partition"
        if len(self.data) > 1 and rule not in {"domains", None}:
            yield f"{len(self.data)} data sources, one after another are for --partition domains"
        if self.full_last_round and self.fraction == 1.0:
            yield "full_last_round has no effect where fraction is 1: all clients take part in each round"
        if self.fraction_max is not None and self.fraction_max < self.fraction:
            yield f"fraction from {self.fraction} to {self.fraction_max}: expected the smaller one first"

    def _options_without_effect(self) -> Iterator[str]:
        """Yield the options of partitions that this one does not use."""
        rule = self.rule
        where = "a saved partition" if rule is None else f"partition {rule}"
        for option, rules in _OPTIONS_OF.items():
            value = getattr(self, option)
            if value is not None and rule not in rules:
                yield f"{option} = {value} has no effect on {where} (only on {', '.join(rules)})"

    def _mistakes_of_engine(self) -> Iterator[str]:
        """Yield the options of engines that the chosen one does not use, or that contradict it."""
        has_no_workers = self.engine in {"serial", "stacked"}
        if has_no_workers and self.workers is not None:
            yield f"workers = {self.workers} has no effect on engine {self.engine} (only on pool and ray)"
        if self.address is not None:
            yield from self._mistakes_of_address(self.address)
        if self.engine == "stacked":
            if self.augment is not None:
                yield f"augment = {self.augment} with engine stacked, which trains on inputs as they are"
            if self.precision != "float32":
                precision = f"precision = {self.precision}"
                yield f"{precision} with engine stacked, which computes in float32; leave one of them out"
        elif self.stacked_always:
            yield f"stacked_always has no effect on engine {self.engine or 'pool'} (only on stacked)"

    def _mistakes_of_time(self) -> Iterator[str]:
        """Yield what contradicts itself in the order of updates."""
        if self.mode == "buffered":
            if self.speeds is None:
                yield "mode = buffered needs speeds, which say whose updates come first, for example --speeds pi4,pc"
            if self.head_clients:
                yield f"head_clients = {self.head_clients} with mode = buffered, in which all clients train"
        else:
            for option in ("buffer", "max_staleness"):
                if getattr(self, option) is not None:
                    yield f"{option} = {getattr(self, option)} has no effect on mode synchronous (only on buffered)"
        if self.speeds is not None and self.dropout:
            yield f"dropout = {self.dropout} with speeds: nobody knows how long a device was waited for that never came"

    def _mistakes_of_address(self, address: str) -> Iterator[str]:
        """Yield why a cluster's address cannot be used."""
        if self.engine != "ray":
            yield f"address = {address} has no effect on engine {self.engine or 'pool'} (only on ray)"
        if address.startswith("ray://"):
            yield f"address = {address} is one for Ray's remote client; run on a machine of the cluster, with auto"

    def new_clients_of(self, clients: Sequence[str]) -> tuple[str, ...]:
        """Return the clients that never train: the last ``new_clients``."""
        return tuple(clients[len(clients) - self.new_clients :])

    def head_clients_of(self, clients: Sequence[str]) -> tuple[str, ...]:
        """Return the clients without torch: the first ``head_clients``."""
        return tuple(clients[: self.head_clients])

    @property
    def method_name(self) -> str:
        """The method's name: where it comes from a file, that of its class in lower case."""
        return _name_of(self.method)

    @property
    def encoder_name(self) -> str | None:
        """The name of the encoder that was given."""
        return None if self.encoder is None else _name_of(self.encoder)

    @property
    def max_memory_bytes(self) -> int | None:
        """The bytes of ``max_memory``, 1 GB being 10^9; None where no limit is given."""
        if self.max_memory is None:
            return None
        number = self.max_memory[:-2].strip()
        unit = {"MB": 10**6, "GB": 10**9}[self.max_memory[-2:]]
        return round(float(number) * unit)

    @property
    def saved_partition(self) -> Path | None:
        """The file that holds the partition; None where a rule makes it."""
        if is_saved_partition(self.partition):
            return self.folder / Path(self.partition).expanduser()
        return None

    @property
    def weights_path(self) -> Path | None:
        """The file of the weights."""
        return None if self.weights is None else self.folder / bundle_path(self.weights.expanduser())

    @property
    def rule(self) -> str | None:
        """The rule that makes the partition; None where it comes from a file.

        Raises:
            UnknownName: no such rule; the nearest name is suggested.
        """
        if self.saved_partition is not None:
            return None
        from edge_agent.data import partition  # numpy, which a command that only shows its options does without

        partition.check_rule(self.partition)
        return self.partition

    def differences(self, now: Plan, but: Collection[str]) -> list[str]:
        """``name value, now value`` for each field that changes results and differs in plan ``now``, except ``but``."""
        left_out = {*HOW_NOT_WHAT, "folder", *but}
        differences = []
        for name in Plan.model_fields:
            before = getattr(self, name)
            after = getattr(now, name)
            if name not in left_out and before != after:
                differences.append(f"{name} {before}, now {after}")
        return differences

    def settings(self) -> dict[str, Any]:
        """Return what the partition depends on beside the data, as JSON for its file."""
        values = {name: getattr(self, name) for name in (*_OPTIONS_OF, "test_fraction", "validation", "seed")}
        return {name: value for name, value in values.items() if value is not None}

    def encoder_for(self, spec: InputSpec, rule: str) -> str:
        """Return the requested encoder, or one that suits the inputs; FedPAC's own for FedPAC's partition."""
        if self.encoder_name is not None:
            return self.encoder_name
        if not isinstance(spec, ImageInput):
            return "cnn1d"
        return "fedpac_cnn" if rule == "fedpac" else "small_cnn"

    def input_for(self, natural: InputSpec, rule: str) -> InputSpec:
        """Return the data's own input spec with the requested fields; FedPAC's normalisation for FedPAC's partition.

        Raises:
            ConfigError: Fields are unknown or impossible; the message lists all of them.
        """
        fields = natural.model_dump()
        if rule == "fedpac" and natural.channels == 1:
            fields |= FEDPAC_NORMALISATION
        for name, value in self.input.items():
            is_number_for_all_channels = name in {"mean", "std"} and isinstance(value, int | float)
            fields[name] = (value,) if is_number_for_all_channels else value
        try:
            return type(natural).model_validate(fields)
        except ValidationError as error:
            raise ConfigError("--input", mistakes_of(error, type(natural))) from error


def _name_of(part: str) -> str:
    """Return the name by which a method or an encoder is registered: of one from a file, that of its class."""
    if is_reference(part):
        return own_name(part.rpartition(":")[2])
    return part
