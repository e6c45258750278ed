"""Heads and embeddings: stored, tied, or absent where they must not be."""

from collections.abc import Iterator, Sequence

import torch

from mergekit_himerging.preflight.finding import Finding
from mergekit_himerging.preflight.models import Model
from mergekit_himerging.preflight.samples import read_samples


def check_heads(models: Sequence[Model]) -> Iterator[Finding]:
    """Find heads that are absent, and heads that a tied output would lose.

    Args:
        models: of one recipe; those without weights at hand are left out.
    """
    own: dict[Model, bool] = {}
    for model in models:
        if not model.is_whole or model.config is None or not model.is_language_model:
            continue
        head, embedding = model.find_head()
        if head is None and embedding is not None and not model.is_tied:
            yield Finding(
                "error",
                f"{model.name} must store its head, got no 'lm_head.weight' and "
                "tie_word_embeddings false; download or save the whole model, or set "
                "tie_word_embeddings to true in its config.json if it has none",
            )
            continue
        if head is not None and embedding is not None:
            own[model] = not _are_equal(model, head, embedding)
            if own[model] and model.is_tied:
                yield Finding(
                    "warning",
                    f"{model.name} must store no other head than its embedding, got "
                    f"'{head}' with other values and tie_word_embeddings true; set "
                    "it to false in its config.json if the head is meant",
                )
        elif head is None and embedding is not None:
            own[model] = False
    base = next((model for model in own if model.is_base), None)
    if base is None:
        return
    for model, has_own in own.items():
        if has_own == own[base]:
            continue
        if has_own:
            yield Finding(
                "error",
                f"models must all have a head of their own or none, got one in "
                f"'{model.reference}' and none in the base '{base.reference}'; the "
                "merge would be saved as tied and lose it, so untie the base "
                "(store its head, tie_word_embeddings false) first",
            )
        else:
            yield Finding(
                "error",
                f"models must all have a head of their own or none, got none in "
                f"'{model.reference}' and one in the base '{base.reference}'; its "
                "embedding would be merged as a head, so store its head first",
            )


def _are_equal(model: Model, head: str, embedding: str) -> bool:
    stored = model.stored
    if stored[head].shape != stored[embedding].shape:
        return False
    values = read_samples(stored, [head, embedding])
    return torch.equal(values[head], values[embedding])
