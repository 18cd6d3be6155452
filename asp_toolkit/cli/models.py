"""`asp prune`, `export`, `inspect`, `verify`, `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asp_toolkit.cli.output import Json, Quiet, print_json, print_table, say
from asp_toolkit.errors import AspError, closest

if TYPE_CHECKING:
    from asp_toolkit.patterns import Pattern
    from asp_toolkit.pruning import Rule
    from asp_toolkit.tasks.task import Task

Format = Annotated[
    str, typer.Option("--format", help="dense loads everywhere; packed is the small one, for N:M under any name.")
]
Out = Annotated[Path, typer.Option(help="Folder to write; replaced where it exists.")]
Globs = Annotated[list[str] | None, typer.Option(help="Layer names as globs, or layer types; may be repeated.")]
Trust = Annotated[bool, typer.Option("--trust", help="Import the code that the recipe inside an export folder names.")]


def prune(
    target: Annotated[
        str, typer.Argument(help="A recipe (its weights are pruned), or a folder saved by transformers.")
    ],
    out: Out,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Recipe values to set.")] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="2:4 (any N:M), '2:4 transposable', 'unstructured 0.9', 'unstructured 0.9 per row' or 'global', "
            "'block 16x16 0.8', 64:2:8 (V:N:M), or package.module:name. Default: the recipe's rules, or 2:4."
        ),
    ] = None,
    include: Globs = None,
    exclude: Globs = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="How much an entry matters: magnitude; taylor, movement, fisher or activation_norm, which need a "
            "recipe and its training data; or package.module:function. Default: the recipe's, or magnitude."
        ),
    ] = None,
    format: Format = "dense",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Prune trained weights once, without training, and export the result."""
    from asp_toolkit import pruning
    from asp_toolkit.cli.targets import open_target, statistics
    from asp_toolkit.exporters import check_place
    from asp_toolkit.exporters import export as write

    _check_format(format)
    check_place(out)
    opened = open_target(target, overrides or [])
    rules = _rules(opened.rules, pattern, include, exclude, score)
    stats = statistics(target, opened, rules)
    masks = pruning.prune(opened.model, rules=rules, stats=stats)
    folder = write(
        opened.model,
        masks,
        out,
        format,
        recipe=opened.recipe,
        save_with=opened.save_with,
        patterns=_patterns(rules),
    )
    if json:
        print_json({"folder": folder, "density": masks.density(), "skipped": dict(masks.skipped)})
    else:
        rows = [(name, masks.patterns[name], f"{density:.3f}", "") for name, density in masks.density().items()]
        rows += [(name, "", "", why) for name, why in masks.skipped.items()]
        if not quiet:
            print_table(("parameter", "pattern", "density", "skipped, because"), rows, right=("density",))
        say(f"{format} export: {folder}", quiet)


def _rules(
    given: Sequence[Rule],
    pattern: str | None,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    score: str | None,
) -> Sequence[Rule]:
    """The recipe's rules, or one of the options'; an option for the score goes with either."""
    from asp_toolkit.pruning import Rule

    if not given or any(option is not None for option in (pattern, include, exclude)):
        given = [Rule(include or ("*",), exclude or (), pattern or "2:4")]
    return given if score is None else [replace(rule, score=score) for rule in given]


def _patterns(rules: Sequence[Rule]) -> dict[str, Pattern]:
    """The rules' patterns by name: those that are not built in are known to whoever named them, not to a file."""
    from asp_toolkit.patterns import parse

    return {pattern.name: pattern for pattern in (parse(rule.pattern) for rule in rules)}


def _check_format(format: str) -> None:
    from asp_toolkit.exporters import EXPORTERS

    if format not in EXPORTERS:
        raise AspError(f"--format {format}: unknown format; {closest(format, EXPORTERS)}")


def export(
    folder: Annotated[Path, typer.Argument(help="A run folder or an export folder.")],
    out: Out,
    format: Format = "packed",
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write an export once more, in another format, and check it against the first: same outputs bit for bit."""
    from asp_toolkit.cli.runs import load, masks_of, open_run
    from asp_toolkit.exporters import check_place
    from asp_toolkit.exporters import export as write
    from asp_toolkit.files import new_folder
    from asp_toolkit.verification import same_outputs

    _check_format(format)
    check_place(out)
    opened = open_run(folder, trust)
    source = opened.exports.get("dense") or next(iter(opened.exports.values()))
    if out.resolve() == source.resolve():
        raise AspError(f"--out {out}: that is the export to read; name another folder")
    model = load(source, opened.task.build())
    masks, patterns = masks_of(source, model)
    batch = _batch(opened.task, 8)
    with new_folder(out) as part:  # what does not check out does not take the place of what is there
        write(model, masks, part, format, recipe=opened.recipe, save_with=opened.task.save_with, patterns=patterns)
        same_outputs(model, load(part, opened.task.build(), layers="sparse"), batch, opened.task.forward)
    if json:
        print_json({"folder": out, "format": format, "verified": True})
    else:
        say(f"{format} export: {out}, reloaded, same outputs bit for bit", quiet)


def inspect(
    target: Annotated[
        Path,
        typer.Argument(
            help="A .safetensors or .pt file, an export folder, a run folder, or a folder saved by transformers."
        ),
    ],
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Table of layers: shape, pattern held, density, bytes dense and packed, or why a layer was left dense."""
    from asp_toolkit import inspection
    from asp_toolkit.cli.runs import exports_of, is_run
    from asp_toolkit.report.wording import size_text

    rows = inspection.inspect(next(iter(exports_of(target).values())) if is_run(target) else target)
    totals = inspection.totals(rows)
    if json:
        print_json({"layers": rows, "totals": totals})
    elif not quiet:
        columns = ("parameter", "layer", "shape", "pattern", "density", "dense", "packed", "skipped, because")
        shown = [
            (
                row.name,
                row.layer,
                "x".join(map(str, row.shape)),
                row.pattern,
                f"{row.density:.3f}",
                size_text(row.bytes_dense),
                "" if row.bytes_packed is None else size_text(row.bytes_packed),
                row.skipped,
            )
            for row in rows
        ]
        print_table(columns, shown, right=("density", "dense", "packed"))
        say(
            f"\n{totals.pruned} of {totals.parameters} parameters hold a pattern; density {totals.density:.3f} in all, "
            f"{totals.density_pruned:.3f} of those; {size_text(totals.bytes_dense)} dense, "
            f"{size_text(totals.bytes_packed)} packed"
        )


def verify(
    folder: Annotated[Path, typer.Argument(help="An export folder, or a run folder (all its exports).")],
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Check hashes, structure, every pattern and every zero of an export; exit 1 where something is wrong."""
    from asp_toolkit import verification

    found = verification.verify(folder)
    if json:
        print_json(found)
    elif found.ok:
        say(f"{folder}: ok, {found.checked} parameters checked", quiet)
        for note in found.notes:
            say(f"  not checked: {note}", quiet)
    else:
        raise AspError(f"{folder} does not verify:\n" + "\n".join(f"  {problem}" for problem in found.problems))
    if not found.ok:
        raise typer.Exit(1)


def bench(
    folder: Annotated[Path, typer.Argument(help="A run folder or a packed export folder.")],
    sizes: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,32",
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; default: as torch is set.")] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Rounds per row; dense and sparse take turns in each.")] = 30,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure dense against sparse: latency and throughput on this machine, in one process, taking turns."""
    from asp_toolkit.bench import bench_export
    from asp_toolkit.cli.runs import load, open_run, sparse_layers

    wanted = _sizes(sizes)
    opened = open_run(folder, trust)
    packed = opened.exports.get("packed")
    if packed is None:
        raise AspError(
            f"{folder}: no packed export to measure; `asp export {folder} --format packed --out DIR` makes one"
        )
    dense = load(packed, opened.task.build(), layers="dense")
    sparse = load(packed, opened.task.build(), layers="sparse")
    if not sparse_layers(sparse):
        raise AspError(
            f"{packed}: no layer of this model has a sparse twin (Linear and Conv2d have), so there is nothing to "
            "measure beside the dense one"
        )
    rows = bench_export(dense, sparse, opened.task, wanted, threads=threads, rounds=rounds)
    if json:
        print_json(rows)
    elif not quiet:
        columns = ("batch", "dense ms", "sparse ms", "speed-up", "10% to 90% of rounds", "dense /s", "sparse /s")
        shown = [
            (
                row.batch,
                f"{row.dense_ms:.3f}",
                f"{row.sparse_ms:.3f}",
                f"{row.speedup:.2f}x",
                f"{row.speedup_p10:.2f}x to {row.speedup_p90:.2f}x",
                f"{row.dense_per_second:.0f}",
                f"{row.sparse_per_second:.0f}",
            )
            for row in rows
        ]
        print_table(columns, shown, right=columns[1:])
        if rows:
            backends = ", ".join(sorted(set(rows[0].backends.values()))) or "none told"
            one = rows[0]
            say(f"{one.hardware}, {one.threads} threads, {one.dtype}, torch {one.torch}; backends: {backends}")


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise AspError(f"--sizes {text}: expected whole numbers separated by commas, e.g. 1,32") from error
    if min(sizes) < 1:
        raise AspError(f"--sizes {text}: a batch has at least 1 sample")
    return sizes


def _batch(task: Task, size: int) -> Any:
    if not len(task.test):
        raise AspError("expected at least one test sample to compare outputs on, the recipe's data has none")
    return task.collate([task.test[i % len(task.test)] for i in range(size)])
