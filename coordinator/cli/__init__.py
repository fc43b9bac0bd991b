"""``headwater``: the commands of the data center and the workstation.

Each command is one module here. Errors of our tree become one message on stderr and their exit code; ``--json`` prints
one JSON object on stdout, and nothing else goes there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from edge_agent.errors import HeadwaterError, MissingCapability, UsageError, cause, without_home
from edge_agent.limits import limit_threads

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code (see `edge_agent.errors`), 130 after Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    limit_threads(spare_torch=True)  # numpy with one thread ends in the bits of worker processes
    try:
        _run(given)
    except SystemExit as end:
        if end.code == UsageError.exit_code and "--json" in given and not _is_by_command(end):
            _print_json("UsageError", "the command line is wrong; stderr says where", UsageError.exit_code)
        raise
    except HeadwaterError as error:
        sys.exit(_report(error, error.exit_code, as_json="--json" in given))
    except OSError as error:  # a full disk, a folder that may not be written: no traceback would say more
        sys.exit(_report(_in_words(error), HeadwaterError.exit_code, as_json="--json" in given))
    except RuntimeError as error:
        if (mistake := without_home(error)) is None:
            raise
        sys.exit(_report(mistake, mistake.exit_code, as_json="--json" in given))


def _run(given: list[str]) -> None:
    try:
        from .app import app
    except ImportError as error:
        module = (error.name or str(error)).partition(".")[0]
        if module in {"coordinator", "export", "edge_agent"}:
            raise  # not a package that is missing, but a mistake of ours
        raise MissingCapability.package(module, "coordinator", "this command") from error
    app(given, prog_name="headwater")


def _is_by_command(end: SystemExit) -> bool:
    """Whether a command has chosen its exit code itself, after it has printed its answer."""
    from typer import Exit

    return isinstance(end.__context__, Exit)


def _in_words(error: OSError) -> HeadwaterError:
    where = f"{error.filename}: " if error.filename is not None else ""
    return HeadwaterError(f"{where}{cause(error)}")


def _report(error: Exception, code: int, *, as_json: bool) -> int:
    print(f"headwater: {error}", file=sys.stderr)
    if as_json:
        _print_json(type(error).__name__, str(error), code)
    return code


def _print_json(kind: str, message: str, code: int) -> None:
    print(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}))
