"""Train one expert on one task, or on a mix of tasks, on the CPU.

Needs: the pip packages torch, transformers and peft, the base and the wheels that
prepare.py leaves, about 2.5 GB of memory (5 GB with --full) and, for 164 steps of an
English task, 6 minutes on one idle core.
Run from the repository root:

    python recipes/smollm2-medical/train_expert.py --task en-mcqa \
        --out recipes/smollm2-medical/experts/en-mcqa

With several --task their batches are mixed: --steps of each, or one --steps for each
in their order, so that a mix can see what each expert has seen. With --full all weights
are trained and a whole model is written, not a LoRA adapter.

The same command goes on where a stopped run was: a state file beside the output keeps
weights and optimiser, and is removed at the end. The order of rows is a function of
seed and step alone, so a resumed run sees what an unbroken one would have seen.
"""

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import click
import torch
from folders import new_folder
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.utils import set_peft_model_state_dict
from schedule import learning_rate, mix_batches
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
PEAK_LEARNING_RATE = 1e-3
FULL_PEAK_LEARNING_RATE = 1e-4
MAX_GRADIENT_NORM = 1.0
STEPS_BETWEEN_LINES = 10
STEPS_BETWEEN_SAVES = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """What a state file must agree with to be resumed."""

    tasks: tuple[str, ...]
    steps: tuple[int, ...]
    seed: int
    is_full: bool

    @property
    def total_steps(self) -> int:
        """Steps of all tasks together."""
        return sum(self.steps)

    @property
    def peak_learning_rate(self) -> float:
        """Learning rate after the warm-up."""
        return FULL_PEAK_LEARNING_RATE if self.is_full else PEAK_LEARNING_RATE


@click.command()
@click.option(
    "--task",
    "tasks",
    type=click.Choice(list(TASKS)),
    required=True,
    multiple=True,
    help="What to train on; several for a mix.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="New folder for the adapter, or the model.",
)
@click.option("--full", "is_full", is_flag=True, help="Train all weights.")
@click.option(
    "--steps",
    multiple=True,
    type=click.IntRange(min=1),
    default=(164,),
    show_default=True,
    help="Steps of every task, or one for each --task.",
)
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
    tasks: tuple[str, ...],
    out: Path,
    is_full: bool,
    steps: tuple[int, ...],
    seed: int,
    threads: int,
    base: Path,
    wheels: Path,
) -> None:
    """Train an expert and save it in bfloat16: a PEFT adapter, or a whole model."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if out.exists():
        raise click.ClickException(
            f"{out} must not exist yet; remove it or name another folder"
        )
    if len(steps) == 1:
        steps *= len(tasks)
    if len(steps) != len(tasks):
        raise click.ClickException(
            f"--steps must be given once, or once for each of {len(tasks)} --task, "
            f"got {len(steps)}"
        )
    torch.set_num_threads(threads)
    settings = Settings(tasks, steps, seed, is_full)
    model: LlamaForCausalLM | PeftModel
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    if not is_full:
        model = add_adapter(model, seed)
    try:
        examples = [read_examples(task, base, wheels) for task in tasks]
        train(model, examples, settings, out.with_name(f"{out.name}.training-state.pt"))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if isinstance(model, PeftModel):
        save_adapter(model, out)
    else:
        save_model(model, base, out)
    click.echo(f"wrote {out}")


def add_adapter(model: LlamaForCausalLM, seed: int) -> PeftModel:
    """Put a fresh adapter on the base's linear layers."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules=list(LINEAR_LAYERS),
    )
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
    model: LlamaForCausalLM | PeftModel,
    examples: Sequence[Sequence[Example]],
    settings: Settings,
    state: Path,
) -> None:
    """Train a model, or its adapter, in place, from the state file where there is one.

    The loss of a step is the mean over the answer tokens of its batch, in nats.

    Args:
        model: what is trained.
        examples: by task, in the order of the settings.
        settings: how.
        state: where an unfinished run is kept.

    Raises:
        ValueError: the state file is of other settings.
    """
    network = cast(
        LlamaForCausalLM,
        model.get_base_model() if isinstance(model, PeftModel) else model,
    )
    weights = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(
        weights, lr=settings.peak_learning_rate, weight_decay=0.0
    )
    first_step = resume(model, optimiser, settings, state)
    started = time.monotonic()
    n_tokens = 0
    recent: list[float] = []
    n_steps = settings.total_steps
    for step, batch in enumerate(mix_batches(examples, settings.steps, settings.seed)):
        if step < first_step:
            continue
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, n_steps, settings.peak_learning_rate)
        loss = torch.cat(answer_losses(network, batch)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, MAX_GRADIENT_NORM)
        optimiser.step()
        optimiser.zero_grad()

        n_tokens += sum(len(example.ids) for example in batch)
        recent.append(loss.item())
        done = step + 1
        if done % STEPS_BETWEEN_LINES == 0 or done == n_steps:
            seconds = time.monotonic() - started
            LOG.info(
                "step %d of %d: loss %.3f nats per token, %.0f s, %.0f tokens/s",
                done,
                n_steps,
                sum(recent) / len(recent),
                seconds,
                n_tokens / seconds,
            )
            recent.clear()
        if done % STEPS_BETWEEN_SAVES == 0 and done < n_steps:
            save_state(model, optimiser, settings, done, state)
    state.unlink(missing_ok=True)


def get_trained(model: LlamaForCausalLM | PeftModel) -> dict[str, torch.Tensor]:
    """Return the weights that are trained."""
    if isinstance(model, PeftModel):
        return dict(get_peft_model_state_dict(model))
    return dict(model.state_dict())


def save_state(
    model: LlamaForCausalLM | PeftModel,
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
            "weights": get_trained(model),
            "optimiser": optimiser.state_dict(),
        },
        unfinished,
    )
    unfinished.replace(path)


def resume(
    model: LlamaForCausalLM | PeftModel,
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
    if isinstance(model, PeftModel):
        set_peft_model_state_dict(model, state["weights"])
    else:
        model.load_state_dict(state["weights"])
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


def save_model(model: LlamaForCausalLM, base: Path, out: Path) -> None:
    """Save a whole model in bfloat16, with the base's tokenizer."""
    with new_folder(out) as unfinished:
        model.to(torch.bfloat16).save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(base).save_pretrained(unfinished)


if __name__ == "__main__":
    main()
