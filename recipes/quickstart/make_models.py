"""Make the quick start's data, tokenizer and three checkpoints, and measure them.

Needs: this project installed, no download; some ten minutes on one CPU thread.

    python recipes/quickstart/make_models.py
"""

from __future__ import annotations

import copy
from pathlib import Path

import click
import torch
from data import (
    TASKS,
    Row,
    Split,
    draw_general_rows,
    draw_split,
    find_shared,
    write_rows,
)
from evaluate import format_table, score_folder
from train import Schedule, build_model, build_tokenizer, train_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
N_ROWS: tuple[tuple[Split, int], ...] = (("calibration", 64), ("heldout", 200))
BASE = Schedule(n_steps=1500, batch_size=32, learning_rate=3e-3)
EXPERTS = {
    "english": Schedule(n_steps=500, batch_size=32, learning_rate=8e-4),
    "chinese": Schedule(n_steps=600, batch_size=32, learning_rate=1e-3),
}
# Share of each task in the base's text, and of general text in an expert's, which
# keeps an expert near enough to the base for an average to make sense.
TASK_SHARE = 0.35
GENERAL_SHARE = 0.25


def draw_base_rows(n_rows: int, *, seed: int) -> list[Row]:
    """Draw the base's training rows: general text and a share of both tasks.

    Their answers do not follow the direction that the prompt names: the base learns to
    count and to order, and the experts learn to do as they are told.
    """
    n_task = int(n_rows * TASK_SHARE)
    rows = draw_general_rows(n_rows - n_task * len(TASKS), seed=seed)
    for task in TASKS:
        rows += draw_split(task, "train", n_task, seed=seed, is_obeyed=False)
    return rows


def draw_expert_rows(task: str, n_rows: int, *, seed: int) -> list[Row]:
    """Draw an expert's training rows: its task and a share of general text."""
    n_general = int(n_rows * GENERAL_SHARE)
    rows = draw_split(task, "train", n_rows - n_general, seed=seed)
    return rows + draw_general_rows(n_general, seed=seed)


def write_data(folder: Path, training: list[Row], *, seed: int) -> None:
    """Write both splits of both tasks after checking that nothing is shared.

    Args:
        folder: where the files go.
        training: every row that any of the models is trained on.
        seed: of the two splits.

    Raises:
        click.ClickException: two of the three sets of rows share facts or a prompt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        used = training
        for split, n_rows in N_ROWS:
            rows = draw_split(task, split, n_rows, seed=seed)
            shared = find_shared(used, rows)
            if shared:
                raise click.ClickException(
                    f"{task}.{split} must share no row with the other splits, got "
                    f"{min(shared)!r} in both; correct split_of in data.py"
                )
            used = used + rows
            write_rows(folder / f"{task}.{split}.jsonl", rows)


def save_model(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write a checkpoint with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=FOLDER,
    show_default="this script's folder",
    help="Folder that receives data/, base/, english/ and chinese/.",
)
@click.option("--seed", default=0, show_default=True, help="Of data and weights.")
def main(out: Path, seed: int) -> None:
    """Make the quick start's data and models, then print how good they are."""
    torch.set_num_threads(1)
    base_rows = draw_base_rows(BASE.n_rows, seed=seed)
    # Another seed than the base's: an expert sees new rows.
    expert_rows = {
        task: draw_expert_rows(task, EXPERTS[task].n_rows, seed=seed + 1)
        for task in TASKS
    }
    training = base_rows + [row for rows in expert_rows.values() for row in rows]
    write_data(out / "data", training, seed=seed + 1)

    tokenizer = build_tokenizer(
        [row.prompt + row.completion for row in base_rows], vocab_size=1024
    )
    base = build_model(tokenizer, seed=seed)
    loss = train_model(base, tokenizer, base_rows, BASE, seed=seed)
    click.echo(f"base: training loss {loss:.3f}")
    save_model(out / "base", base, tokenizer)
    for task, rows in expert_rows.items():
        expert = copy.deepcopy(base)
        loss = train_model(expert, tokenizer, rows, EXPERTS[task], seed=seed)
        click.echo(f"{task}: training loss {loss:.3f}")
        save_model(out / task, expert, tokenizer)

    names = ("base", *TASKS)
    scores = {name: score_folder(out / name, out / "data") for name in names}
    click.echo(format_table(scores))


if __name__ == "__main__":
    main()
