"""``headwater bench``."""
from __future__ import annotations
import typer
app = typer.Typer(help="Measure this machine: transport, rounds, devices.", no_args_is_help=True)
@app.command("transport")
def transport() -> None:
    """x"""
@app.command("round")
def round_() -> None:
    """x"""
