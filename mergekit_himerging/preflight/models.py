"""The models of a recipe with what can be read of them cheaply.

Invariant: what cannot be read is a finding here and absent further on, so that no check
stumbles over it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergekit.architecture import ModelArchitecture, WeightInfo, arch_info_for_config
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions

from mergekit_himerging.preflight.checkpoint import Checkpoint, read_checkpoint
from mergekit_himerging.preflight.finding import Finding
from mergekit_himerging.preflight.headers import Stored, describe_error, read_json

HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Output heads where MergeKit does not name them, by the ends of their names."""

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures that have a head over the vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One model of a recipe.

    Attributes:
        reference: as the recipe spells it.
        is_base: whether the others are compared with it.
        config: as transformers reads it; None where it cannot.
        folder: with tokenizer and ``config.json``; None where it is not at hand.
        checkpoint: its weights; of an adapter what it was merged into; None where they
            are not at hand.
    """

    reference: ModelReference
    is_base: bool
    config: Any
    folder: Path | None
    checkpoint: Checkpoint | None

    @property
    def name(self) -> str:
        """The model with its role, for a sentence."""
        return f"{'base model' if self.is_base else 'model'} '{self.reference}'"

    @property
    def architecture(self) -> ModelArchitecture | None:
        """What MergeKit knows of the architecture; None where it has to infer it."""
        architectures = getattr(self.config, "architectures", None) or []
        return arch_info_for_config(self.config) if len(architectures) == 1 else None

    @property
    def is_language_model(self) -> bool:
        """Whether it has a head over the vocabulary."""
        architectures = getattr(self.config, "architectures", None) or [""]
        return str(architectures[0]).endswith(LANGUAGE_MODELS)

    @property
    def text_config(self) -> Any:
        """The part of its configuration that describes the language model."""
        return getattr(self.config, "get_text_config", lambda: self.config)()

    @property
    def n_layers(self) -> int | None:
        """Number of layers by its configuration; None where that does not say."""
        count = getattr(self.text_config, "num_hidden_layers", None)
        return count if isinstance(count, int) else None

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Its tensors by name; empty where the weights are not at hand."""
        return self.checkpoint.tensors if self.checkpoint is not None else {}

    @property
    def is_whole(self) -> bool:
        """Whether every tensor's name is known."""
        return self.checkpoint is not None and self.checkpoint.is_whole

    @property
    def is_tied(self) -> bool:
        """Whether its configuration says that head and embedding are one."""
        return bool(getattr(self.config, "tie_word_embeddings", False))

    def find_head(self) -> tuple[str | None, str | None]:
        """Name the stored head and the stored embedding, each None where absent."""
        stored = self.stored
        architecture = self.architecture
        weights = [
            weight
            for module in (architecture.modules.values() if architecture else ())
            for weight in (
                *module.architecture.pre_weights(self.config),
                *module.architecture.post_weights(self.config),
            )
        ]
        vocabulary = [weight for weight in weights if weight.vocabulary_axis == 0]
        tied = [weight for weight in vocabulary if weight.tied_names]
        heads = [name for weight in tied for name in names_of(weight)]
        heads += [name for name in stored if name.endswith(HEADS)]
        embeddings = [name for weight in tied for name in weight.tied_names or ()]
        embeddings += [
            name
            for weight in vocabulary
            if weight not in tied and not weight.name.endswith(HEADS)
            for name in names_of(weight)
        ]
        embeddings += [n for n in stored if n.endswith(("embed_tokens.weight", "wte"))]
        return (
            next((name for name in heads if name in stored), None),
            next((name for name in embeddings if name in stored), None),
        )


def names_of(weight: WeightInfo) -> tuple[str, ...]:
    """List the names that a tensor's own values may be stored under."""
    return (weight.name, *(weight.aliases or ()))


def find_base(config: MergeConfiguration) -> ModelReference | None:
    """Return the base of a recipe, which slices may name instead of the top."""
    return next(iter(list_bases(config)), None)


def list_bases(config: MergeConfiguration) -> Iterator[ModelReference]:
    """Yield the base models of a recipe, that of the top first."""
    if config.base_model is not None:
        yield config.base_model
    for _, output_slice in list_slices(config):
        if output_slice.base_model is not None:
            yield output_slice.base_model


def list_slices(config: MergeConfiguration) -> Iterator[tuple[str, Any]]:
    """Yield the output slices of a recipe, each with its place."""
    for index, item in enumerate(config.slices or ()):
        yield f"slices[{index}]", item
    for name, module in (config.modules or {}).items():
        for index, item in enumerate(module.slices or ()):
            yield f"modules.{name}.slices[{index}]", item


def read_models(
    config: MergeConfiguration, options: MergeOptions, *, loaded: bool
) -> tuple[list[Model], list[Finding]]:
    """Read what the models of a recipe are, the base first, without their tensors.

    Args:
        config: the recipe.
        options: MergeKit's.
        loaded: whether MergeKit has downloaded models and merged adapters; before, only
            local models without an adapter have weights at hand.

    Returns:
        The models, and what could not be read.
    """
    base = find_base(config)
    references = sorted(config.referenced_models(), key=lambda m: (m != base, str(m)))
    findings: list[Finding] = []
    checkpoints: dict[Path, Checkpoint] = {}
    models = []
    for reference in references:
        model_config = None
        try:
            model_config = reference.config(options.trust_remote_code)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0]
            findings.append(
                Finding(
                    "warning",
                    f"'{reference}' must have a configuration that transformers reads "
                    f"to be checked, got: {reason}; look at its 'config.json'",
                )
            )
        folder = checkpoint = None
        try:
            folder, weights = _find_folders(reference, loaded=loaded)
            if weights is not None:
                if weights not in checkpoints:
                    checkpoints[weights] = read_checkpoint(weights)
                checkpoint = checkpoints[weights]
        except (OSError, ValueError, RuntimeError) as error:
            findings.append(
                Finding("warning", f"files of '{reference}': {describe_error(error)}")
            )
        models.append(
            Model(reference, reference == base, model_config, folder, checkpoint)
        )
    return models, findings


def _find_folders(
    reference: ModelReference, *, loaded: bool
) -> tuple[Path | None, Path | None]:
    """Return the folders of a model's configuration and of its weights, if at hand."""
    local = Path(reference.model.path)
    folder = local if local.is_dir() else None
    if not loaded:
        return folder, folder if reference.lora is None else None
    weights = Path(LoaderCache().get(reference).index.base_path)
    if folder is None and reference.lora is None:
        folder = weights  # MergeKit downloads tokenizer and configuration with them
    return folder, weights


def read_raw_config(folder: Path) -> tuple[Mapping[str, Any], Sequence[Finding]]:
    """Read a ``config.json`` as it was written; empty where there is none."""
    path = folder / "config.json"
    if not path.exists():
        return {}, ()
    try:
        return read_json(path), ()
    except (ValueError, OSError) as error:
        return {}, (Finding("error", describe_error(error)),)
