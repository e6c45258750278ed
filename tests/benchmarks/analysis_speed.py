"""Time of the analysis: against a checkpoint per probe, and against bare arithmetic.

    python tests/benchmarks/analysis_speed.py BASE \
        EXPERT EXPERT.calibration.jsonl EXPERT EXPERT.calibration.jsonl \
        [--samples 16] [--density 0.2] [--resolve rules] [--accept-share 0]

Prints, from one run and net of imports:

- analysis: the whole of it, as `mergekit-yaml` runs it;
- bare, for the rules: the counted block and head calls, made directly on
  transformers' own modules with all weights in memory, and nothing else; with
  `--bare-share` below 1 only such a share of each layer's calls is made and the rest is
  multiplied;
- read: loading, pruning and merging every tensor once, as the analysis does;
- probe: writing one variant with MergeKit, loading it with transformers and scoring
  one task; a checkpoint per probe of the rules takes 4 * tasks * layers of these (two
  are timed, the rest is multiplication).

Adapters are merged before the clock. Every sample chooses, unless `--accept-share` says
otherwise; a probe is scored on all samples.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import click


def make_recipe(
    base: str,
    experts: dict[str, str],
    samples: int,
    density: float,
    resolve: str = "rules",
    accept_share: float = 0.0,
) -> dict[str, Any]:
    return {
        "merge_method": "hi_merging",
        "base_model": base,
        "models": [
            {
                "model": expert,
                "parameters": {
                    "weight": 0.5,
                    "density": density,
                    "calibration": str(Path(data).absolute()),
                    "samples": samples,
                },
            }
            for expert, data in experts.items()
        ],
        "parameters": {
            "resolve": resolve,
            "accept_share": accept_share,
            "guard": "report",
            **({"compare": "raw"} if resolve == "rules" else {}),
        },
        "dtype": "float32",
    }


class StopError(Exception):
    """Ends a merge after its analysis."""


@click.command()
@click.argument("base")
@click.argument("experts_and_data", nargs=-1, required=True)
@click.option("--samples", default=16, show_default=True)
@click.option("--density", default=0.2, show_default=True)
@click.option(
    "--resolve",
    type=click.Choice(["rules", "measured"]),
    default="rules",
    show_default=True,
)
@click.option("--accept-share", default=0.0, show_default=True)
@click.option("--bare-share", default=1.0, show_default=True)
@click.option("--probes/--no-probes", default=True, show_default=True)
@click.option("--cache", default=None, help="where merged adapters are kept")
def main(
    base: str,
    experts_and_data: tuple[str, ...],
    samples: int,
    density: float,
    resolve: str,
    accept_share: float,
    bare_share: float,
    probes: bool,
    cache: str | None,
) -> None:
    """Time the analysis of EXPERTS on their DATA."""
    import torch
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions
    from transformers import AutoModelForCausalLM

    from mergekit_himerging.analysis import session
    from mergekit_himerging.analysis.graph import PlannedWeights

    folder = Path(tempfile.mkdtemp())
    options = MergeOptions(
        lora_merge_cache=cache or str(folder / "adapters"),
        lora_merge_dtype="float32",
        quiet=True,
        write_model_card=False,
    )
    experts = dict(zip(experts_and_data[::2], experts_and_data[1::2], strict=True))
    recipe = make_recipe(base, experts, samples, density, resolve, accept_share)
    config = MergeConfiguration.model_validate(recipe)
    for model in config.referenced_models():
        model.merged(options.lora_merge_cache, lora_merge_dtype="float32")

    seen: dict[str, Any] = {}
    analyse = session._analyse

    def timed(context, skeleton, tasks, device, memory):
        seen.update(context=context, tasks=tasks, device=device)
        start = time.perf_counter()
        plan = analyse(context, skeleton, tasks, device, memory)
        seen.update(seconds=time.perf_counter() - start, plan=plan)
        raise StopError

    session._analyse = timed
    session.find_plan = lambda fingerprint: None
    try:
        run_merge(config, str(folder / "out"), options)
    except StopError:
        session._analyse = analyse
    n_layers = seen["plan"].n_layers
    choosing = [b for task in seen["tasks"] for b in task.choosing.batches]
    accepting = [b for task in seen["tasks"] for b in task.accepting.batches]
    batches = [*choosing, *accepting]
    n_tokens = sum(b.n_tokens for b in batches)
    n_cells = sum(b.input_ids.numel() for b in batches)
    click.echo(
        f"{n_layers} layers, {len(experts)} tasks, {samples} samples each: "
        f"{n_tokens} tokens ({n_cells} with padding), "
        f"{sum(b.n_targets for b in batches)} scored; torch threads "
        f"{torch.get_num_threads()}"
    )

    def clock(work) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    plain = seen["context"].resolve(None)
    weights = PlannedWeights(plain, plain, device=seen["device"], reference="full")

    def read_all() -> None:
        for front, model in (
            ("base", ""),
            ("merged", ""),
            *(("single", e) for e in experts),
        ):
            weights.load_outer(front, model)
        for layer in range(n_layers):
            weights.load(layer)

    read = clock(read_all)

    analysis = seen["seconds"]
    click.echo(f"analysis {analysis:8.2f} s")
    click.echo(f"read     {read:8.2f} s")
    bare = None
    if resolve == "rules":
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        bare = run_bare(model, choosing, n_layers, bare_share)
        click.echo(
            f"bare     {bare:8.2f} s   analysis / bare {analysis / bare:.2f}, "
            f"analysis / (bare + read) {analysis / (bare + read):.2f}"
        )
    else:
        click.echo(f"forwards {seen['plan'].steps[-1].forwards:8}")
    if not probes:
        return
    n_probes = 4 * len(experts) * n_layers
    for method in ("breadcrumbs", "hi_merging"):
        writer = {
            **recipe,
            "merge_method": method,
            "parameters": {"gamma": 0} if method == "breadcrumbs" else {},
            "models": [
                {"model": e, "parameters": {"weight": 0.5, "density": density}}
                for e in experts
            ],
        }
        written = MergeConfiguration.model_validate(writer)
        out = str(folder / method)
        write = clock(lambda w=written, o=out: run_merge(w, o, options))
        variants: list[Any] = []
        load = clock(
            lambda o=out, v=variants: v.append(
                AutoModelForCausalLM.from_pretrained(o, dtype=torch.float32).eval()
            )
        )
        score = clock(lambda v=variants: score_all(v[0], batches)) / len(experts)
        total = n_probes * (write + load + score)
        words = (
            f"probe by {method:11}: write {write:.2f} + load {load:.2f} + score "
            f"{score:.2f} s, times {n_probes} = {total:.0f} s (multiplied); "
            f"{total / analysis:.1f} times the analysis"
        )
        if bare is not None:
            predicted = total / (bare + read)
            reached = total / analysis / predicted
            words += f", predicted {predicted:.1f}, reached {reached:.0%}"
        click.echo(words)


def run_bare(model: Any, batches: list[Any], n_layers: int, share: float) -> float:
    """Time the counted calls: 4 l + 7 of block l, and the head for 4 L + 3 streams."""
    import torch

    blocks = model.model.layers
    seconds = 0.0

    def repeat(call: Any, count: int) -> Any:
        nonlocal seconds
        made = max(1, round(share * count))
        start = time.perf_counter()
        for _ in range(made):
            output = call()
        seconds += (time.perf_counter() - start) * count / made
        return output

    with torch.no_grad():
        for batch in batches:
            calls: list[Any] = []
            hooks = [
                block.register_forward_pre_hook(
                    lambda _, args, kwargs, calls=calls: calls.append((args, kwargs)),
                    with_kwargs=True,
                )
                for block in blocks
            ]
            model.model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                use_cache=False,
            )
            for hook in hooks:
                hook.remove()
            for layer, (args, kwargs) in enumerate(calls):
                block = blocks[layer]
                hidden = repeat(
                    lambda block=block, a=args, k=kwargs: block(*a, **k), 4 * layer + 7
                )
            targets = hidden[batch.target_rows, batch.target_positions]

            def read(targets=targets, ids=batch.target_ids) -> None:
                logits = model.lm_head(model.model.norm(targets))
                logits.gather(-1, ids[:, None])
                logits.logsumexp(-1)

            repeat(read, 4 * n_layers + 3)
    return seconds


def score_all(model: Any, batches: list[Any]) -> None:
    """Score every task once, as a probe would, the head only at the targets."""
    import torch

    with torch.no_grad():
        for batch in batches:
            hidden = model.model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                use_cache=False,
            ).last_hidden_state
            logits = model.lm_head(hidden[batch.target_rows, batch.target_positions])
            logits.log_softmax(-1)


if __name__ == "__main__":
    main()
