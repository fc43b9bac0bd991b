"""The accuracy of the new devices of ``headwater demo`` on the starter encoder before anybody trains it further."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_agent.bundle.starter import NAME
from edge_agent.data.partition import own_samples
from edge_agent.heads import AUTO
from edge_agent.personal.fitting import FitOptions
from edge_agent.personal.personalize import personalize
from edge_agent.personal.personalizer import load_bundle, local_data
from edge_agent.personal.precision import open_encoder


def accuracies_on_starter(sources: Mapping[str, str], test_fraction: float, cache: Path) -> dict[str, float]:
    """Return device -> the accuracy, 0..1, of a head on the starter encoder, on the device's own held-out samples.

    A device without held-out samples has no accuracy and is left out.

    Args:
        sources: Device -> its data source, which is split as the device itself splits it.
        test_fraction: Share of the samples that is held out.
        cache: The folder into which the starter bundle is unpacked.
    """
    bundle = load_bundle(NAME, cache)
    task = bundle.manifest.task
    accuracies = {}
    for device, source in sources.items():
        data = local_data(source, test_fraction=test_fraction)
        samples = own_samples(data, device, task.input, task.class_names)
        encoder = open_encoder(bundle, "auto", samples[0])
        result = personalize(bundle, samples, encoder, FitOptions(AUTO))
        if result.scores.personal is not None:
            accuracies[device] = result.scores.personal
    return accuracies
