"""Measures of a run's features and models as in the papers: one JSON object, SVG charts, one page.

Keys of the object:

``subject``, ``kind`` (simulation, run or bundle), ``run_id``, ``method``, ``classes``, ``clients``, ``settings``: what
was analyzed, and how.

``rounds``: one object for each state that was saved, with the number of rounds done as ``round`` (0 for a bundle). The
object has these measures by kind of features (``encoder``, and what a method computes from them: ``projector``,
``specific``), each with its ``mean`` over clients and its values by client in ``clients``:

- ``separation``: class separation (DualFed, Fig. 5), see `measures.class_separation`;
- ``cka``: linear CKA of two clients' features of the same samples (DualFed, Fig. 6): ``mean`` over pairs, ``matrix``;
- ``before_after``: linear CKA of a client's encoder features and of the features that the method computes from them;
- ``sparsity``: share of components near 0 (FedPick, Fig. 2), see `measures.sparsity_ratio`;
- ``fisher``: mean Fisher score (FedPick, Fig. 9); of a method with a mask also that of ``relevant`` and ``irrelevant``
  features. ``infinite`` counts features that are left out of the mean.

It also has ``selection`` (mean of the mask; FedPick, Fig. 7), ``overlap`` of the clients' important features
(``by`` how often the mask picks them, or by Fisher score; FedPick, Fig. 10) and ``mixing`` (FedPAC). The latter has
``weights``, whose row i combines the classifiers for client i; ``same_group`` and ``own``, the mean share of a row
that is on the client's own group and on the client itself; and ``if_even``, which ``same_group`` would be if all
weights were equal.

``accuracy``: of the last state, scope -> ``clients`` -> ``all``, ``head``, ``tail`` and ``classes`` (RepPer, Fig. 5).
``probe``: accuracy of nearest neighbours on the features of highest Fisher score, by share kept (FedPick, Fig. 1).
``tsne``: points of some clients' features (FedPick, Fig. 8; DualFed, Fig. 4).
``communication``: bytes by round; ``targets``: the rounds and bytes until each accuracy was reached (DualFed, Table 8).
``left_out``: ``what`` could not be computed, and ``why``. Unknown values are null or absent.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.core.errors import UsageError, nearest

from ...state.journal_location import has_journal
from .settings import Location, Settings

if TYPE_CHECKING:
    import numpy as np

    from .targets import AnalysisTarget, FeatureView


__all__ = ["Location", "Settings", "analyze", "find"]


def find(location: Location, settings: Settings) -> AnalysisTarget:
    """Open the target at a location: a simulation, a coordinator's run, or a bundle.

    Raises:
        UsageError: Nothing there can be analyzed, or data are missing or too many.
        DataError: Data are not there, or do not fit.
        StateError: The target's files are damaged.
    """
    from .targets import BundleTarget, RunTarget

    path = Path(location.what).expanduser()
    # 1. The folder of a simulation, or of a run in it. It is a coordinator's state folder as well.
    simulation = _simulation_at(path)
    if simulation is not None:
        from .simulations import SimulationTarget  # needs torch

        return SimulationTarget.at(simulation, location.data)
    # 2. A state folder, or the folder of one of its runs.
    if has_journal(path):
        return RunTarget.at(path, None, location, settings)
    if _is_folder_of_run(path):
        return RunTarget.at(path.parent.parent, path.name, location, settings)
    # 3. A bundle.
    if _may_be_bundle(path):
        return BundleTarget.at(path, location, settings)
    # 4. A name without a path is that of a run in the state folder that was given.
    is_name_alone = not path.exists() and path.name == location.what
    if location.state is not None and is_name_alone:
        return RunTarget.at(location.state, location.what, location, settings)
    raise UsageError(_what_is_wrong_at(path))


def _may_be_bundle(path: Path) -> bool:
    """Return whether a path is a file, the folder of an installed bundle, or a folder with bundles."""
    return path.is_file() or (path / "manifest.json").is_file() or (path / "bundles").is_dir()


def _simulation_at(path: Path) -> Path | None:
    """Return the folder of the simulation at a path, or around the folder of its run; None where there is none."""
    if (path / "simulation.json").is_file():
        return path
    if _is_folder_of_run(path) and not has_journal(path):
        folder = path.parent.parent
        if (folder / "simulation.json").is_file():
            return folder
    return None


def _is_folder_of_run(path: Path) -> bool:
    """Return whether a path is STATE/runs/RUN of a state folder."""
    return path.parent.name == "runs" and has_journal(path.parent.parent)


def _what_is_wrong_at(path: Path) -> str:
    """Return why nothing can be analyzed at a path, with the nearest name beside it."""
    expected = "expected a simulation's folder, a coordinator's state folder, a run's name, or a bundle file"
    if path.exists():
        return f"{path} cannot be analyzed; {expected}"
    siblings = []
    if path.parent.is_dir():
        siblings = [entry.name for entry in path.parent.iterdir()]
    close = nearest(path.name, siblings)
    hint = ""
    if close:
        hint = f"did you mean '{path.parent / close}'? "
    return f"{path} does not exist; {hint}{expected}"


def analyze(
    target: AnalysisTarget, settings: Settings, watch: Callable[[str], object] = lambda _: None
) -> dict[str, Any]:
    """Return all that can be computed for ``target``, as one JSON object; ``watch`` receives the name of each step.

    Raises:
        DataError: No client has test samples.
        StateError: A checkpoint or client state is damaged.
    """
    from . import results

    left_out = target.left_out
    # 1. Measures of the clients' models after each round whose state was saved. Without samples there are no features.
    probe = target.probe(settings) if target.clients else None
    states = []
    views: list[FeatureView] = []
    for number in target.rounds:
        watch(f"state after round {number}")
        views = []
        if probe is not None:
            views = _finite_views(target, number, settings, probe)
        state = results.state_of(number, views, settings, left_out)
        mixing = target.mixing(number)
        if mixing is not None:
            state["mixing"] = results.mixing_body(mixing, target.groups())
        states.append(state)
    # 2. What only the last state has: accuracies by class, and drawings of features.
    result: dict[str, Any] = {
        "subject": target.name,
        "kind": target.kind,
        "run_id": target.run,
        "method": target.method,
        "classes": list(target.class_names),
        "clients": list(target.clients),
        "settings": settings.model_dump(mode="json"),
        "rounds": states,
        "accuracy": results.accuracies(views, target.class_names),
    }
    watch("features of highest Fisher score")
    result["probe"] = results.probe(views, len(target.class_names), settings, left_out)
    watch("t-SNE")
    result["tsne"] = list(results.drawings(views, settings, left_out))
    # 3. What the run cost, and what a reader may look for in vain.
    result["communication"] = results.communication(target.run, target.metrics(), settings.targets)
    if target.clients:
        reason = "updates of single clients are not saved, so there are no features before aggregation"
        left_out.note("sparsity before aggregation", reason)
    if not settings.targets and target.kind != "bundle":
        left_out.note("rounds and bytes to an accuracy", "no --target was given")
    return {**result, "left_out": left_out.body()}


def _finite_views(target: AnalysisTarget, number: int, settings: Settings, probe: np.ndarray) -> list[FeatureView]:
    """Return the views of those clients whose features after a round are finite numbers; the others are noted."""
    views = []
    for view in target.feature_views(number, settings, probe):
        if view.is_finite():
            views.append(view)
            continue
        reason = "its features hold NaN or infinity, training diverged"
        target.left_out.note(f"client {view.client} after round {number}", reason)
    return views
