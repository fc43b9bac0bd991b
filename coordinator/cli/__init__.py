"""``headwater``: the commands of the data center and the workstation.

Each command is one module here, imported only when it is requested. Errors of our tree become one message on stderr and
their exit code; ``--json`` prints one JSON object on stdout, and nothing else goes there.

Read `options` (options made from the configuration's models) and `output` (tables, JSON and messages) first. A command
computes nothing: it reads options, calls what does the work, and prints the result.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edge_agent import __version__
from edge_agent.core.errors import HeadwaterError, MissingCapability, UsageError, cause, without_home
from edge_agent.core.formats import printable
from edge_agent.core.limits import limit_threads

from ..shadowed import check_export

if TYPE_CHECKING:
    import typer

__all__ = ["COMMANDS", "GROUPS", "main"]

T = TypeVar("T")

GROUPS: dict[str, dict[str, str]] = {
    "Start here": {
        "demo": "Train, export and personalize here, in one to two minutes.",
        "simulate": "Run a method on many clients on this machine.",
        "doctor": "Check this machine and the way to the broker.",
    },
    "Run a federation": {
        "init": "Make a federation whose devices have certificates.",
        "serve": "Serve a federation until stopped.",
        "aggregate": "Take and sum updates of a part of the agents.",
        "enroll": "Make a token by which a device gets a certificate.",
        "run": "Start a run and follow it to its end.",
        "status": "Show runs, agents, and what the coordinator waits for.",
        "logs": "Show what happened in a run, and for whom it waited.",
        "cancel": "End a run for good, queued or under way.",
    },
    "Fleet and releases": {
        "web": "Show fleet, runs and releases in a browser.",
        "agents": "Show all agents or one; revoke or rename certificates.",
        "export": "Export a run's encoder as a bundle file.",
        "bundle": "Make a bundle of any network, without a run.",
        "release": "Create, promote, hold or roll back releases.",
        "keys": "Make, show and change release keys; sign bundles.",
    },
    "Research": {
        "methods": "List all methods, or show one of them.",
        "partition": "Divide data among clients, and save who has which rows.",
        "compare": "Compare methods: equal tuning, paired seeds.",
        "sweep": "Search a method's parameters on validation samples.",
        "reproduce": "Run the cells of a published table and compare.",
        "analyze": "Measure a run's features and models as the papers do.",
    },
    "Models and pictures": {
        "pretrain": "Train a warm start ahead, on one or several machines.",
        "report": "Write a run's page with tables and plots.",
        "gains": "Show what each run has brought over the one before.",
    },
    "Operator": {
        "sign": "Answer a device's request for a certificate in a file.",
        "password": "Create an agent's password and key of its commands.",
        "backup": "Copy the state folder, also while serving.",
        "prune": "Remove checkpoints and bundles of old runs.",
        "audit": "Check a run's journal, receipts and checkpoints.",
        "traces": "Send runs as traces to OpenTelemetry.",
        "plan": "Compute machines and limits of a fleet.",
        "bench": "Measure this machine: devices, rounds, simulations.",
    },
}
"""Title in ``headwater --help`` -> its commands -> their summaries. A command is also its module and function here."""

COMMANDS: dict[str, str] = {name: summary for group in GROUPS.values() for name, summary in group.items()}
"""Every command, in the order of the help -> its summary."""

RESEARCH = frozenset({"analyze", "bench", "compare", "reproduce", "sweep"})
"""Commands of the extra ``research``; only their modules import `coordinator.research`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code (see `edge_agent.core.errors`), 130 after Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    limit_threads(spare_torch=True)  # with one numpy thread, results equal those of worker processes bit for bit
    failure: HeadwaterError
    try:
        check_export()
        command_tree(given)(given, prog_name="headwater")
    except SystemExit as end:
        from typer import Exit

        is_by_command = isinstance(end.__context__, Exit)  # which has printed its result
        if end.code == UsageError.exit_code and "--json" in given and not is_by_command:
            _print_json("UsageError", "the command line is wrong; see stderr", UsageError.exit_code)
        raise
    except KeyboardInterrupt:  # while modules are loaded, which takes seconds; within a command typer does the same
        sys.exit(130)
    except HeadwaterError as error:
        failure = error
    except (OSError, RuntimeError, ModuleNotFoundError) as error:
        expected = _as_expected_failure(error, given)
        if expected is None:
            raise
        failure = expected
    else:
        return
    # Messages quote files of other people, whose characters must not control the terminal.
    lines = [printable(line) for line in str(failure).split("\n")]
    print("headwater: " + "\n".join(lines), file=sys.stderr)
    if "--json" in given:
        _print_json(type(failure).__name__, str(failure), failure.exit_code)
    sys.exit(failure.exit_code)


def command_tree(given: Sequence[str]) -> typer.Typer:
    """Return all commands: the one that ``given`` names with its options, the others as names and summaries only.

    Raises:
        MissingCapability: a package that the command needs is not installed.
    """
    try:
        import typer
        from typer.core import TyperCommand, TyperGroup

        app = typer.Typer(
            name="headwater",
            cls=_with_titles(_without_pydantic(TyperGroup)),
            help="The coordinator of Headwater: federated learning with on-device personalization. Devices run "
            "'edge-agent'.",
            epilog="Example: headwater demo",
            no_args_is_help=True,
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,  # plain help: the same on a terminal and in a pipe
            context_settings={"help_option_names": ["-h", "--help"]},
        )

        def root(
            *,
            _version: bool = typer.Option(
                False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
            ),
        ) -> None: ...

        app.callback()(root)
        requested = _requested_command(given)
        for name, summary in COMMANDS.items():
            if name != requested:
                app.command(name, help=summary)(_not_loaded)
                continue
            module = importlib.import_module(f".{name}", __name__)
            if hasattr(module, "app"):
                app.add_typer(module.app, name=name, short_help=summary)
            else:
                app.command(name, cls=_without_pydantic(TyperCommand), short_help=summary)(getattr(module, name))
    except ImportError as error:
        missing = _missing_package(error, given)
        if missing is None:
            raise
        raise missing from error
    return app


def _as_expected_failure(error: Exception, given: Sequence[str]) -> HeadwaterError | None:
    """Return our own error for one that a command may meet on a sound installation; None: a traceback is due."""
    if isinstance(error, OSError):  # a full disk, or a folder that may not be written: a traceback would say no more
        where = ""
        if error.filename is not None:
            where = f"{error.filename}: "
        return HeadwaterError(f"{where}{cause(error)}")
    if isinstance(error, ModuleNotFoundError):  # a package that the command imports only when it has work for it
        return _missing_package(error, given)
    if isinstance(error, RuntimeError):
        return without_home(error)
    return None


def _requested_command(given: Sequence[str]) -> str | None:
    """Return the command that the words of a command line name; None where they are options alone."""
    return next((word for word in given if not word.startswith("-")), None)


def _missing_package(error: ImportError, given: Sequence[str]) -> MissingCapability | None:
    """Return the error that names the extra of the requested command, which brings the package that was not found.

    Returns:
        None where a module of this project was not found: no package is missing, and a traceback says where.
    """
    package = (error.name or str(error)).partition(".")[0]
    if package in {"coordinator", "export", "edge_agent"}:
        return None
    extra = "coordinator"
    if _requested_command(given) in RESEARCH:
        extra = "research"
    return MissingCapability.package(package, extra, "this command")


class _Conversion:
    """Converts text, paths and flags, as typer's `RuntimeParam` does."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def coerce(self, value: Any, **_: object) -> Any:
        """Return the value for the command; None where none was given."""
        return None if value is None else self._kind(value)


class _UnlessDefault:
    """Leaves a parameter's default as it is; other values are for ``convert``, typer's own way."""

    def __init__(self, default: object, convert: Callable[[], Any]) -> None:
        self._default = default
        self._convert = convert

    def coerce(self, value: Any, **others: Any) -> Any:
        """Return the value for the command."""
        return value if value == self._default else self._convert().coerce(value, **others)


def _without_pydantic(base: type[T]) -> type[T]:
    """Return a kind of commands whose text, paths, flags and defaults are converted without pydantic.

    typer loads it even where no value is given, which takes as long as everything else that 'headwater status' does.
    """

    class Light(base):  # type: ignore[misc, valid-type]
        def get_params(self, ctx: Any) -> list[Any]:
            parameters: list[Any] = super().get_params(ctx)
            for parameter in parameters:
                kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
                if kind in {str, Path, bool}:
                    parameter.get_runtime_param = functools.partial(_Conversion, kind)
                elif hasattr(parameter, "get_runtime_param") and not callable(parameter.default):
                    converted = _UnlessDefault(parameter.default, parameter.get_runtime_param)
                    parameter.get_runtime_param = lambda converted=converted: converted
            return parameters

    return Light


def _with_titles(base: type[T]) -> type[T]:
    """Return a kind of groups whose help lists commands below the titles of `GROUPS`, and not as one long list."""

    class Titled(base):  # type: ignore[misc, valid-type]
        def format_commands(self, _ctx: Any, formatter: Any) -> None:
            # One width for all titles, so that the summaries stand below each other.
            width = max(len(name) for name in COMMANDS)
            for title, commands in GROUPS.items():
                rows = [(name.ljust(width), summary) for name, summary in commands.items()]
                with formatter.section(title):
                    formatter.write_dl(rows)

    return Titled


def _print_version(is_given: bool) -> None:
    if is_given:
        from typer import Exit

        print(f"headwater {__version__}")
        raise Exit


def _not_loaded() -> None:
    """Stand for a command that was not asked for."""


def _print_json(kind: str, message: str, code: int) -> None:
    print(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}))
