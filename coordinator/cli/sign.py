"""``headwater sign``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from edge_agent.core.errors import UsageError, cause
from edge_agent.core.storage import Access, read_regular, write_atomic

from .options import Config, Json, State
from .output import present, ready_for

Request = Annotated[Path, typer.Argument(metavar="FILE", help="What 'edge-agent enroll - --csr FILE' wrote.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="File for the answer.")]

WRITES = "'edge-agent enroll - --csr FILE' on the device writes one"


def sign(
    request: Request,
    out: Out = Path("answer.json"),
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Answer a request for a certificate in a file, for a device that does not reach the enrolment port.

    The request counts by its token, as one over the network does. The answer holds the key by which the device knows
    its coordinator's commands: remove it when the device has it.

    Example: headwater sign request.json --out answer.json
    """
    from edge_agent.core.task import parse_json
    from edge_agent.identity.certificates import show_utc
    from edge_agent.identity.enrolment_port import MAX_LINE_BYTES, CertificateRequest

    from .enroll import enrolment

    ready_for(out)
    issuer = enrolment(config, state)
    try:
        if request.stat().st_size > MAX_LINE_BYTES:
            raise ValueError(f"{request.stat().st_size} bytes")
        asked = CertificateRequest.model_validate(parse_json(read_regular(request)))
    except OSError as error:
        raise UsageError(f"{request}: {cause(error)}; {WRITES}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{request}: no request; {WRITES}") from error
    made = issuer.certify(asked)
    answer = issuer.answer(asked.name, made)
    write_atomic(out, json.dumps(answer).encode() + b"\n", access=Access.private())
    line = (
        f"{asked.name}: certificate until {show_utc(made.not_after)} for the key {made.key}, in {out}; on the device: "
        f"edge-agent enroll - --answer {out.name}"
    )
    present({"name": asked.name, "key": made.key, "until": made.not_after, "answer": str(out)}, [line], as_json=as_json)
