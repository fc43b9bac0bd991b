"""Samples by domain, from which int8 takes its ranges, and what it costs a domain that had no part in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from edge_agent import data
from edge_agent.bundle.manifest import DomainAnswers
from edge_agent.core.task import Task
from edge_agent.data import Samples
from edge_agent.personal.variants import MOST_LOSS, refitted_answers

from .parity import run
from .quantize import Quantizer, Ranges, merge_ranges

RANGE_INPUTS = 128
"""The number of inputs of all domains together from which ranges are taken."""

LEAST_RANGE_INPUTS = 8
"""The least inputs of one domain from which ranges are taken."""

_DOMAINS = 64
"""The most domains that are used."""

_TURNS = 8
"""The most times that int8 is made without some of the domains."""

_ANSWERS = 1600
"""The most answers that are compared, over all domains."""

LEAST_SAMPLES = 20
"""The least samples of a domain on which the accuracy of a fitted head says something."""


def domains_of(
    sources: Sequence[str], task: Task, folder: Path | None = None, *, labelled: bool | None = True
) -> dict[str, Samples]:
    """Return samples of data sources by domain: a source of several domains or people gives one for each of them.

    A relative path counts from ``folder``. ``labelled``: see `edge_agent.data.load`; samples without labels give ranges
    and compare nothing. Names are those of domains, people or files, without the path to them.

    Raises:
        HeadwaterError: See `edge_agent.data.load`.
    """
    parts: list[tuple[str, str]] = []
    for source in sources:
        parts += _parts_of(source, folder)
    # Names that occur twice, as of two folders, get a number.
    names = [name for name, _ in parts]
    samples = {}
    for number, (name, source) in enumerate(parts):
        label = name if names.count(name) == 1 else f"{name} {number}"
        samples[label[:64]] = data.load(source, task.input, task.class_names, folder=folder, labelled=labelled)
    return samples


def _parts_of(source: str, folder: Path | None) -> list[tuple[str, str]]:
    """Return name and source of each domain in a source, or of each person; of the source itself if it has neither."""
    domains = data.domains(source, folder=folder)
    if domains:
        return [*domains.items()]
    people = data.subjects(source, folder=folder)
    if people:
        return [(str(number), of_person) for number, of_person in people.items()]
    kind, where, _ = data.location(source, folder)
    return [(Path(where).name or kind, source)]


def choose_samples(domains: Mapping[str, Samples]) -> dict[str, Samples]:
    """Return the domains that are used, with evenly spread samples of each: sources list class after class."""
    names = spread_over([*domains])
    most = max(_ANSWERS // max(len(names), 1), RANGE_INPUTS)
    return {name: domains[name].take(_spread(len(domains[name]), most)).ready() for name in names}


def spread_over(names: Sequence[str]) -> list[str]:
    """Return at most 64 of these domains, evenly spread."""
    return [names[row] for row in _spread(len(names), _DOMAINS)]


def range_inputs(domains: Mapping[str, Samples]) -> dict[str, np.ndarray]:
    """Return the inputs (n, ...) float32 of each domain from which ranges are taken, equally many if possible."""
    most = max(LEAST_RANGE_INPUTS, -(-RANGE_INPUTS // max(len(domains), 1)))
    return {name: samples.inputs[_spread(len(samples), most)] for name, samples in domains.items()}


def compare_answers(
    quantizer: Quantizer, model: bytes, domains: Mapping[str, Samples], ranges: Mapping[str, Ranges]
) -> dict[str, DomainAnswers]:
    """Compare the answers of heads on ``domains``, each with an int8 variant whose ranges are those of the others.

    ``ranges`` are those of domains and clients by name. Domains with fewer than 20 samples, or of one class, answer
    nothing; the result is empty where none is left to take ranges from.
    """
    result: dict[str, DomainAnswers] = {}
    for turn in _turns([*domains]):
        other_ranges = [ends for name, ends in ranges.items() if name not in turn]
        if not other_ranges:
            continue
        int8 = quantizer.int8(merge_ranges(other_ranges))
        for name in turn:
            answers = _compare_on(domains[name], model, int8)
            if answers is not None:
                result[name] = answers
    return result


def _compare_on(samples: Samples, model: bytes, int8: bytes) -> DomainAnswers | None:
    """Return how heads answer on a domain with each graph; None where the domain is too small to tell anything."""
    if len(samples) < LEAST_SAMPLES or len(np.unique(samples.labels)) < 2:
        return None
    features = {"fp32": run(model, samples.inputs), "int8": run(int8, samples.inputs)}
    is_right = refitted_answers(features, samples)
    support = len(is_right["fp32"])
    if not support:
        return None
    return DomainAnswers(
        support=support,
        both=int((is_right["fp32"] & is_right["int8"]).sum()),
        fp32=int(is_right["fp32"].sum()),
        int8=int(is_right["int8"].sum()),
    )


def describe_loss(answers: Mapping[str, DomainAnswers]) -> str:
    """Return why int8 is not used: it loses more than noise explains on one domain or on all; empty: it is used."""
    judged = dict(answers)
    if len(answers) > 1:
        judged["all domains"] = sum(answers.values(), DomainAnswers(support=0, fp32=0, int8=0, both=0))
    losses: list[str] = []
    for name, domain in judged.items():
        if domain.loss - domain.noise > MOST_LOSS:
            points = f"{100 * domain.loss:.1f} ± {100 * domain.noise:.1f} points"
            losses.append(f"{name} {points} of {domain.support} answers")
    if not losses:
        return ""
    return f"heads lose more than {MOST_LOSS:.1%} on held-out domains: {'; '.join(losses)}"


def _turns(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the domains in at most eight parts, each of which is left out once."""
    for part in range(min(len(names), _TURNS)):
        yield names[part::_TURNS]


def _spread(count: int, most: int) -> np.ndarray:
    """Return at most ``most`` of ``count`` rows, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
