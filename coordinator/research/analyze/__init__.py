"""What a run's features and models are like, in the measures of the papers: one JSON object, pictures, one page.

Keys of the object:

``subject``, ``kind`` (simulation, run or bundle), ``run_id``, ``method``, ``classes``, ``clients``, ``settings``: what
was looked at, and how.

``rounds``: one object for each state that is there, ``round`` rounds done (a bundle's is called 0). In it, by kind of
features (``encoder``, and what a method makes of these: ``projector``, ``specific``), each with ``mean`` over clients
and ``clients``:

- ``separation``: class separation (DualFed, Fig. 5), see `measures.class_separation`;
- ``cka``: linear CKA of two clients' features of the same samples (DualFed, Fig. 6): ``mean`` over pairs, ``matrix``;
- ``before_after``: linear CKA of a client's encoder features and of those made of them;
- ``sparsity``: share of components near 0 (FedPick, Fig. 2), see `measures.sparsity_ratio`;
- ``fisher``: mean Fisher score (FedPick, Fig. 9), with a mask also of ``relevant`` and ``irrelevant`` features;
  ``infinite`` counts features that are left out of it;

and further ``selection`` (mean of the mask; FedPick, Fig. 7), ``overlap`` of important features between clients
(``by`` how often the mask picks them, or by Fisher score; FedPick, Fig. 10), ``mixing`` (FedPAC: ``weights``, row i
combines the classifiers for client i; ``same_group``, ``own``: mean shares of a row; ``if_even``: the former, were all
weights alike).

``accuracy``: of the last state, scope -> ``clients`` -> ``all``, ``head``, ``tail`` and ``classes`` (RepPer, Fig. 5).
``probe``: accuracy of nearest neighbours on the features of highest Fisher score, by share kept (FedPick, Fig. 1).
``tsne``: points of some clients' features (FedPick, Fig. 8; DualFed, Fig. 4).
``communication``: bytes, round by round; ``targets``: what each took (DualFed, Table 8).
``left_out``: ``what`` could not be said, and ``why``. What is not known is null or absent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edge_agent.errors import DataError

from . import views
from .states import communication, mixing_body, state_of
from .targets import Place, find
from .views import Look, Settings, Subject

__all__ = ["Place", "Settings", "analyze", "find"]


def analyze(subject: Subject, settings: Settings, watch: Callable[[str], object] = lambda _: None) -> dict[str, Any]:
    """Everything that can be said of ``subject``, as one JSON object; ``watch`` hears what is being looked at.

    Raises:
        DataError: no client has test samples.
        StateError: what was kept is damaged.
    """
    probe = _probe(subject, settings)
    states, looks = [], list[Look]()
    for number in subject.rounds:
        watch(f"state after round {number}")
        looks = _looks(subject, number, settings, probe) if probe is not None else []
        states.append({**state_of(number, looks, settings, subject.left_out), **_mixing(subject, number)})
    found = {
        "subject": subject.name,
        "kind": subject.kind,
        "run_id": subject.run,
        "method": subject.method,
        "classes": list(subject.class_names),
        "clients": list(subject.clients),
        "settings": settings.body(),
        "rounds": states,
        **_last(subject, looks, settings, watch),
        "communication": communication(subject.run, subject.metrics(), settings.targets),
    }
    return {**found, "left_out": _left_out(subject, settings)}


def _probe(subject: Subject, settings: Settings) -> np.ndarray | None:
    """What clients are compared on; None where nobody's samples are known.

    Raises:
        DataError: clients are known, and none of them has a test sample.
    """
    if not subject.clients:
        return None
    if not subject.tested():
        raise DataError(f"none of {len(subject.clients)} clients has test samples to look at; give more data")
    return subject.probe(settings)


def _looks(subject: Subject, number: int, settings: Settings, probe: np.ndarray) -> list[Look]:
    found = []
    for look in subject.looks(number, settings, probe):
        if look.is_finite():
            found.append(look)
        else:
            why = "its features hold NaN or infinity, training diverged"
            subject.left_out.note(f"client {look.client} after round {number}", why)
    return found


def _mixing(subject: Subject, number: int) -> dict[str, Any]:
    mixing = subject.mixing(number)
    return {} if mixing is None else {"mixing": mixing_body(mixing, subject.groups())}


def _last(subject: Subject, looks: list[Look], settings: Settings, watch: Callable[[str], object]) -> dict[str, Any]:
    """What is said of the last state only."""
    left_out = subject.left_out
    found: dict[str, Any] = {"accuracy": views.accuracies(looks, subject.class_names)}
    watch("features of highest Fisher score")
    found["probe"] = views.probe(looks, len(subject.class_names), settings, left_out)
    watch("t-SNE")
    found["tsne"] = list(views.drawings(looks, settings, left_out))
    return found


def _left_out(subject: Subject, settings: Settings) -> list[dict[str, str]]:
    if subject.clients:
        told = "updates of single clients are not kept, so features before aggregation are not to be had"
        subject.left_out.note("sparsity before aggregation", told)
    if not settings.targets and subject.kind != "bundle":
        subject.left_out.note("rounds and bytes to an accuracy", "no --target was given")
    return subject.left_out.body()
