"""`asp prune`, `export`, `inspect`, `verify`, `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asp_toolkit.cli.output import Json, Quiet, print_json, print_table, say
from asp_toolkit.errors import AspError

if TYPE_CHECKING:
    from asp_toolkit.tasks.task import Task

Format = Annotated[str, typer.Option("--format", help="dense loads everywhere; packed is the small one.")]
Out = Annotated[Path, typer.Option(help="Folder to write; replaced where it exists.")]
Globs = Annotated[list[str] | None, typer.Option(help="Layer names as globs, or layer types; may be repeated.")]


def prune(
    target: Annotated[
        str, typer.Argument(help="A recipe (its weights are pruned), or a folder saved by transformers.")
    ],
    out: Out,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Recipe values to set.")] = None,
    pattern: Annotated[str | None, typer.Option(help="N:M; default: the recipe's rules, or 2:4.")] = None,
    include: Globs = None,
    exclude: Globs = None,
    score: Annotated[str, typer.Option(help="How much an entry matters.")] = "magnitude",
    format: Format = "dense",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Prune trained weights once, without training, and export the result."""
    from asp_toolkit import pruning
    from asp_toolkit.cli.targets import open_target
    from asp_toolkit.exporters import export as write

    opened = open_target(target, overrides or [])
    if pattern is None and include is None and exclude is None and opened.rules:
        masks = pruning.prune(opened.model, rules=opened.rules)
    else:
        masks = pruning.prune(opened.model, pattern or "2:4", include, exclude, score)
    folder = write(opened.model, masks, out, format, recipe=opened.recipe, save_with=opened.save_with)
    if json:
        print_json({"folder": folder, "density": masks.density(), "skipped": dict(masks.skipped)})
    else:
        rows = [(name, masks.patterns[name], f"{density:.3f}", "") for name, density in masks.density().items()]
        rows += [(name, "", "", why) for name, why in masks.skipped.items()]
        if not quiet:
            print_table(("parameter", "pattern", "density", "skipped, because"), rows, right=("density",))
        say(f"{format} export: {folder}", quiet)


def export(
    folder: Annotated[Path, typer.Argument(help="A run folder or an export folder.")],
    out: Out,
    format: Format = "packed",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write an export once more, in another format, and check it against the first: same outputs bit for bit."""
    from asp_toolkit.cli.runs import load, masks_of, open_run
    from asp_toolkit.exporters import export as write
    from asp_toolkit.verification import same_outputs

    opened = open_run(folder)
    source = opened.exports.get("dense") or next(iter(opened.exports.values()))
    if out.resolve() == source.resolve():
        raise AspError(f"--out {out}: that is the export to read; name another folder")
    model = load(source, opened.task.build())
    masks = masks_of(source, model)
    written = write(model, masks, out, format, recipe=opened.recipe, save_with=opened.task.save_with)
    again = load(written, opened.task.build(), layers="sparse")
    same_outputs(model, again, _batch(opened.task, 8), opened.task.forward)
    if json:
        print_json({"folder": written, "format": format, "verified": True})
    else:
        say(f"{format} export: {written}, reloaded, same outputs bit for bit", quiet)


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
    else:
        raise AspError(f"{folder} does not verify:\n" + "\n".join(f"  {problem}" for problem in found.problems))
    if not found.ok:
        raise typer.Exit(1)


def bench(
    folder: Annotated[Path, typer.Argument(help="A run folder or a packed export folder.")],
    sizes: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,32",
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; default: as torch is set.")] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Rounds per row; dense and sparse take turns in each.")] = 30,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure dense against sparse: latency and throughput on this machine, in one process, taking turns."""
    from asp_toolkit.bench import bench as measure
    from asp_toolkit.cli.runs import load, open_run

    opened = open_run(folder)
    packed = opened.exports.get("packed")
    if packed is None:
        raise AspError(
            f"{folder}: no packed export to measure; `asp export {folder} --format packed --out DIR` makes one"
        )
    dense = load(packed, opened.task.build(), layers="dense")
    sparse = load(packed, opened.task.build(), layers="sparse")
    rows = measure(
        dense,
        sparse,
        opened.task.forward,
        lambda size: _batch(opened.task, size),
        sizes=_sizes(sizes),
        threads=threads,
        rounds=rounds,
    )
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
    return task.collate([task.test[i % len(task.test)] for i in range(size)])
