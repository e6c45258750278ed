"""Is every stored tensor merged, and is every merged tensor stored, in equal shapes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from mergekit.common import ModelReference, get_auto_cls
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from mergekit_himerging.preflight.finding import Finding, list_names
from mergekit_himerging.preflight.models import Model, names_of
from mergekit_himerging.preflight.planned import (
    Planned,
    find_stored,
    is_convertible,
    list_inputs,
)

KNOWN_BUFFERS = re.compile(
    r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.attn\.(masked_)?bias|"
    r"\.attention\.(masked_)?bias|position_ids|num_batches_tracked|\.masked_bias)$"
)
"""What models compute anew when they are loaded."""

VARIANT = "MergeKit does not know this variant of the architecture, so merge another"

LAYER = re.compile(r"\.(\d+)\.")


def check_coverage(merge: Planned, models: Sequence[Model]) -> Iterator[Finding]:
    """Find tensors that would be lost, and inputs that a model does not have.

    Args:
        merge: as planned.
        models: with their weights at hand; those with unreadable files are left out.
    """
    used: dict[ModelReference, set[str]] = {}
    absent: dict[ModelReference, list[str]] = {}
    optional: dict[ModelReference, list[str]] = {}
    by_reference = {m.reference: m for m in models if m.is_whole}
    for tensor in merge.tensors:
        for reference, weight in list_inputs(tensor):
            model = by_reference.get(reference)
            if model is None:
                continue
            names = (*names_of(weight), *(weight.tied_names or ()))
            used.setdefault(reference, set()).update(names)
            if find_stored(model, weight) is None and not is_convertible(model, weight):
                kind = optional if weight.optional else absent
                kind.setdefault(reference, []).append(weight.name)
    for model in by_reference.values():
        missing = absent.get(model.reference, [])
        if missing:
            expected = _list_expected(model)
            is_variant = expected is not None and not expected & set(missing)
            remedy = VARIANT if is_variant else "download or save the whole model"
            yield Finding(
                "error",
                f"{model.name} must hold every tensor of its architecture, got no "
                f"{list_names(missing)}; {remedy}",
            )
        yield from _check_optional(model, optional.get(model.reference, []))
        planned = used.get(model.reference, set())
        remedy = VARIANT
        if merge.config.modules:
            remedy = "name every module of the model under 'modules:'"
        yield from _check_unplanned(model, planned, remedy)
    yield from _check_shapes(merge, by_reference)


def _check_optional(model: Model, names: Sequence[str]) -> Iterator[Finding]:
    if names and model.is_base:
        yield Finding(
            "error",
            f"{model.name} must hold every tensor that is merged, got no "
            f"{list_names(names)}; the first model's would be taken whole, so add "
            "them to the base (a bias as zeros)",
        )
    elif names:
        yield Finding(
            "warning",
            f"{model.name} must hold every tensor that the base has, got no "
            f"{list_names(names)}; the merge takes them from the others",
        )


def _check_unplanned(model: Model, planned: set[str], remedy: str) -> Iterator[Finding]:
    """Find stored tensors that no merged tensor is made of."""
    converted = _find_converted(model, planned)
    left = [
        name
        for name in model.stored
        if name not in planned
        and name not in converted
        and not KNOWN_BUFFERS.search(name)
    ]
    templates = {LAYER.sub(".*.", name, count=1) for name in planned | converted}
    in_layers = [n for n in left if LAYER.sub(".*.", n, count=1) in templates]
    depth = model.n_layers
    beyond = [n for n in in_layers if depth is not None and _layer_of(n) >= depth]
    if beyond:
        yield Finding(
            "warning",
            f"{model.name} must have as many layers as its config.json says, got "
            f"{depth} there and {1 + max(map(_layer_of, beyond))} in its files; the "
            "rest is not merged, so mend num_hidden_layers if it belongs to the model",
        )
    # What slices leave out is reported with the slices.
    lost = sorted(set(left) - set(in_layers))
    ignored = _list_ignored(model)
    lost = [name for name in lost if not any(re.search(p, name) for p in ignored)]
    if not lost:
        return
    expected = _list_expected(model) if model.is_base else set()
    needed = [name for name in lost if expected is None or name in expected]
    if model.is_base and needed:
        yield Finding(
            "error",
            f"{model.name} must have tensors that MergeKit merges, got "
            f"{len(needed)} that it would lose ({list_names(needed)}); {remedy}",
        )
        lost = [name for name in lost if name not in needed]
    if lost:
        yield Finding(
            "warning",
            f"{model.name} must have no tensors beside its architecture's, got "
            f"{len(lost)} that are not merged ({list_names(lost)}); check that they "
            "are not needed",
        )


def _layer_of(name: str) -> int:
    found = LAYER.search(name)
    return int(found[1]) if found else -1


def _find_converted(model: Model, planned: set[str]) -> set[str]:
    """Name stored tensors that transformers renames or joins into planned ones."""
    model_type = getattr(model.config, "model_type", None)
    get_transforms: Any = get_checkpoint_conversion_mapping
    transforms = (get_transforms(model_type) if model_type else None) or ()
    found = set()
    for name in model.stored:
        if name in planned:
            continue
        current = name
        for transform in transforms:
            renamed, pattern = transform.rename_source_key(current)
            if pattern is None:
                continue
            first = transform.target_patterns[0]
            targets = {renamed.replace(first, t) for t in transform.target_patterns}
            if (targets | {renamed}) & planned:
                found.add(name)
                break
            current = renamed
    return found


def _list_ignored(model: Model) -> Sequence[str]:
    """List patterns of tensors that transformers leaves out when it loads a model."""
    architecture = (getattr(model.config, "architectures", None) or [""])[0]
    kind = getattr(transformers, str(architecture), None)
    return tuple(getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ())


def _list_expected(model: Model) -> set[str] | None:
    """List the tensors that transformers would load; None where it cannot tell."""
    try:
        kind: Any = get_auto_cls(model.config.architectures[0])
        with torch.device("meta"):
            return set(kind.from_config(model.config).state_dict())
    except Exception:  # a foreign model's code may raise anything
        return None


def _check_shapes(
    merge: Planned, models: Mapping[ModelReference, Model]
) -> Iterator[Finding]:
    differing: dict[tuple[ModelReference, bool], list[str]] = {}
    for tensor in merge.tensors:
        shapes = {}
        for reference, weight in list_inputs(tensor):
            model = models.get(reference)
            name = find_stored(model, weight) if model is not None else None
            if model is not None and name is not None:
                shapes[reference] = model.stored[name].shape
        base_model = tensor.task.base_model
        base = shapes.get(base_model) if base_model is not None else None
        if base is None:
            continue
        axis = tensor.weight.vocabulary_axis
        for reference, shape in shapes.items():
            if shape == base:
                continue
            of_vocabulary = axis is not None and len(shape) == len(base) > axis
            if of_vocabulary:
                others = [i for i in range(len(base)) if i != axis]
                of_vocabulary = all(shape[i] == base[i] for i in others)
            if of_vocabulary and _is_brought_to_one(merge):
                continue
            differing.setdefault((reference, of_vocabulary), []).append(
                f"'{tensor.weight.name}' {list(shape)} and {list(base)}"
            )
    for (reference, of_vocabulary), found in differing.items():
        remedy = (
            "align the vocabularies with 'tokenizer: {source: union}'"
            if of_vocabulary
            else "merge models that were tuned from the base"
        )
        rest = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield Finding(
            "error",
            f"'{reference}' must have the shapes of the base '{_base_name(merge)}', "
            f"got {found[0]}{rest}; {remedy}",
        )


def _base_name(merge: Planned) -> str:
    return str(merge.tensors[0].task.base_model)


def _is_brought_to_one(merge: Planned) -> bool:
    config = merge.config
    has_tokenizer = config.tokenizer is not None or config.tokenizer_source is not None
    return has_tokenizer or merge.options.unsafe_truncate_embeddings
