"""The figures of a simulation by key, as ``result.json``, ``--json`` and ``SimulationResult.summary`` have them.

At run time all of these are plain dictionaries, as JSON gives them. The types are for readers and programs: an editor
completes their keys, and a type checker finds a wrong one.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

RESULT = "result.json"
"""File with all figures of a run that has finished, in the folder of a simulation."""

RoundScope: TypeAlias = Literal["global", "personal", "after"]
"""Scope of a round's accuracies: of the shared model, of personal models, and of these once more after training."""

EndScope: TypeAlias = Literal["global", "personal", "local", "new", "new_global"]
"""Scope of the accuracies after the last round: as of a round, of each client alone, and of clients that never train.
"""

BestScope: TypeAlias = Literal["global", "personal", "after", "new", "new_global"]
"""Scope of the best accuracies: of any round or of the end."""

ClientScore: TypeAlias = Literal["acc.local", "acc.global", "acc.personal"]
"""Name of a client's accuracy after the run."""


class Scores(TypedDict):
    """The accuracies of some clients on their own test samples, 0..1."""

    clients: float
    """How many clients there are, a whole number."""

    clients_mean: float
    """Mean over clients."""

    samples_mean: float
    """Mean over the test samples of all of them."""

    std: float
    """Standard deviation over clients."""

    worst10: float
    """Mean of the worst tenth of the clients."""


class BestScores(Scores):
    """The highest accuracies of a scope."""

    rounds_done: float
    """After how many rounds they were reached, a whole number."""


class SimulatedTime(TypedDict, total=False):
    """The simulated clock of a round."""

    simulated_s: float | None
    """When the round closed by the simulated clock, seconds; only where the speed of devices is simulated."""


class RoundFigures(SimulatedTime):
    """The figures of one round."""

    round: int
    """Its number, 1 and up."""

    seconds: float | None
    """How long it took; None: not recorded."""

    clients: int
    """Clients whose update counted."""

    acc: dict[RoundScope, Scores]
    """Accuracies of the model that its clients received; only of scopes that were evaluated."""

    loss: float | None
    """Mean of the clients' training losses; None: none reported one."""

    bytes_up: int | None
    """Bytes that clients sent."""

    bytes_down: int | None
    """Bytes that clients received."""


class EndFigures(TypedDict):
    """The figures after the last round and after personalizing."""

    rounds_done: int
    acc: dict[EndScope, Scores]
    """Accuracies of all clients; only of scopes that the method has."""


class FirstWeights(TypedDict):
    """The file that the encoder began with."""

    path: str
    sha256: str


class MemoryFigures(TypedDict):
    """Memory of all processes together, in bytes."""

    limit: int
    expected: int
    peak: int


class RunFigures(TypedDict):
    """What a run was, and what its clients have reached."""

    run_id: str
    name: str
    tags: dict[str, Any]
    note: str
    method: str
    params: dict[str, Any]
    """All parameters of the method, those that have their default included."""

    published: dict[str, Any]
    """Parameter -> its published value and who says it; only of runs that were to have the published ones."""

    data: list[str]
    task: dict[str, Any]
    weights: FirstWeights | None
    """The file that the encoder began with; None: it began with random weights."""

    partition: str
    partition_settings: dict[str, Any]
    partition_hash: str
    """SHA-256 of labels and rows of all clients (hex)."""

    scored_on: Literal["test", "validation"]
    """The samples that all accuracies are of."""

    clients: int
    new_clients: int
    """Clients that never train."""

    head_clients: int
    """Clients without torch."""

    scored_clients: int
    """Clients that train and have samples to be scored on."""

    fraction: float | list[float]
    """Share of the clients in a round, 0..1; two of them: drawn between these for each round."""

    dropout: float
    seed: int
    engine: str
    workers: int
    threads: int
    precision: str
    seconds: float
    """Seconds of all rounds."""

    rounds: list[RoundFigures]
    stopped: str | None
    """Why the run ended before its last round; None: it did not."""

    last: EndFigures
    local_models: str
    """The models that ``acc.local`` is of."""

    failed: dict[str, str]
    """Client -> why it is missing at the end."""

    warnings: list[dict[str, Any]]
    next_steps: list[dict[str, str]]
    """What can be tried next where clients are worse than alone."""

    encoder_sha256: str
    """SHA-256 of the shared encoder (hex); empty: the method shares none."""

    best: dict[BestScope, BestScores]
    """The highest means of all clients, chosen on the samples that ``scored_on`` names."""


class StackedFigures(TypedDict):
    """What engine ``stacked`` trained in one pass, and why not more."""

    jobs: int
    """Training jobs that were done in one pass with others."""

    of: int
    """All training jobs."""

    device: str
    because: str
    convolutions: str | None
    seconds_of_a_step: dict[str, float]
    """Way of computing -> seconds of a step of one client."""

    bits_of_serial: bool
    """Whether the results are those of engine ``serial`` bit for bit."""


class _HowComputed(TypedDict, total=False):
    memory_bytes: MemoryFigures
    """Only where the memory was limited."""

    engine_trial: dict[str, Any]
    """How the engine was chosen; only of engine ``fastest``."""

    stacked: StackedFigures
    """Only of engine ``stacked``."""


class EngineFigures(_HowComputed, total=False):
    """What an engine adds to the figures of a run."""

    workers: int
    """How many workers there were in the end."""


class Summary(RunFigures, _HowComputed, total=False):
    """All figures of a simulation, the content of ``result.json``."""

    start_s: float
    """Seconds until the engine could compute."""

    folder: str
    report: str
    """Path of the run's page."""

    curves: str
    """Path of the picture with the accuracies."""

    logs: list[dict[str, Any]]
    """What each log has of the run; only where it was logged."""


RowAccuracies = TypedDict(
    "RowAccuracies", {"acc.global": float, "acc.personal": float, "acc.after": float}, total=False
)
"""The accuracies of a round as a row of a table has them."""


class RoundRow(RowAccuracies, SimulatedTime):
    """One round as a row of a table: means over clients (0..1) as ``acc.global``, ``acc.personal``, ``acc.after``.

    ``loss``, ``seconds`` and bytes are those of `RoundFigures`. An accuracy that was not evaluated has no key.
    """

    round: int
    loss: float | None
    seconds: float | None
    bytes_up: int | None
    bytes_down: int | None
