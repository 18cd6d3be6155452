"""`asp run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from asp_toolkit.cli.output import Json, Quiet, console, print_json, say


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a bundled one (`asp recipe list`).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values to set, e.g. train.epochs=2.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME of the recipe.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete an earlier run in that folder, do not resume.")
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train, prune, retrain, verify, export and report. Repeating the command resumes a run that was stopped."""
    from asp_toolkit.report import table
    from asp_toolkit.workflow import run_recipe

    folder = out if out is not None else Path("runs") / Path(recipe).stem
    try:
        report = run_recipe(recipe, folder, overrides or [], quiet=quiet, fresh=fresh)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        raise typer.Exit(130) from None
    if json:
        print_json(report)
    elif not quiet:
        console().print(table(report))
        say(f"report: {folder / 'report.html'}")
