"""Time and memory of a merge, by method, on models of real size.

Every merge runs in a process of its own, which imports everything first: seconds are
those of `run_merge` alone, memory is the peak of the process. Methods take turns, so
that a busy machine is unfair to none; ratios are of medians.

    python tests/benchmarks/merge_speed.py BASE EXPERT EXPERT [--repeats 3]

Experts may be `base+adapter` references; adapters are merged once, before the clock.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

import click

DENSITY = 0.2
METHODS = {
    "hi_merging": {},
    "task_arithmetic": {},
    "breadcrumbs": {"gamma": 0},
    "ties": {},
    "hi_merging, consensus: sum": {"consensus": "sum", "normalize": True},
    "hi_merging, scope: model": {"scope": "model"},
}


def main_merge(label: str, base: str, experts: tuple[str, ...], cache: str) -> None:
    """Merge once in this process and print its figures as JSON."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    from mergekit_himerging import method

    inside = 0.0
    merge_group = method.HiMerging.merge_group

    def timed(self, group, /, **parameters):
        nonlocal inside
        start = time.perf_counter()
        result = merge_group(self, group, **parameters)
        inside += time.perf_counter() - start
        return result

    method.HiMerging.merge_group = timed
    config = MergeConfiguration.model_validate(
        {
            "merge_method": label.partition(",")[0],
            "base_model": base,
            "models": [{"model": expert} for expert in experts],
            "parameters": {"weight": 0.5, "density": DENSITY, **METHODS[label]},
            "dtype": "float32",
        }
    )
    options = MergeOptions(
        lora_merge_cache=cache,
        lora_merge_dtype="float32",
        quiet=True,
        write_model_card=False,
    )
    for model in config.referenced_models():
        model.merged(cache_dir=cache, lora_merge_dtype="float32")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        run_merge(config, out, options)
        seconds = time.perf_counter() - start
    figures = {
        "seconds": seconds,
        "inside": inside,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "before": before / 1024,
    }
    click.echo(json.dumps(figures))


@click.command()
@click.argument("base")
@click.argument("experts", nargs=-1, required=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--only", "chosen", multiple=True, type=click.Choice(list(METHODS)))
@click.option("--cache", default=None, help="where merged adapters are kept")
@click.option("--child", default=None, hidden=True)
def main(
    base: str,
    experts: tuple[str, ...],
    repeats: int,
    chosen: tuple[str, ...],
    cache: str | None,
    child: str | None,
) -> None:
    """Merge EXPERTS into BASE by every method in turn and print medians and ratios."""
    if child is not None:
        main_merge(child, base, experts, str(cache))
        return
    folder = cache or tempfile.mkdtemp()
    figures = defaultdict(lambda: defaultdict(list))
    methods = list(chosen) or list(METHODS)
    # One merge that is not counted: files into the page cache, adapters merged.
    for label in [methods[0], *methods * repeats]:
        command = [sys.executable, __file__, base, *experts]
        output = subprocess.run(
            [*command, "--cache", folder, "--child", label],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        for name, value in json.loads(output.splitlines()[-1]).items():
            figures[label][name].append(value)
    figures[methods[0]] = {k: v[1:] for k, v in figures[methods[0]].items()}

    def median(label: str, name: str) -> float:
        return statistics.median(figures[label][name])

    click.echo(
        f"density {DENSITY}, float32, {len(experts)} experts, {repeats} runs each"
    )
    click.echo(
        f"{'method':28} {'seconds':>8} {'kernel':>7} {'peak MB':>8} "
        f"{'/ task_arithmetic':>18} {'/ ties':>7}"
    )
    for label in methods:
        ratios = [
            f"{median(label, 'seconds') / median(other, 'seconds'):.2f}"
            if other in methods
            else "-"
            for other in ("task_arithmetic", "ties")
        ]
        click.echo(
            f"{label:28} {median(label, 'seconds'):8.2f} "
            f"{median(label, 'inside'):7.2f} "
            f"{median(label, 'peak'):8.0f} {ratios[0]:>18} {ratios[1]:>7}"
        )


if __name__ == "__main__":
    main()
