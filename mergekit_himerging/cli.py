"""The command `mergekit-himerging`: parses, calls, prints; no logic."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from mergekit.options import MergeOptions, add_merge_options
from rich.console import Console

import mergekit_himerging
from mergekit_himerging import api
from mergekit_himerging.files import write_text
from mergekit_himerging.plan import PLAN_FILE, Plan, read_plan

Command = TypeVar("Command", bound=Callable[..., Any])


def mendable(command: Command) -> Command:
    """Turn what a user can mend into one sentence on stderr and exit code 1."""

    @functools.wraps(command)
    def checked(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except click.ClickException:
            raise
        except (ValueError, OSError) as error:
            merge_options = options.get("merge_options")
            if merge_options is not None and merge_options.verbosity:
                raise
            raise click.ClickException(str(error)) from error

    return checked  # type: ignore[return-value]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mergekit_himerging.__version__)
def main() -> None:
    """See, steer and prove merges made with `merge_method: hi_merging`.

    \b
    mergekit-himerging check recipe.yml            what is wrong, what it will cost
    mergekit-yaml recipe.yml merged/               the merge itself, by MergeKit
    mergekit-himerging show merged/                which layers fought
    mergekit-himerging evaluate recipe.yml --data test.jsonl
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names may be in any script
            stream.reconfigure(errors="backslashreplace")


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Where the merge will go.")
@add_merge_options
@mendable
def check(recipe: Path, out: Path | None, merge_options: MergeOptions) -> None:
    """Find everything that is wrong with RECIPE, then say what it will cost.

    \b
    mergekit-himerging check recipe.yml --out merged/

    Nothing is merged and no model is read whole. Exit code 1 with all problems, one a
    line on stderr; else a table of block forwards, bytes, time and memory.
    """
    report = api.check(recipe, merge_options, out=out)
    for line in report.problems:
        click.echo(f"error: {line}", err=True)
    if report.problems:
        n = len(report.problems)
        raise click.ClickException(f"{n} problem{'s' if n > 1 else ''} in '{recipe}'")
    if report.cost is not None:
        click.echo(report.cost.describe())
    click.echo("no problems found")


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Plan file to write."
)
@add_merge_options
@mendable
def analyze(recipe: Path, out: Path, merge_options: MergeOptions) -> None:
    """Measure the layers of RECIPE and write the plan, without merging.

    \b
    mergekit-himerging analyze recipe.yml --out plan.json
    mergekit-himerging show plan.json

    Put `plan: plan.json` under the recipe's `parameters` to merge by it.
    """
    _refuse_folder(out)
    plan = api.analyze(recipe, merge_options)
    write_text(out, plan.to_json())
    click.echo(f"plan written to {out}")


@main.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
@mendable
def show(plan: Path, as_json: bool) -> None:
    """Show what was measured and done; PLAN is a plan file or a merged folder.

    \b
    mergekit-himerging show merged/
    mergekit-himerging show plan.json --json | jq .summary
    """
    from mergekit_himerging.views.table import plan_as_json, render_plan

    found = _read_plan(plan)
    if as_json:
        click.echo(plan_as_json(found))
    else:
        _console().print(render_plan(found))


@main.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Image to write; .png or .svg.",
)
@mendable
def plot(plan: Path, out: Path) -> None:
    """Draw contributions, conflicts and treatments over the layers.

    \b
    mergekit-himerging plot merged/ --out layers.svg

    PLAN is a plan file or a merged folder. Needs the extra `plots`.
    """
    from mergekit_himerging.views.plot import draw_plan

    draw_plan(_read_plan(plan), out)
    click.echo(f"plot written to {out}")


@main.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--to",
    required=True,
    type=click.Choice(["hi_merging", "breadcrumbs"]),
    help="Method of the recipe; MergeKit has breadcrumbs without this package.",
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Recipe to write."
)
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Recipe that the plan is for; otherwise the one that the plan carries.",
)
@add_merge_options
@mendable
def export(
    plan: Path, to: Any, out: Path, recipe: Path | None, merge_options: MergeOptions
) -> None:
    """Write a recipe with the plan's values for every layer; no data is needed then.

    \b
    mergekit-himerging export merged/ --to breadcrumbs --out plain.yml

    PLAN is a plan file or a merged folder. The models must be at hand.
    """
    _refuse_folder(out)
    exported = api.export(_read_plan(plan), to, merge_options, recipe=recipe)
    write_text(out, exported.text)
    for note in exported.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"recipe written to {out}")


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Tuned recipe to write; all trials go beside it as CSV.",
)
@click.option(
    "--evaluations",
    default=25,
    show_default=True,
    help="Merges scored for each model; GRID x GRID tries the whole grid.",
)
@click.option(
    "--grid",
    default=10,
    show_default=True,
    help="Values of density and of scale, evenly up to 1.",
)
@click.option("--weights", default="", help="Weights to try too, such as 0.3,0.5,0.7.")
@add_merge_options
@mendable
def search(
    recipe: Path,
    out: Path,
    evaluations: int,
    grid: int,
    weights: str,
    merge_options: MergeOptions,
) -> None:
    """Choose density and scale of every model on the calibration data of RECIPE.

    \b
    mergekit-himerging search recipe.yml --out tuned.yml
    mergekit-himerging search recipe.yml --out tuned.yml --evaluations 100

    One model at a time, coarse to fine; all merges of a round are scored in one pass
    over the layers, and no checkpoint is written.
    """
    from mergekit_himerging.search import SearchSettings, write_recipe, write_table

    _refuse_folder(out)
    settings = SearchSettings(
        grid=grid, evaluations=evaluations, weights=_read_numbers(weights)
    )
    merge = api.plan(recipe, merge_options)
    with _progress(merge_options, "searching") as progress:
        result = api.search(merge, settings=settings, progress=progress)
    table = out.with_suffix(".csv")
    write_text(table, write_table(result))
    write_text(out, write_recipe(merge, result))
    start, best = result.trials[0], result.best
    what = "mean score" if best.gains is None else "mean recovered gain"
    click.echo(
        f"{what} {start.objective:.4f} as it was, {best.objective:.4f} tuned "
        f"(± {start.behind_se:.4f}), of {len(result.trials)} merges"
    )
    click.echo(f"recipe written to {out}, all trials to {table}")


@main.command()
@click.argument("models", nargs=-1, required=True)
@click.option(
    "--data",
    "data",
    multiple=True,
    required=True,
    help="Held-out file or hub dataset, as FILE or TASK=FILE; may be repeated.",
)
@click.option("--base", help="What the models were tuned from; a recipe knows.")
@click.option(
    "--expert",
    "experts",
    multiple=True,
    help="TASK=MODEL: the model that was tuned for a task; may be repeated.",
)
@click.option("--rows", type=int, help="Rows of each task at most, a seeded choice.")
@click.option(
    "--generate/--no-generate",
    default=True,
    show_default=True,
    help="Generate free answers, for exact match, ROUGE and BLEU.",
)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option(
    "--allow-overlap", is_flag=True, help="Score rows that calibrated a merge, too."
)
@click.option(
    "--json", "json_out", type=click.Path(path_type=Path), help="JSON file to write."
)
@click.option(
    "--keep-in",
    type=click.Path(path_type=Path),
    help="Folder for what is done; the same command goes on from it.",
)
@add_merge_options
@mendable
def evaluate(
    models: tuple[str, ...],
    data: tuple[str, ...],
    base: str | None,
    experts: tuple[str, ...],
    rows: int | None,
    generate: bool,
    max_new_tokens: int,
    allow_overlap: bool,
    json_out: Path | None,
    keep_in: Path | None,
    merge_options: MergeOptions,
) -> None:
    """Score recipes and models side by side on data that no merge has seen.

    \b
    mergekit-himerging evaluate recipe.yml --data test.jsonl
    mergekit-himerging evaluate merged/ other-merge/ --base org/base \\
        --expert medical=org/expert --data medical=test.jsonl --json scores.json

    MODELS are recipes (.yml), folders or hub ids. A recipe brings its base and experts,
    and is merged in memory. Loss, accuracy of choices, exact match, ROUGE and BLEU with
    95 % intervals, recovered gain, paired differences, forgetting.
    """
    from mergekit_himerging.evaluation.records import Settings
    from mergekit_himerging.evaluation.table import make_tables

    if json_out is not None:
        _refuse_folder(json_out)
    with _progress(merge_options, "evaluating") as say:
        found = api.evaluate(
            models,
            dict(_split_pair(item) for item in data),
            merge_options,
            base=base,
            experts=dict(_split_pair(item, needs_name=True) for item in experts),
            rows=rows,
            settings=Settings(generates=generate, max_new_tokens=max_new_tokens),
            allow_overlap=allow_overlap,
            keep_in=keep_in,
            progress=lambda model, task, done, total: say(
                done, f"{done} of {total}, '{model}' on '{task}'"
            ),
        )
    console = _console()
    console.print(make_tables(found, width=console.width))
    if json_out is not None:
        write_text(json_out, found.to_json())
        click.echo(f"scores written to {json_out}")


def _split_pair(text: str, *, needs_name: bool = False) -> tuple[str, str]:
    """Split TASK=VALUE; a file without a name is named after itself."""
    name, separator, value = text.partition("=")
    if separator and name and value:
        return name, value
    if needs_name:
        raise click.ClickException(f"expert must be TASK=MODEL, got '{text}'")
    return Path(text).stem, text


def _read_numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise click.ClickException(
            f"weights must be numbers with commas between, got '{text}'"
        ) from error


def _read_plan(path: Path) -> Plan:
    """Read a plan file, or that of a merged folder."""
    if path.is_dir():
        path = path / PLAN_FILE
        if not path.exists():
            raise click.ClickException(
                f"'{path.parent}' must hold {PLAN_FILE}, found none; merge into it "
                "with hi_merging and calibration data, or name a plan file"
            )
    return read_plan(path)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise click.ClickException(f"'{path}' must be a file to write, got a folder")


def _console() -> Console:
    """Make a console that is wide in a pipe, where nobody counts columns."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


@contextmanager
def _progress(
    options: MergeOptions, label: str
) -> Iterator[Callable[[int, str], None]]:
    """Say on stderr where a long command is."""
    if options.quiet:
        yield lambda calls, where: None
        return
    with Console(stderr=True).status(label) as status:

        def progress(calls: int, where: str) -> None:
            status.update(f"{label}: {where}")

        yield progress
