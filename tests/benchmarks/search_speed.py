"""Time of a search over density and scale, against a `mergekit-yaml` run per candidate.

    python tests/benchmarks/search_speed.py BASE \
        EXPERT EXPERT.calibration.jsonl EXPERT EXPERT.calibration.jsonl \
        [--samples 16] [--cache FOLDER]

Varies the first expert, from one run and with all samples choosing:

- grid: the whole 10 x 10 grid in one streamed pass;
- coarse: the default search, coarse to fine;
- separate: one `mergekit-yaml` process (two are timed), loading its output with
  transformers and scoring both tasks, times the candidates;
- predicted: the same over the counted work of a pass, each timed bare: one read, one
  ranking for all densities, and for every candidate one merge of each tensor by the
  kernel and one forward of each task by transformers.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml
from analysis_speed import make_recipe, score_all


def clock(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@click.command()
@click.argument("base")
@click.argument("experts_and_data", nargs=-1, required=True)
@click.option("--samples", default=16, show_default=True)
@click.option("--density", default=0.2, show_default=True)
@click.option("--weight", default=0.7, show_default=True)
@click.option("--full-grid/--no-full-grid", default=True, show_default=True)
@click.option("--cache", required=True, help="where merged adapters are kept")
def main(
    base: str,
    experts_and_data: tuple[str, ...],
    samples: int,
    density: float,
    weight: float,
    full_grid: bool,
    cache: str,
) -> None:
    """Time searches for the first of EXPERTS on all of their DATA."""
    import torch
    from mergekit.config import MergeConfiguration
    from mergekit.options import MergeOptions
    from transformers import AutoModelForCausalLM

    from mergekit_himerging import search
    from mergekit_himerging.analysis.candidates import score_merges
    from mergekit_himerging.analysis.graph import Cuts, load_inputs, merge_inputs
    from mergekit_himerging.analysis.session import make_replay, pick_device, read_data
    from mergekit_himerging.kernel import find_cuts_at
    from mergekit_himerging.planning import plan_recipe

    options = MergeOptions(
        lora_merge_cache=cache, lora_merge_dtype="float32", quiet=True
    )
    experts = dict(zip(experts_and_data[::2], experts_and_data[1::2], strict=True))
    recipe = make_recipe(base, experts, samples, density)
    for item in recipe["models"]:
        item["parameters"]["weight"] = weight
    config = MergeConfiguration.model_validate(recipe)
    for model in config.referenced_models():
        model.merged(cache, lora_merge_dtype="float32")
    merge = plan_recipe(config, options)
    device = pick_device(options)
    tasks = read_data(merge, device, accept_share=0.0)
    plain, cpu = merge.resolve(None), torch.device("cpu")
    model = tasks[0].settings.model
    batches = [batch for task in tasks for batch in task.choosing.batches]
    click.echo(
        f"{len(tasks)} tasks, {samples} samples each: "
        f"{sum(b.n_tokens for b in batches)} tokens "
        f"({sum(b.input_ids.numel() for b in batches)} with padding); torch threads "
        f"{torch.get_num_threads()}; '{model}' is varied"
    )

    def run(evaluations: int) -> tuple[float, Any]:
        cuts: Cuts = {}

        def score(choices: Any) -> Any:
            return score_merges(
                [search._apply(plain, choice) for choice in choices],
                tasks,
                make_replay(merge, device),
                device=device,
                memory=4 << 30,
                cuts=cuts,
            )

        found = search._Search([t.settings.model for t in tasks], score, is_raw=False)
        found.measure_references()
        found.try_all("", [{}])
        settings = search.SearchSettings(grid=10, evaluations=evaluations)
        seconds = clock(lambda: search._search_grid(found, model, settings))
        return seconds, found

    coarse, coarse_search = run(25)
    found = coarse_search.result()

    inputs = list(load_inputs(plain, cpu))
    read = clock(lambda: list(load_inputs(plain, cpu)))
    densities = [(index + 1) / 10 for index in range(10)]
    ranking = clock(
        lambda: [
            find_cuts_at(name, tuned, some.base, densities)
            for _, some in inputs
            for name, tuned in some.tuned.items()
        ]
    )
    cuts: Cuts = {}
    for tensor, found_inputs in inputs:
        merge_inputs(tensor, found_inputs, cuts)
    merging = clock(lambda: [merge_inputs(t, i, cuts) for t, i in inputs])

    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "recipe.yml", Path(folder) / "out"
        for item in recipe["models"]:
            for name in ("calibration", "samples"):
                item["parameters"].pop(name)
        path.write_text(yaml.safe_dump({**recipe, "parameters": {}}), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "mergekit.scripts.run_yaml", str(path), str(out)),
            *("--lora-merge-cache", cache, "--lora-merge-dtype", "float32", "--quiet"),
        ]
        write = min(clock(lambda: subprocess.run(command, check=True)) for _ in "ab")
        loaded: list[Any] = []
        load = clock(
            lambda: loaded.append(
                AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
            )
        )
        score_all(loaded[0], batches)
        forward = clock(lambda: score_all(loaded[0], batches))
    one = write + load + forward
    counted = read + ranking + 100 * (merging + forward)
    click.echo(
        f"separate: write {write:.2f} + load {load:.2f} + score {forward:.2f} = "
        f"{one:.2f} s, times 100 = {100 * one:.0f} s (multiplied)"
    )
    click.echo(
        f"counted: read {read:.2f} + ranking {ranking:.2f} + 100 * (merging "
        f"{merging:.2f} + score {forward:.2f}) = {counted:.0f} s"
    )
    click.echo(
        f"coarse: {coarse:.0f} s for {len(found.trials) - 1} merges, "
        f"{100 * one / coarse:.1f} times faster"
    )
    if not full_grid:
        return
    grid, grid_search = run(100)
    best = grid_search.result()
    choice = next(t for t in best.trials if t.choice == found.best.choice)
    click.echo(
        f"grid: {grid:.0f} s, {100 * one / grid:.1f} times faster; predicted "
        f"{100 * one / counted:.1f}, reached {counted / grid:.0%}"
    )
    click.echo(
        f"the coarse search's choice is behind the grid's best by {choice.behind:.4f} "
        f"± {choice.behind_se:.4f} of the gain (one standard error)"
    )


if __name__ == "__main__":
    main()
