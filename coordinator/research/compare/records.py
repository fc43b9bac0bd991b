"""What a comparison has found so far: the trials and the runs of each method, as ``comparison.json`` keeps them.

All accuracies are shares, 0..1. Whoever runs a comparison writes these records; tables, pages and plots are made of
them alone, so that they can be made again without a simulation.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from edge_agent.core.task import Frozen


class Trial(Frozen):
    """One choice of parameters of a method, scored on validation samples alone."""

    number: int = Field(ge=0, description="0: the defaults; all methods have the same number of trials")
    params: dict[str, Any] = Field(default_factory=dict, description="the parameters that the search has chosen")
    rounds: int = Field(ge=0, description="rounds that it was trained for; early stopping leaves some shorter")
    score: float | None = Field(None, description="mean over clients on their validation samples; None: it failed")
    failure: str = Field("", description="why it failed; empty: it did not")
    cpu_s: float = Field(0.0, ge=0, description="CPU seconds of all processes")
    seconds: float = Field(0.0, ge=0, description="seconds by the clock")


class ClientScore(Frozen):
    """The accuracy of one client on its own test samples, after the last round and after personalization."""

    id: str
    samples: int = Field(ge=0, description="number of its test samples")
    accuracy: float = Field(ge=0, le=1)


class SeedRun(Frozen):
    """One run of a method with one seed. Runs of all methods with the same seed have the same partition."""

    seed: int = Field(ge=0)
    params: dict[str, Any] = Field(default_factory=dict, description="parameters other than the method's defaults")
    clients: tuple[ClientScore, ...] = Field((), description="empty where the run failed")
    curve: tuple[tuple[float, float], ...] = Field(
        (), description="(rounds done, mean over clients) of the model that clients answer with"
    )
    bytes_up: int = Field(0, ge=0, description="of all rounds and clients")
    bytes_down: int = Field(0, ge=0, description="of all rounds and clients")
    cpu_s: float = Field(0.0, ge=0, description="CPU seconds of all processes")
    seconds: float = Field(0.0, ge=0, description="seconds by the clock")
    failure: str = Field("", description="why it failed; empty: it did not")
    folder: str = Field("", description="folder of the run, relative to that of the comparison")
    partition_hash: str = Field("", description="SHA-256 of who has which samples; equal for all methods of a seed")


class MethodRecord(Frozen):
    """A method of a comparison: its trials, and its runs on test samples."""

    name: str = Field(min_length=1, max_length=80, description="name of its row")
    method: str = Field(max_length=1000)
    trials: tuple[Trial, ...] = ()
    chosen: int | None = Field(None, description="number of the trial whose parameters the runs have; None: no trials")
    runs: tuple[SeedRun, ...] = Field((), description="with the chosen parameters, one for each seed")
    untuned: tuple[SeedRun, ...] = Field((), description="with the method's defaults, where those were asked for, too")
    footing: dict[str, str] = Field(
        default_factory=dict, description="what its runs rest on, such as 'optimizer' -> 'SGD, momentum 0.9'"
    )
    space: dict[str, str] = Field(default_factory=dict, description="parameter -> the values that were searched")
    note: str = Field("", description="what is special about its trials, such as fewer of them")


class Comparison(Frozen):
    """A comparison of methods on one task."""

    title: str
    data: tuple[str, ...]
    partition: str
    partition_settings: dict[str, Any] = Field(default_factory=dict)
    clients: int = Field(ge=1)
    rounds: int = Field(ge=1)
    seeds: tuple[int, ...]
    trials: int = Field(ge=0, description="trials of each method; 0: nothing was tuned")
    search: str = Field("", description="how parameters were searched, such as random; empty: nothing was tuned")
    command: str = Field("", description="the command that makes this comparison again")
    baseline: str = Field("local", description="the method that says which clients are hurt")
    methods: tuple[MethodRecord, ...]
    tune_seed: int | None = Field(None, ge=0, description="seed of all trials; None: nothing was tuned")
    validation: float | None = Field(
        None, gt=0, lt=1, description="share of training samples that trials are scored on"
    )
    has_untuned: bool = Field(False, description="whether runs with the methods' defaults were asked for, too")
    notes: tuple[str, ...] = Field((), description="what a reader has to know beside the numbers")
