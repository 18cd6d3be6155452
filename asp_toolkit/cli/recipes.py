"""`asp recipe`: check, explain, schema, list."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asp_toolkit.cli.output import Json, Quiet, print_json, print_table, say
from asp_toolkit.errors import AspError, closest

if TYPE_CHECKING:
    from asp_toolkit.recipe import Recipe

app = typer.Typer(help="Check and explain recipes.", no_args_is_help=True)


@app.command()
def check(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a bundled one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values to set before checking.")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Name all that is wrong with a recipe, short of building its model; --json prints it with every default."""
    from asp_toolkit.recipe import load

    found = load(recipe, overrides or [])
    _check_names(found, recipe)
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        patterns = ", ".join(dict.fromkeys(rule.pattern for rule in found.prune.rules))
        told = f"{found.task.kind}, {found.task.model.name}, {found.train.epochs:g} epochs, {patterns}, "
        say(f"{recipe}: ok ({told}{' + '.join(found.export.formats) or 'no export'})", quiet)


def _check_names(recipe: Recipe, name: str) -> None:
    """Names that the schema cannot know without the code behind them."""
    from asp_toolkit.exporters import EXPORTERS
    from asp_toolkit.optimizers import optimizer_arguments
    from asp_toolkit.pruning import resolve_score

    for written in recipe.export.formats:
        if written not in EXPORTERS:
            raise AspError(f"{name} export.formats: unknown format '{written}'; {closest(written, EXPORTERS)}")
    for rule in recipe.prune.rules:
        resolve_score(rule.score)
    optimizer_arguments(recipe.train.optimizer)
    optimizer_arguments(recipe.retraining().optimizer)


@app.command()
def explain(
    key: Annotated[
        str | None, typer.Argument(help="A key, e.g. train or prune.rules.0.pattern; all by default.")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Every key of a recipe: type, default, meaning."""
    from asp_toolkit.recipe.explain import explain as rows_of

    rows = rows_of(key)
    if json:
        print_json(rows)
        return
    if quiet:
        return
    shown: list[tuple[str, ...]] = []
    where = ""
    for row in rows:
        if row.where != where:
            where = row.where
            if where:
                shown.append((f"with {where}",))
        shown.append((row.key, row.type, row.default, row.meaning))
    print_table(("key", "type", "default", "meaning"), shown)


@app.command()
def schema(
    out: Annotated[Path | None, typer.Option(help="Write it to this file.")] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """JSON Schema of a recipe, for editors that check YAML while you type."""
    from asp_toolkit.files import write_json
    from asp_toolkit.recipe.explain import json_schema

    found = json_schema()
    if out is not None:
        write_json(out, found)
        say(f"{out} written", quiet or json)
    if json or (out is None and not quiet):
        print_json(found)


@app.command("list")
def list_(quiet: Quiet = False, json: Json = False) -> None:
    """The recipes that come with the toolkit."""
    from asp_toolkit.recipe import bundled

    rows = [(name, _headline(file), file) for name, file in bundled().items()]
    if json:
        print_json([{"name": name, "about": about, "file": file} for name, about, file in rows])
    elif not quiet:
        print_table(("name", "about"), [(name, about) for name, about, _ in rows])


def _headline(file: Path) -> str:
    """The first comment of a recipe, up to its first full stop or line's end."""
    with file.open(encoding="utf-8") as lines:
        first = next(lines, "")
    return first.lstrip("# ").strip() if first.startswith("#") else ""
