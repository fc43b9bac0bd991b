"""What tasks with a model have in common: the session with its client state, and what is refused before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.task import Tensors
from ...privacy.policy import UpdateFacts, check_job, check_tensors, check_update
from ...wire.messages.down import Job
from .purpose import Device

if TYPE_CHECKING:
    from ...client import ClientState, Session


def open_session(device: Device, job: Job, before_round: int) -> tuple[Session, ClientState]:
    """Open the session of a job's run and read the client state that the job starts from.

    Args:
        device: What the common part of the agent offers.
        job: The job.
        before_round: The newest state of an earlier round than this one is read.

    Returns:
        The session, and the client state; it is empty where the client has kept nothing.

    Raises:
        PrivacyRefused: the job asks for more than ``[privacy]`` lets out.
        DataError: the device's data do not fit the task.
        StateError: the newest client state is damaged.
    """
    session = device.session(job)
    files = device.resources.state_files(job.run)
    check_job(device.config.privacy, job, session.method.least_class_count)
    from ...client import ClientState
    from ...core.limits import keep_freed_memory

    keep_freed_memory()
    return session, ClientState(*files.before(before_round))


def check_announced(device: Device, job: Job, session: Session) -> None:
    """Refuse before the training what is known to be refused after it, by the names and shapes of the method.

    Raises:
        PrivacyRefused: the update would hold more than ``[privacy]`` lets out.
    """
    check_tensors(device.config.privacy, session.returned)
    facts = update_facts(device, job, session, {})
    if not facts.is_shipped:
        check_update(device.config.privacy, session.announced_extras(), facts)


def update_facts(device: Device, job: Job, session: Session, received: Tensors) -> UpdateFacts:
    """Return what the arrays of an update of this session are judged by.

    Args:
        device: What the common part of the agent offers.
        job: The job that the update is for.
        session: The session of its run.
        received: The tensors that the training starts from.
    """
    import numpy as np

    from ... import methods

    train, _ = device.read_samples(job.task)
    return UpdateFacts(
        method=job.method,
        is_shipped=methods.registry.is_shipped(job.method),
        declared_least=session.method.least_class_count,
        shared=frozenset(session.returned),
        model_shapes=session.model_shapes,
        features=session.features,
        class_counts=np.bincount(train.labels, minlength=job.task.num_classes),
        buffers=session.shared_buffers,
        received=received,
    )
