"""Peak memory of the analysis for models of 8, 16 and 32 layers of the same width.

    python tests/benchmarks/analysis_memory.py

Makes random Llamas, analyses a merge of two in a process of its own for each depth, and
prints the peak of what the process allocated (sampled; mapped pages of the checkpoints
are the system's to drop and stand beside it), the hidden states it held (counted) and
the difference. Flat means that the difference does not grow with depth.
"""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import click
import yaml

WIDTH = 512
DEPTHS = (8, 16, 32)


def make_models(folder: Path, n_layers: int) -> Path:
    """Write a base, two experts, their data and a recipe."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", *"abcdefghij "])}
    core = Tokenizer(models.WordLevel(words, "<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>")
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=n_layers,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    for name in ("a", "b", "base"):
        with torch.no_grad():
            for parameter in base.parameters():
                parameter += 1e-3 * torch.randn_like(parameter)
        base.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    row = {"prompt": "abc defg " * 4, "completion": "hij " * 4}
    rows = [{**row, "prompt": row["prompt"] + letter} for letter in "abcdefghij"]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    recipe = folder / "recipe.yml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "merge_method": "hi_merging",
                "base_model": str(folder / "base"),
                "models": [
                    {
                        "model": str(folder / name),
                        "parameters": {"calibration": str(data), "density": 0.2},
                    }
                    for name in ("a", "b")
                ],
                "parameters": {
                    "resolve": "rules",
                    "compare": "raw",
                    "accept_share": 0.0,
                },
                "dtype": "float32",
            }
        ),
        encoding="utf-8",
    )
    return recipe


def measure(recipe: str) -> None:
    """Analyse in this process and print peak and counted bytes as JSON."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    from mergekit_himerging.analysis import session, streams

    held = 0
    split = streams.split_jobs

    def counting(jobs, replay, memory):
        nonlocal held
        for chunk in split(jobs, replay, memory):
            size = replay.dtype.itemsize
            needed = sum(
                j.n_bytes(len(replay.blocks), replay.width, size) for j in chunk
            )
            held = max(held, needed)
            yield chunk

    streams.split_jobs = counting
    session.find_plan = lambda fingerprint: None
    config = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))
    # The merge itself is left out: it runs in MergeKit's own graph.
    analyse = session._analyse

    def stopping(*arguments):
        analyse(*arguments)
        raise KeyboardInterrupt

    session._analyse = stopping
    most = {"RssAnon": 0, "RssFile": 0}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            for line in lines:
                name = line.partition(":")[0]
                if name in most:
                    most[name] = max(most[name], int(line.split()[1]) * 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run_merge(
            MergeConfiguration.model_validate(config),
            str(Path(recipe).parent / "out"),
            MergeOptions(quiet=True),
        )
    except KeyboardInterrupt:
        done.set()
        watcher.join()
        click.echo(json.dumps({**most, "held": held}))


@click.command()
@click.option("--child", default=None, hidden=True)
def main(child: str | None) -> None:
    """Print the peak memory of an analysis by depth."""
    if child is not None:
        measure(child)
        return
    click.echo(f"width {WIDTH}, float32; MiB")
    heads = f"{'allocated':>10} {'hidden states':>14} {'rest':>8} {'mapped':>8}"
    click.echo(f"{'layers':>6} {heads}")
    for n_layers in DEPTHS:
        with tempfile.TemporaryDirectory() as folder:
            recipe = make_models(Path(folder), n_layers)
            output = subprocess.run(
                [sys.executable, __file__, "--child", str(recipe)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
        figures = json.loads(output.splitlines()[-1])
        peak, mapped, held = (
            figures[name] / 2**20 for name in ("RssAnon", "RssFile", "held")
        )
        click.echo(
            f"{n_layers:6} {peak:10.0f} {held:14.0f} {peak - held:8.0f} {mapped:8.0f}"
        )


if __name__ == "__main__":
    main()
