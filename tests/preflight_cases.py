"""Recipes with one thing wrong, and what the checks before a merge say of them."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from conftest import make_recipe
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from safetensors.torch import load_file, save_file

from mergekit_himerging.planning import plan_recipe
from mergekit_himerging.preflight import Finding, inspect_planned, inspect_recipe

Tensors = dict[str, torch.Tensor]
Make = Callable[[Path, Path], Mapping[str, Any]]
"""The zoo and an empty folder -> a recipe."""


@dataclass(frozen=True)
class Case:
    """One trouble.

    Attributes:
        make: makes models and recipe.
        level: of the finding.
        words: of its text; ``{zoo}`` and ``{here}`` stand for folders.
        options: MergeKit's.
        out: whether the recipe is checked with ``{here}/out`` as its output folder.
    """

    make: Make
    level: str
    words: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    out: bool = False

    def check(self, zoo: Path, here: Path) -> None:
        """Assert that the trouble is found once, and nothing worse is."""
        recipe = self.make(zoo, here)
        options = {
            name: value.format(here=here) if isinstance(value, str) else value
            for name, value in self.options.items()
        }
        found = inspect(recipe, out=here / "out" if self.out else None, **options)
        words = [word.format(zoo=zoo, here=here) for word in self.words]
        matching = [f for f in found if all(word in f.text for word in words)]
        assert [f.level for f in matching] == [self.level], found
        if self.level == "warning":
            assert all(f.level == "warning" for f in found), found


def inspect(
    recipe: Mapping[str, Any], *, out: Path | None = None, **options: Any
) -> list[Finding]:
    """Run the checks before planning, and those after it where the first allow it."""
    config = MergeConfiguration.model_validate(dict(recipe))
    merge_options = MergeOptions(quiet=True, **options)
    found = inspect_recipe(config, merge_options, out)
    if any(finding.level == "error" for finding in found):
        return found
    LoaderCache.loaders.clear()
    planned = inspect_planned(plan_recipe(config, merge_options))
    return list(dict.fromkeys([*found, *planned]))


def copy_model(zoo: Path, here: Path, name: str, new: str | None = None) -> Path:
    """Copy a model of the zoo."""
    return Path(shutil.copytree(zoo / name, here / (new or name)))


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {name: value for name, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the tensors of a model in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def recipe_of(zoo: Path, *models: Path, **changes: Any) -> dict[str, Any]:
    """Make a recipe for models by their folders."""
    return make_recipe(zoo, models=[{"model": str(m)} for m in models], **changes)


def with_expert(edit: Callable[[Path], Any], **changes: Any) -> Make:
    """Make a recipe with an edited copy of expert `a`, `{here}/a`."""

    def make(zoo: Path, here: Path) -> Mapping[str, Any]:
        folder = copy_model(zoo, here, "a")
        edit(folder)
        return recipe_of(zoo, folder, **changes)

    return make


def with_base(edit: Callable[[Path], Any], **changes: Any) -> Make:
    """Make a recipe with an edited copy of the base, `{here}/base`."""

    def make(zoo: Path, here: Path) -> Mapping[str, Any]:
        folder = copy_model(zoo, here, "base")
        edit(folder)
        return make_recipe(zoo, "a", base_model=str(folder), **changes)

    return make
