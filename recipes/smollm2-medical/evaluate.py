"""Score models on the recipe's test files and print one table.

Needs: the pip packages torch, transformers and peft.
Run from the repository root, with any number of models (folders, or base+adapter)
and of test files:

    python recipes/smollm2-medical/evaluate.py \
        --model recipes/smollm2-medical/base \
        --test recipes/smollm2-medical/data/en-mcqa.test.jsonl

Free text is scored by `loss`: nats per answer token over all rows, lower is better.
Choices are scored by `accuracy`: an option counts as the answer where the sum of the
log-likelihoods of its text's tokens is the largest of all options; higher is better.
Texts are ranked and not letters, since the base binds no letters.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import torch
from peft import PeftModel
from scoring import Example, answer_losses, choice_losses, encode_example
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

BATCH_ROWS = 16


@dataclass(frozen=True, slots=True)
class Item:
    """One test row.

    Attributes:
        prompt: what every answer is appended to.
        answers: the completion alone, or all choices.
        right: index of the right one in ``answers``.
    """

    prompt: str
    answers: tuple[str, ...]
    right: int = 0


@dataclass(frozen=True, slots=True)
class TestFile:
    """A test file's name and the rows to score; all of them of one shape."""

    name: str
    items: tuple[Item, ...]

    @property
    def metric(self) -> Literal["accuracy", "loss"]:
        return "accuracy" if len(self.items[0].answers) > 1 else "loss"


@dataclass(frozen=True, slots=True)
class Score:
    """A mean over ``n`` rows with its standard error, in the metric's unit."""

    mean: float
    error: float
    n: int


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    required=True,
    help="Model folder, or base+adapter; may be repeated.",
)
@click.option(
    "--test",
    "tests",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    required=True,
    help="Test file in JSON lines; may be repeated.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=2),
    help="Score that many rows of each file, chosen with --seed; default: all.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
def main(
    models: tuple[str, ...],
    tests: tuple[Path, ...],
    rows: int | None,
    seed: int,
    threads: int,
) -> None:
    """Score models on test files; the same rows for every model."""
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    try:
        files = [read_test_file(path, rows, seed) for path in tests]
        click.echo(
            format_line(["model", "test file", "metric", "mean", "std. error", "n"])
        )
        for reference in models:
            model, tokenizer = load_model(reference)
            for file in files:
                score = score_file(model, tokenizer, file)
                figures = [f"{score.mean:.3f}", f"{score.error:.3f}", str(score.n)]
                click.echo(format_line([reference, file.name, file.metric, *figures]))
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def format_line(cells: Sequence[str]) -> str:
    """Return one line of the table, as Markdown."""
    return f"| {' | '.join(cells)} |"


def read_test_file(path: Path, rows: int | None, seed: int) -> TestFile:
    """Read a test file, or a seeded choice of its rows.

    Raises:
        ValueError: a line has neither row shape, or the file has too few rows.
    """
    items = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            items.append(_parse_item(json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} line {number} must have prompt and completion, or prompt, "
                "choices and the letter of the answer; make the file with prepare.py"
            ) from error
    if len(items) < 2:
        raise ValueError(
            f"{path} must have two rows or more, got {len(items)}; "
            "make the file with prepare.py"
        )
    if len({len(item.answers) > 1 for item in items}) > 1:
        raise ValueError(
            f"{path} must have rows of one shape, got completions and choices; "
            "make the file with prepare.py"
        )
    if rows is not None and rows < len(items):
        items = random.Random(seed).sample(items, rows)
    return TestFile(path.name, tuple(items))


def _parse_item(row: dict[str, str | list[str]]) -> Item:
    prompt = str(row["prompt"])
    if "completion" in row:
        return Item(prompt, (str(row["completion"]),))
    choices = tuple(row["choices"])
    return Item(prompt, choices, "ABCDEFGH"[: len(choices)].index(str(row["answer"])))


def load_model(reference: str) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load a model in float32 with its tokenizer.

    Args:
        reference: model folder, or the folders of base and adapter joined by ``+``.

    Raises:
        ValueError: a folder is missing.
    """
    base, plus, adapter = reference.partition("+")
    for folder in [base, adapter] if plus else [base]:
        if not Path(folder).is_dir():
            raise ValueError(
                f"'{folder}' must be a folder (model '{reference}'); "
                "prepare.py, train_expert.py and mergekit-yaml make them"
            )
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    if plus:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.eval(), AutoTokenizer.from_pretrained(base)


def score_file(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, file: TestFile
) -> Score:
    """Score one model on one test file."""
    examples = [
        [encode_example(tokenizer, item.prompt, answer) for answer in item.answers]
        for item in file.items
    ]
    if file.metric == "loss":
        return score_answers(model, [example for (example,) in examples])
    hits = []
    with torch.inference_mode():
        for item, options in zip(file.items, examples, strict=True):
            losses = [answer.sum().item() for answer in choice_losses(model, options)]
            hits.append(losses.index(min(losses)) == item.right)
    n = len(hits)
    mean = sum(hits) / n
    return Score(mean, math.sqrt(mean * (1 - mean) / (n - 1)), n)


def score_answers(model: LlamaForCausalLM, examples: Sequence[Example]) -> Score:
    """Return the loss per answer token over all examples, in nats.

    Its standard error is that of a ratio: rows are the independent units, and both
    the loss and the number of tokens differ from row to row.
    """
    # Examples of similar length share a batch, so that little of it is padding.
    ordered = sorted(examples, key=lambda example: len(example.ids))
    sums = []
    with torch.inference_mode():
        for start in range(0, len(ordered), BATCH_ROWS):
            losses = answer_losses(model, ordered[start : start + BATCH_ROWS])
            sums += [answer.sum().item() for answer in losses]
    tokens = [example.n_answer for example in ordered]
    n = len(ordered)
    mean = sum(sums) / sum(tokens)
    squares = sum((a - mean * b) ** 2 for a, b in zip(sums, tokens, strict=True))
    return Score(mean, math.sqrt(squares * n / (n - 1)) / sum(tokens), n)


if __name__ == "__main__":
    main()
