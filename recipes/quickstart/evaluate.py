"""Measure model folders on the two held-out files and print one plain table.

python recipes/quickstart/evaluate.py recipes/quickstart/base out/
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from data import TASKS, Row, read_rows
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

FOLDER = Path(__file__).parent
BATCH_SIZE = 64
MAX_NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Score:
    """How well a model does on one file.

    Attributes:
        loss: mean over rows of the row's mean loss, nats per target token.
        loss_error: standard error of ``loss``.
        hits: share of rows answered right, in [0, 1]: the right option is the likeliest
            text, or the greedy answer equals the completion.
        hits_error: standard error of ``hits``.
        n_rows: number of rows.
    """

    loss: float
    loss_error: float
    hits: float
    hits_error: float
    n_rows: int


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return mean and standard error of two or more values."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


@torch.inference_mode()
def text_losses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[tuple[str, str]],
) -> list[tuple[float, int]]:
    """Return (summed loss in nats, number of tokens) of each text after its prompt.

    Args:
        model: causal language model; read only.
        tokenizer: the model's, padding with ``pad_token``.
        pairs: (prompt, text); the end token is not scored.

    Returns:
        One pair for each of ``pairs``.
    """
    results: list[tuple[float, int]] = []
    for start in range(0, len(pairs), BATCH_SIZE):
        batch = pairs[start : start + BATCH_SIZE]
        n_prompts = [len(tokenizer(prompt)["input_ids"]) for prompt, _ in batch]
        encoded = tokenizer(
            [prompt + text for prompt, text in batch],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        logits = model(input_ids=ids, attention_mask=mask).logits.float()
        # [rows, tokens - 1]: loss of each token but the first
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        )
        for row, n_prompt in enumerate(n_prompts):
            end = int(mask[row].sum())
            total = losses[row, n_prompt - 1 : end - 1].sum().item()
            results.append((total, end - n_prompt))
    return results


@torch.inference_mode()
def complete_prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str
) -> str:
    """Return the greedy completion up to the end token, without spaces around it."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    new_ids = output[0, ids.shape[1] :]
    return tokenizer.decode(new_ids, skip_special_tokens=True).strip()


def score_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row]
) -> Score:
    """Score a model on rows, all of them choices or all of them free answers."""
    targets = text_losses(
        model, tokenizer, [(row.prompt, row.completion) for row in rows]
    )
    hits: list[float] = []
    if rows[0].choices:
        pairs = [(row.prompt, option) for row in rows for option in row.choices]
        totals = iter(text_losses(model, tokenizer, pairs))
        for row in rows:
            by_option = {option: next(totals)[0] for option in row.choices}
            best = min(by_option, key=by_option.__getitem__)
            hits.append(float(best == row.completion))
    else:
        for row in rows:
            answer = complete_prompt(model, tokenizer, row.prompt)
            hits.append(float(answer == row.completion))
    loss, loss_error = mean_and_error([total / count for total, count in targets])
    mean_hits, hits_error = mean_and_error(hits)
    return Score(loss, loss_error, mean_hits, hits_error, len(rows))


def score_folder(model_folder: Path, data: Path) -> dict[str, Score]:
    """Load a model folder and score it on the held-out file of each task.

    Args:
        model_folder: checkpoint with its tokenizer; nothing is downloaded.
        data: folder of the held-out files.

    Returns:
        The score by task.

    Raises:
        click.ClickException: a folder or file is missing or cannot be read.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise click.ClickException(
            f"{model_folder} must be a checkpoint with its tokenizer, got: {error}; "
            "name the folder that mergekit-yaml or make_models.py wrote"
        ) from error
    model.eval()
    scores: dict[str, Score] = {}
    for task in TASKS:
        path = data / f"{task}.heldout.jsonl"
        try:
            rows = read_rows(path)
        except FileNotFoundError as error:
            raise click.ClickException(
                f"{path} must exist; make it with recipes/quickstart/make_models.py"
            ) from error
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        scores[task] = score_rows(model, tokenizer, rows)
    return scores


def format_table(scores: dict[str, dict[str, Score]]) -> str:
    """Return scores by model and task as a Markdown table, one line a model."""
    cells = [["model"]]
    for task, measure in zip(TASKS, ("accuracy", "exact match"), strict=True):
        cells[0] += [f"{task} loss", f"{task} {measure}", "n"]
    for name, by_task in scores.items():
        line = [name]
        for task in TASKS:
            score = by_task[task]
            line.append(f"{score.loss:.3f} ± {score.loss_error:.3f}")
            line.append(f"{score.hits:.3f} ± {score.hits_error:.3f}")
            line.append(str(score.n_rows))
        cells.append(line)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    )


@click.command()
@click.argument(
    "models",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=FOLDER / "data",
    show_default="data/ beside this script",
    help="Folder of the *.heldout.jsonl files.",
)
def main(models: tuple[Path, ...], data: Path) -> None:
    """Score MODELS on both held-out files.

    Loss is in nats per target token of the right answer, hits a share of rows; each
    with its standard error over rows.
    """
    torch.set_num_threads(1)
    click.echo(format_table({str(m): score_folder(m, data) for m in models}))


if __name__ == "__main__":
    main()
