"""The command tree of ``headwater``."""

from __future__ import annotations

import typer

from edge_agent import __version__

from . import (
    analyze,
    bench,
    cancel,
    demo,
    doctor,
    enroll,
    export,
    methods,
    partition,
    report,
    reproduce,
    run,
    serve,
    simulate,
    status,
)

app = typer.Typer(
    name="headwater",
    help="Federated learning with on-device personalization: shared encoders flow down, personal heads stay at home.",
    epilog="Example: headwater demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: the same on a terminal and in a pipe
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version_wanted: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """The coordinator of Headwater; devices run 'edge-agent'."""


app.command("demo")(demo.demo)
app.command("serve")(serve.serve)
app.command("run")(run.run)
app.command("simulate")(simulate.simulate)
app.command("partition")(partition.partition)
app.command("reproduce")(reproduce.reproduce)
app.command("cancel")(cancel.cancel)
app.command("status")(status.status)
app.command("export")(export.export)
app.command("report")(report.report)
app.command("analyze")(analyze.analyze)
app.command("methods")(methods.methods)
app.command("enroll")(enroll.enroll)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")
