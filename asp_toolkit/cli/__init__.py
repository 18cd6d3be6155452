"""The command line: `asp`. Each command imports what it needs when it runs, so that `asp --help` answers at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from asp_toolkit import __version__
from asp_toolkit.cli import doctor, models, recipes, run
from asp_toolkit.errors import AspError

app = typer.Typer(
    name="asp",
    help="Train, prune to N:M sparsity, retrain, verify, export and measure PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"asp_toolkit {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("run")(run.run)
app.command("prune")(models.prune)
app.command("export")(models.export)
app.command("inspect")(models.inspect)
app.command("verify")(models.verify)
app.command("bench")(models.bench)
app.add_typer(recipes.app, name="recipe")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command line: 0 done, 1 refused or failed with one message on standard error, 2 wrong usage."""
    try:
        app(prog_name="asp")
    except (AspError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename or 'file system'}: {error.strerror}"
        print(f"error: {text}" if "\n" not in text else f"errors:\n{text}", file=sys.stderr)
        sys.exit(1)
