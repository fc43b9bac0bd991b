"""The command ``edge-agent``; the module of a command is imported only when that command is requested.

A command is a function of its arguments that returns an exit code. Its docstring is what ``--help`` shows, with the
example in the last block. ``add_COMMAND_arguments(parser)`` beside it adds its arguments. Results go to stdout,
everything else to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..core.errors import HeadwaterError, UsageError, cause, nearest, remedy, without_home
from ..core.limits import limit_threads
from ..core.logs import TEXT
from ..core.reading import Progress, shown_by
from ..version import __version__

COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("agent", "run", "run the agent: join a federation until stopped"),
    "enroll": ("enroll", "enroll", "make this device an agent of a federation"),
    "status": ("agent", "status", "show what the agent on this device does"),
    "fit": ("fit", "fit", "fit a personal head on local data"),
    "predict": ("predict", "predict", "classify inputs with a bundle and a head"),
    "serve": ("serve", "serve", "answer inputs over HTTP until stopped, with a page to look at"),
    "export": ("one_file", "export", "write a personal model as one ONNX file for any runtime"),
    "evaluate": ("evaluate", "evaluate", "score a saved head, or compare heads on local data"),
    "add": ("collect", "add", "add labelled samples of this device, and fit its head again"),
    "classes": ("collect", "classes", "list, rename, merge or remove this device's classes"),
    "import": ("bundles", "import_bundle", "install a bundle file into an agent's state folder"),
    "verify": ("bundles", "verify", "show who has signed a bundle file"),
    "rollback": ("bundles", "rollback", "return to the previous bundle, or to the previous head"),
    "pin": ("pin", "pin", "keep the bundle in use, whatever is released"),
    "unpin": ("pin", "unpin", "take releases again"),
    "relay": ("relay", "relay", "connect the agents of a site by one connection"),
    "privacy": ("privacy", "privacy", "list what leaves this device, and what stays"),
    "doctor": ("doctor", "doctor", "show what this device can do, and what is missing"),
}
"""Command -> (module in this folder, function, summary)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code: 0, else that of the error (see `core.errors`), 130 after Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run_command(given)
    except KeyboardInterrupt:  # also while modules are still loaded, which takes seconds on a small device
        return 130


def _run_command(given: Sequence[str]) -> int:
    """Run the command of a command line, and return its exit code; its errors become one message."""
    arguments = _parse(given)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if arguments.verbose else logging.WARNING,
        format=TEXT,
    )
    if arguments.command != "run":  # an agent's number of threads is in its configuration
        limit_threads(getattr(arguments, "threads", None))
    try:
        # An agent that runs for months reads its samples again and again, and its log has what matters of that.
        show = None if arguments.command == "run" else _show_reading
        with shown_by(show):
            return int(arguments.run(arguments))
    except HeadwaterError as error:
        return _report(error, as_json=arguments.json)
    except BrokenPipeError:
        # The reader of our output has seen enough; Python must not complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that may not be written: no traceback would say more
        where = f"{error.filename}: " if error.filename is not None else ""
        advice = f"; {todo}" if (todo := remedy(error)) else ""
        return _report(HeadwaterError(f"{where}{cause(error)}{advice}"), as_json=arguments.json)
    except RuntimeError as error:
        if (mistake := without_home(error)) is None:
            raise
        return _report(mistake, as_json=arguments.json)


def _show_reading(what: str) -> Progress:
    """Show how far reading is; what prints is loaded by the first source that is read."""
    from .output import reading

    return reading(what)


class _Parser(argparse.ArgumentParser):
    """A parser that states a mistake in one line, and as one JSON object where ``--json`` was given."""

    as_json = False
    command: _Parser | None = None
    """The parser of the requested command; only the program's own parser has one."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and where the options are explained to stderr; exit code 2."""
        if _Parser.as_json:
            print(json.dumps({"error": {"kind": "UsageError", "message": message, "exit_code": UsageError.exit_code}}))
        print(f"{self.prog}: {message}; '{self.prog} --help' explains the options", file=sys.stderr)
        sys.exit(UsageError.exit_code)

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """End the program because of arguments that this command does not take; similar options are named."""
        # Only flags are compared: a value may look like an option by chance.
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        hints = []
        for argument in unknown:
            name = argument.partition("=")[0]
            similar = nearest(name, options) if name.startswith("--") else None
            if similar is not None:
                hints.append(f", did you mean {similar}?")
        self.error(f"unknown arguments: {' '.join(unknown)}{''.join(hints)}")

    def unknown_options(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments that look like options of this command and are none."""
        known = {option for action in self._actions for option in action.option_strings}
        if "--" in arguments:
            arguments = arguments[: arguments.index("--")]
        return [word for word in arguments if word.startswith("--") and word.partition("=")[0] not in known]


def _parse(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of one command; a mistake is reported by the command's own parser, not by the program's."""
    parser = _parser(given)
    if not given:
        parser.print_help(sys.stderr)
        sys.exit(UsageError.exit_code)
    wanted = _wanted_command(given)
    if wanted is not None and wanted not in COMMANDS:
        similar = nearest(wanted, COMMANDS)
        hint = "" if similar is None else f", did you mean '{similar}'?"
        parser.error(f"no such command '{wanted}'{hint}")
    if parser.command is not None:  # before argparse, which would first miss what is misspelt here
        misspelt = parser.command.unknown_options(given[given.index(wanted) + 1 :])
        if misspelt:
            parser.command.refuse_unknown(misspelt)
    arguments, unknown = parser.parse_known_args(given)
    if unknown:
        command: _Parser = arguments.parser
        command.refuse_unknown(unknown)
    return arguments


def _wanted_command(given: Sequence[str]) -> str | None:
    """Return the first word that is no option; None where there is none."""
    return next((word for word in given if not word.startswith("-")), None)


def _parser(given: Sequence[str]) -> _Parser:
    _Parser.as_json = "--json" in given
    parser = _Parser(
        prog="edge-agent",
        description="Personal models on a device: an encoder from a bundle, and a head that is fitted and stays here.",
        epilog="example:\n  edge-agent fit --data images:photos --out my-head",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headwater {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    wanted = _wanted_command(given)
    for name, (module_name, function, summary) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name == wanted:
            module = importlib.import_module(f"{__name__}.{module_name}")
            run = getattr(module, function)
            about, _, example = inspect.cleandoc(run.__doc__ or "").partition("\nExample:\n")
            command.description = about.strip()
            command.epilog = f"example:\n{example}"
            getattr(module, f"add_{name}_arguments")(command)
            command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
            command.add_argument("-v", "--verbose", action="store_true", help="verbose logging on stderr")
            command.set_defaults(run=run, parser=command)
            parser.command = command
    return parser


def _report(error: HeadwaterError, *, as_json: bool) -> int:
    print(f"edge-agent: {error}", file=sys.stderr)
    if as_json:
        kind = type(error).__name__
        print(json.dumps({"error": {"kind": kind, "message": str(error), "exit_code": error.exit_code}}))
    return error.exit_code
