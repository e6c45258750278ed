"""The command `mergekit-himerging`: parses, calls, prints; no logic.

Invariant: what MergeKit stands on takes seconds to import, so it is imported by the
commands that need it, when they run.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

import mergekit_himerging
from mergekit_himerging.files import write_text
from mergekit_himerging.plan import PLAN_FILE, Plan, read_plan

if TYPE_CHECKING:
    from mergekit.options import MergeOptions

ONLY_WRITING = (
    *("out_shard_size", "copy_tokenizer", "clone_tensors", "write_model_card"),
    *("safe_serialization", "async_write", "write_threads"),
)
"""Options of MergeKit that shape what `mergekit-yaml` writes: taken, and not shown."""


class OurCommand(click.Command):
    """A command that says in one sentence on stderr what a user can mend."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; with `-v` an error keeps its traceback."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, BrokenPipeError):
            raise
        except (ValueError, OSError) as error:
            if ctx.params.get("verbosity"):
                raise
            raise click.ClickException(str(error)) from error


class MergeCommand(OurCommand):
    """A command that takes MergeKit's options too, and gets them as one record."""

    _of_mergekit: tuple[click.Option, ...] = ()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own parameters, then MergeKit's."""
        if not self._of_mergekit:
            from mergekit.options import add_merge_options

            callback: Any = add_merge_options(_apply_options(self.callback))
            self._of_mergekit = tuple(reversed(callback.__click_params__))
            for option in self._of_mergekit:
                option.hidden = option.name in ONLY_WRITING
            self.params += self._of_mergekit
            self.callback = callback
        return super().get_params(ctx)

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """List the command's own options first."""
        every = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        own = [option for option in every if option not in self._of_mergekit]
        for title, options in (
            ("Options", own),
            ("Options of mergekit-yaml", self._of_mergekit),
        ):
            records = [option.get_help_record(ctx) for option in options]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record])


def _apply_options(command: Any) -> Callable[..., Any]:
    """Let logging level, seed and threads hold for the process, as MergeKit does."""

    def run(*, merge_options: Any, **own: Any) -> Any:
        merge_options.apply_global_options()
        return command(merge_options=merge_options, **own)

    return run


class Commands(click.Group):
    """All commands."""

    command_class = OurCommand


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
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


@main.command(cls=MergeCommand)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Where the merge will go.")
def check(recipe: Path, out: Path | None, merge_options: "MergeOptions") -> None:
    """Find everything that is wrong with RECIPE, then say what it will cost.

    \b
    mergekit-himerging check recipe.yml --out merged/

    No model is read whole; adapters are merged into their cache. Exit code 1 with all
    problems, one a line on stderr; else a table of block forwards, bytes, time and
    memory.
    """
    from mergekit_himerging import api

    report = api.check(recipe, merge_options, out=out)
    for line in report.warnings:
        click.echo(f"warning: {line}", err=True)
    for line in report.problems:
        click.echo(f"error: {line}", err=True)
    if report.problems:
        n = len(report.problems)
        raise click.ClickException(f"{n} problem{'s' if n > 1 else ''} in '{recipe}'")
    if report.cost is not None:
        click.echo(report.cost.describe())
    click.echo("no problems found")


@main.command(cls=MergeCommand)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Plan file to write."
)
def analyze(recipe: Path, out: Path, merge_options: "MergeOptions") -> None:
    """Measure the layers of RECIPE and write the plan, without merging.

    \b
    mergekit-himerging analyze recipe.yml --out plan.json
    mergekit-himerging show plan.json

    Put `plan: plan.json` under the recipe's `parameters` to merge by it.
    """
    from mergekit_himerging import api

    _check_out(out, recipe)
    plan = api.analyze(recipe, merge_options)
    write_text(out, plan.to_json())
    click.echo(f"plan written to {out}")


@main.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def show(plan: Path, as_json: bool) -> None:
    """Show what was measured and done; PLAN is a plan file or a merged folder.

    \b
    mergekit-himerging show merged/
    mergekit-himerging show plan.json --json | jq .summary
    """
    from mergekit_himerging.views.table import make_console, plan_as_json, render_plan

    found = _read_plan(plan)
    if as_json:
        click.echo(plan_as_json(found))
    else:
        make_console().print(render_plan(found))


@main.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Image to write; .png or .svg.",
)
def plot(plan: Path, out: Path) -> None:
    """Draw what was measured and done over the layers.

    \b
    mergekit-himerging plot merged/ --out layers.svg

    PLAN is a plan file or a merged folder. Needs the extra `plots`.
    """
    from mergekit_himerging.views.plot import draw_plan

    draw_plan(_read_plan(plan), out)
    click.echo(f"plot written to {out}")


@main.command(cls=MergeCommand)
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
def export(
    plan: Path, to: Any, out: Path, recipe: Path | None, merge_options: "MergeOptions"
) -> None:
    """Write a recipe with the plan's values for every layer; no data is needed then.

    \b
    mergekit-himerging export merged/ --to breadcrumbs --out plain.yml

    PLAN is a plan file or a merged folder. The models must be at hand.
    """
    from mergekit_himerging import api

    _check_out(out, plan, recipe)
    exported = api.export(_read_plan(plan), to, merge_options, recipe=recipe)
    write_text(out, exported.text)
    for note in exported.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"recipe written to {out}")


@main.command(cls=MergeCommand)
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
@click.option(
    "--objective",
    type=click.Choice(["mean", "worst"]),
    help="Of the tasks' recovered gains: their mean, or the worst task's; the recipe's "
    "own by default.",
)
def search(
    recipe: Path,
    out: Path,
    evaluations: int,
    grid: int,
    weights: str,
    objective: Any,
    merge_options: "MergeOptions",
) -> None:
    """Choose density and scale of every model on the calibration data of RECIPE.

    \b
    mergekit-himerging search recipe.yml --out tuned.yml
    mergekit-himerging search recipe.yml --out tuned.yml --evaluations 100

    One model at a time, coarse to fine; all merges of a round are scored in one pass
    over the layers, and no checkpoint is written.
    """
    from mergekit_himerging import api
    from mergekit_himerging.search import SearchSettings, write_recipe, write_table

    table = out.with_suffix(".csv")
    _check_out(out, recipe, table)
    _check_out(table, recipe)
    settings = SearchSettings(
        grid=grid,
        evaluations=evaluations,
        weights=_read_numbers(weights),
        objective=objective,
    )
    merge = api.plan_ours(recipe, merge_options)
    data = [f / task.calibration for task in merge.tasks for f in merge.folders]
    for path in (out, table):
        _check_out(path, *data)
    with _progress(merge_options, "searching") as progress:
        result = api.search(merge, settings=settings, progress=progress)
    write_text(table, write_table(result))
    write_text(out, write_recipe(merge, result, out.absolute().parent))
    start, best = result.trials[0], result.best
    click.echo(
        f"{result.what} {start.objective:.4f} as it was, {best.objective:.4f} tuned "
        f"({start.behind:+.4f} ± {start.behind_se:.4f}), of {len(result.trials)} "
        "merges, before any layer is treated"
    )
    click.echo(f"recipe written to {out}, all trials to {table}")


@main.command(cls=MergeCommand)
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
    help="TASK=MODEL: the model that was tuned for a task; may be repeated. Experts of "
    "a recipe are matched by the names of data up to the first dot.",
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
    merge_options: "MergeOptions",
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
    from mergekit_himerging import api
    from mergekit_himerging.evaluation.records import Settings
    from mergekit_himerging.evaluation.table import make_tables
    from mergekit_himerging.views.table import make_console

    if json_out is not None:
        files = _split_pairs(data, _split_data).values()
        _check_out(json_out, *map(Path, models), *map(Path, files))
    with _progress(merge_options, "evaluating") as say:
        found = api.evaluate(
            models,
            _split_pairs(data, _split_data),
            merge_options,
            base=base,
            experts=_split_pairs(experts, _split_expert),
            rows=rows,
            settings=Settings(generates=generate, max_new_tokens=max_new_tokens),
            allow_overlap=allow_overlap,
            keep_in=keep_in,
            progress=lambda model, task, done, total: say(
                done, f"{done} of {total}, '{model}' on '{task}'"
            ),
        )
    if json_out is not None:
        write_text(json_out, found.to_json())
    console = make_console()
    console.print(make_tables(found, width=console.width))
    if json_out is not None:
        click.echo(f"scores written to {json_out}")


def _split_pairs(
    items: Iterable[str], split: Callable[[str], tuple[str, str]]
) -> dict[str, str]:
    pairs = [split(item) for item in items]
    twice = [name for name, n in Counter(name for name, _ in pairs).items() if n > 1]
    if twice:
        raise click.ClickException(
            f"tasks must have names of their own, got '{twice[0]}' twice; "
            "write TASK=VALUE with another TASK"
        )
    return dict(pairs)


def _split_data(text: str) -> tuple[str, str]:
    """Split TASK=FILE; a file without a name is named after itself."""
    name, _, value = text.partition("=")
    is_named = bool(name and value) and not Path(text).exists()
    return (name, value) if is_named else (Path(text).stem, text)


def _split_expert(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not (name and value):
        raise click.ClickException(f"expert must be TASK=MODEL, got '{text}'")
    return name, value


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


def _check_out(out: Path, *inputs: Path | None) -> None:
    """Refuse to write over a folder, or over what the command reads."""
    if out.is_dir():
        raise click.ClickException(f"'{out}' must be a file to write, got a folder")
    if out.resolve() in {path.resolve() for path in inputs if path is not None}:
        raise click.ClickException(
            f"'{out}' must be a new file, got one that the command needs for itself; "
            "name another file"
        )


@contextmanager
def _progress(
    options: "MergeOptions", label: str
) -> Iterator[Callable[[int, str], None]]:
    """Say on stderr where a long command is."""
    if options.quiet:
        yield lambda calls, where: None
        return
    # Names may have brackets and colons that are no markup.
    with Console(stderr=True, markup=False, emoji=False).status(label) as status:

        def progress(calls: int, where: str) -> None:
            status.update(Text(f"{label}: {where}"))

        yield progress
