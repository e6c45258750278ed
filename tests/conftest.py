"""Tiny real checkpoints, and MergeKit's own commands run inside the test process."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner, Result
from mergekit.io.tasks import LoaderCache
from mergekit.scripts.run_yaml import main as mergekit_yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = ("<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789.,?")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of single characters."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def make_llama(
    *, seed: int, n_layers: int = 3, tied: bool = False, **config: Any
) -> LlamaForCausalLM:
    """Make a seeded Llama of some 30,000 weights, float32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": len(VOCABULARY),
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": n_layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "tie_word_embeddings": tied,
                "pad_token_id": 0,
                "eos_token_id": 1,
                "bos_token_id": None,
                **config,
            }
        )
    )


def tune(
    base: transformers.PreTrainedModel, *, seed: int, by: float = 0.02
) -> transformers.PreTrainedModel:
    """Return a copy of the model with seeded noise of deviation ``by`` on it."""
    generator = torch.Generator().manual_seed(seed)
    tuned = type(base)(base.config)
    tuned.load_state_dict(base.state_dict())
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return tuned


def save_model(
    model: transformers.PreTrainedModel,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Path:
    """Save model and tokenizer as a folder that MergeKit and transformers load."""
    model.to(dtype).save_pretrained(folder, **options)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Llamas: `base`, three experts `a`, `b`, `c`, and a deeper `deep`."""
    folder = tmp_path_factory.mktemp("zoo")
    base = make_llama(seed=0)
    for seed, name in enumerate("abc", start=1):
        save_model(tune(base, seed=seed), folder / name)
    save_model(base, folder / "base")
    save_model(make_llama(seed=0, n_layers=5), folder / "deep")
    return folder


@pytest.fixture(autouse=True)
def _forget_loaders() -> None:
    """MergeKit keeps checkpoint indexes for the whole process, by path."""
    LoaderCache.loaders.clear()


def make_recipe(zoo: Path, *experts: str, **changes: Any) -> dict[str, Any]:
    """Make a hi_merging recipe for models of the zoo, float32 throughout."""
    return {
        "merge_method": "hi_merging",
        "base_model": str(zoo / "base"),
        "models": [{"model": str(zoo / name)} for name in experts],
        "dtype": "float32",
        **changes,
    }


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tensors here are so small that threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _short_smoke_tests() -> Iterator[None]:
    """Let smoke tests load both models but write one token, which saves minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mergekit_himerging.smoke.N_TOKENS", 1)
        yield


RunRecipe = Callable[..., Result]


@pytest.fixture
def run_recipe(tmp_path: Path) -> RunRecipe:
    """Run `mergekit-yaml` on a recipe, given as a mapping or as text."""

    def run(
        recipe: Mapping[str, Any] | str, *options: str, out: Path = tmp_path / "merged"
    ) -> Result:
        text = recipe if isinstance(recipe, str) else yaml.safe_dump(dict(recipe))
        path = tmp_path / "recipe.yml"
        path.write_text(text, encoding="utf-8")
        return run_command(mergekit_yaml, str(path), str(out), "--quiet", *options)

    return run


def run_command(command: click.Command, *arguments: str) -> Result:
    """Run a command of MergeKit's, with its exit code and output kept."""
    return CliRunner().invoke(command, arguments)


@pytest.fixture
def merge(
    tmp_path: Path, run_recipe: RunRecipe
) -> Callable[..., dict[str, torch.Tensor]]:
    """Run a recipe that must succeed and return the merged tensors."""

    def run(
        recipe: Mapping[str, Any] | str, *options: str, out: Path = tmp_path / "merged"
    ) -> dict[str, torch.Tensor]:
        result = run_recipe(recipe, *options, out=out)
        if result.exception is not None and result.exit_code != 1:
            raise result.exception
        assert result.exit_code == 0, result.output
        return load_file(out / "model.safetensors")

    return run
