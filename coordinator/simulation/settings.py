"""The further settings of `coordinator.simulate`, as type checkers and editors see them.

Made from the fields of `Plan` by tests/harness/reference.py; change them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict


class PlanSettings(TypedDict, total=False):
    """Settings of simulations that comparisons take as well; `Plan` has their limits, and says which go together."""

    paper: bool
    """parameters have the paper's values where our defaults differ; 'headwater methods NAME' shows."""

    paper_for: str | None
    """as paper, with the values for this data set, such as pacs, where the published ones differ."""

    alpha: float | None
    """small: few classes for each client (dirichlet, fedrir_dirichlet), most samples at few clients (quantity)."""

    size: int | None
    """samples of one client (iid, fedpac); default of fedpac: 600."""

    test_size: int | None
    """test samples of one client (fedpac); default: size."""

    starts: tuple[int, int] | None
    """sample of each class where fedpac's pointers start, training and test; default: 0, 0."""

    iid_share: float | None
    """share of a client's samples spread over all classes (fedpac); default: 0.2."""

    classes_each: int | None
    """classes of one client (pathological, fedrir_pathological); default: 2."""

    min_size: int | None
    """drawn again until every client has so many samples; default: 10, of fedrir_dirichlet 400."""

    test_fraction: float
    """share of each client's samples held out where the data have no test part."""

    fraction: float
    """share of the clients in a round."""

    fraction_max: float | None
    """draw the share for each round between fraction and this."""

    full_last_round: bool
    """all clients take part in the last round, whatever fraction says."""

    dropout: float
    """probability that a client of a round leaves, or trains and never delivers."""

    mode: Literal["synchronous", "buffered"]
    """buffered: a round closes with its first updates, those of slower devices count in later rounds; needs speeds."""

    buffer: int | None
    """updates that close a buffered round; default: 10, or all clients."""

    max_staleness: int | None
    """rounds after which a buffered update is given up; default: 10."""

    speeds: str | None
    """kinds of devices, drawn by the seed: profiles such as pi4,jetson, or a CSV file with name, seconds_per_sample,
    down_mbit_s, up_mbit_s; rounds then have simulated seconds."""

    head: str | None
    """head that new clients and clients without torch fit: a file name in edge_agent/heads, or auto for the best in
    cross-validation; default: the first of the method's."""

    encoder_params: Mapping[str, Any]
    """a keyword argument of the encoder."""

    weights: str | Path | None
    """the encoder's first weights: a safetensors file, such as ImageNet's, a bundle of the same encoder, or starter."""

    peft: str | None
    """what of the encoder learns and travels: lora, bn or last_block; default: all of it."""

    peft_params: Mapping[str, Any]
    """a parameter of peft, such as rank=8 of lora."""

    input: Mapping[str, Any]
    """a field of the input spec, such as mean=0.13 or height=32."""

    standardise: bool
    """mean and std of the inputs are those of the training samples."""

    augment: Literal["crop_flip", "flip_turn", "views"] | None
    """random views of images in training, whatever the method: crop_flip (a frame of 4 pixels), flip_turn (up to 30
    degrees), or views, those of contrastive learning."""

    evaluate_every: int
    """evaluate each so many rounds; 0 = only at the end."""

    evaluate_after: bool
    """also evaluate after local training, whatever the method says."""

    device: str
    """auto, cpu, cuda, cuda:1, mps."""

    precision: Literal["float32", "bfloat16"]
    """of training steps; bfloat16: mixed precision with float32 weights, only where a step, timed before the first one,
    is faster; results differ slightly."""

    threads: int
    """torch threads of a worker; 0 = torch's own choice; only 1 is repeatable."""

    workers: int | None
    """workers of pool and ray; default: the cores of machine or cluster."""

    max_memory: str | None
    """the most memory of all processes together, such as 8GB: fewer workers where it is too little, and a stop that can
    be resumed before it is reached; default: what is available."""

    stacked_always: bool
    """stacked: train in one pass even where a trial finds one after another faster."""


class Settings(PlanSettings, total=False):
    """All further settings of a simulation; `Plan` has their limits, and says which go together."""

    validation: float | None
    """evaluate on this share of the training samples; test samples stay unused."""

    new_clients: int
    """the last so many clients by name never train; after the run they fit a head: acc.new."""

    head_clients: int
    """the first so many clients by name are devices without torch, which take part where the method has a half for
    them; after the run they fit a head."""

    local: bool
    """find what each client reaches alone (acc.local), a second or two for each."""

    keep_every: int
    """keep the states of every so many rounds, for 'headwater analyze'; 0 = last."""

    engine: Literal["serial", "pool", "ray", "stacked", "fastest"] | None
    """serial: one client after another; pool: worker processes; ray: workers on a cluster; stacked: many clients in one
    pass, equal up to rounding; fastest: serial, pool or stacked, by a short trial; default: serial or pool, whichever
    suits the machine."""

    address: str | None
    """ray: a running cluster, HOST:PORT or auto; default: a new one on this machine."""

    name: str
    """what the run is called in logs and on its page."""

    tags: Mapping[str, Any]
    """a tag of the run, kept in its summary and logs."""

    note: str
    """what is to be remembered of the run, for its page and logs."""
