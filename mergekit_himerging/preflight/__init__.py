"""What is checked of a recipe and its models before the heavy work."""

from mergekit_himerging.preflight.entry import (
    check_flat_recipe,
    check_layers,
    check_models,
    check_output,
    check_recipe,
    find_recipe,
    recipe_folders,
)
from mergekit_himerging.preflight.finding import Finding, raise_errors
from mergekit_himerging.preflight.inspect import inspect_planned, inspect_recipe

__all__ = [
    "Finding",
    "check_flat_recipe",
    "check_layers",
    "check_models",
    "check_output",
    "check_recipe",
    "find_recipe",
    "inspect_planned",
    "inspect_recipe",
    "raise_errors",
    "recipe_folders",
]
