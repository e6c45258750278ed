"""Train one LoRA expert on one task, on the CPU.

Needs: the pip packages torch, transformers and peft, the base and the wheels that
prepare.py leaves, about 2.5 GB of memory and, for 164 steps, 6 minutes on one idle
core.
Run from the repository root:

    python recipes/smollm2-medical/train_expert.py --task en-mcqa \
        --out recipes/smollm2-medical/experts/en-mcqa

The same command goes on where a stopped run was: a state file beside the output keeps
weights and optimiser, and is removed at the end. The order of rows is a function of
seed and step alone, so a resumed run sees what an unbroken one would have seen.
"""

import dataclasses
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import click
import torch
from folders import new_folder
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.utils import set_peft_model_state_dict
from scoring import Example, answer_losses, encode_example
from tasks import TASKS, build_splits
from transformers import AutoTokenizer, LlamaForCausalLM

LOG = logging.getLogger(__name__)

PUBLISHED_BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
LINEAR_LAYERS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
RANK = 8
ALPHA = 16
BATCH_ROWS = 8
# Rows of similar length share a batch: sorted inside windows of this many batches.
WINDOW_BATCHES = 8
WARM_UP_STEPS = 10
PEAK_LEARNING_RATE = 1e-3
MAX_GRADIENT_NORM = 1.0
STEPS_BETWEEN_LINES = 10
STEPS_BETWEEN_SAVES = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """What a state file must agree with to be resumed."""

    task: str
    steps: int
    seed: int


@click.command()
@click.option("--task", type=click.Choice(list(TASKS)), required=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="New folder for the adapter.",
)
@click.option("--steps", type=click.IntRange(min=1), default=164, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("recipes/smollm2-medical/base"),
    show_default=True,
)
@click.option(
    "--wheels",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("recipes/smollm2-medical/wheels"),
    show_default=True,
)
def main(
    task: str, out: Path, steps: int, seed: int, threads: int, base: Path, wheels: Path
) -> None:
    """Train a LoRA expert and save it as a PEFT adapter in bfloat16."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if out.exists():
        raise click.ClickException(
            f"{out} must not exist yet; remove it or name another folder"
        )
    torch.set_num_threads(threads)
    settings = Settings(task, steps, seed)
    try:
        model = add_adapter(base, seed)
        examples = read_examples(task, base, wheels)
        train(model, examples, settings, out.with_name(f"{out.name}.training-state.pt"))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    save_adapter(model, out)
    click.echo(f"wrote {out}")


def add_adapter(base: Path, seed: int) -> PeftModel:
    """Load the base in float32 and put a fresh adapter on its linear layers."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules=list(LINEAR_LAYERS),
    )
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    # The fork leaves the process's own random state as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def read_examples(task: str, base: Path, wheels: Path) -> list[Example]:
    """Tokenise the task's training rows, answers closed by the end-of-text token."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = build_splits(task, wheels)["train"]
    return [encode_example(tokenizer, r.prompt, r.target, close=True) for r in rows]


def train(
    model: PeftModel, examples: Sequence[Example], settings: Settings, state: Path
) -> None:
    """Train the adapter in place, from the state file where there is one.

    The loss of a step is the mean over the answer tokens of its batch, in nats.

    Raises:
        ValueError: the state file is of other settings.
    """
    network = cast(LlamaForCausalLM, model.get_base_model())
    weights = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=PEAK_LEARNING_RATE, weight_decay=0.0)
    first_step = resume(model, optimiser, settings, state)
    started = time.monotonic()
    n_tokens = 0
    recent: list[float] = []
    for step, batch in enumerate(batches(examples, settings.seed, settings.steps)):
        if step < first_step:
            continue
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, settings.steps)
        loss = torch.cat(answer_losses(network, batch)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, MAX_GRADIENT_NORM)
        optimiser.step()
        optimiser.zero_grad()

        n_tokens += sum(len(example.ids) for example in batch)
        recent.append(loss.item())
        done = step + 1
        if done % STEPS_BETWEEN_LINES == 0 or done == settings.steps:
            seconds = time.monotonic() - started
            LOG.info(
                "step %d of %d: loss %.3f nats per token, %.0f s, %.0f tokens/s",
                done,
                settings.steps,
                sum(recent) / len(recent),
                seconds,
                n_tokens / seconds,
            )
            recent.clear()
        if done % STEPS_BETWEEN_SAVES == 0 and done < settings.steps:
            save_state(model, optimiser, settings, done, state)
    state.unlink(missing_ok=True)


def batches(
    examples: Sequence[Example], seed: int, n_batches: int
) -> Iterator[list[Example]]:
    """Yield batches of ``BATCH_ROWS``, epoch after epoch; the last rows may be cut."""
    generator = random.Random(seed)
    produced = 0
    while produced < n_batches:
        order = list(examples)
        generator.shuffle(order)
        window = BATCH_ROWS * WINDOW_BATCHES
        epoch = []
        for start in range(0, len(order), window):
            rows = sorted(order[start : start + window], key=lambda e: len(e.ids))
            in_window = [
                rows[i : i + BATCH_ROWS] for i in range(0, len(rows), BATCH_ROWS)
            ]
            generator.shuffle(in_window)
            epoch += [batch for batch in in_window if len(batch) == BATCH_ROWS]
        if not epoch:
            raise ValueError(
                f"training needs {BATCH_ROWS} rows or more, got {len(examples)}; "
                "use the pinned wheels"
            )
        yield from epoch[: n_batches - produced]
        produced += len(epoch)


def learning_rate(step: int, steps: int) -> float:
    """Warm up linearly, then fall to zero along half a cosine; ``step`` from 0."""
    if step < WARM_UP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * progress))


def save_state(
    model: PeftModel,
    optimiser: torch.optim.Optimizer,
    settings: Settings,
    done: int,
    path: Path,
) -> None:
    """Write the state file; a stop while writing leaves the earlier one whole."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "settings": dataclasses.asdict(settings),
            "done": done,
            "adapter": get_peft_model_state_dict(model),
            "optimiser": optimiser.state_dict(),
        },
        unfinished,
    )
    unfinished.replace(path)


def resume(
    model: PeftModel,
    optimiser: torch.optim.Optimizer,
    settings: Settings,
    path: Path,
) -> int:
    """Load the state file where there is one; return the steps that are done.

    Raises:
        ValueError: the state file is of other settings.
    """
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    expected = dataclasses.asdict(settings)
    if state["settings"] != expected:
        raise ValueError(
            f"{path} must be of this run, {expected}, got {state['settings']}; "
            "repeat the earlier command or remove the file"
        )
    set_peft_model_state_dict(model, state["adapter"])
    optimiser.load_state_dict(state["optimiser"])
    LOG.info("going on after step %d", state["done"])
    return int(state["done"])


def save_adapter(model: PeftModel, out: Path) -> None:
    """Save the adapter in bfloat16, naming the published base and no local path."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    config = cast(LoraConfig, model.peft_config["default"])
    config.base_model_name_or_path = PUBLISHED_BASE
    # peft holds a set, whose order would differ from run to run.
    config.target_modules = sorted(LINEAR_LAYERS)
    with new_folder(out) as unfinished:
        # Left to itself, peft asks a hub whether the vocabulary changed.
        model.save_pretrained(str(unfinished), save_embedding_layers=False)
        # peft writes a model card of placeholders.
        (unfinished / "README.md").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
