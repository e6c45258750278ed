"""What a merged folder carries besides the model: plan, report, plot, card.

Invariant: written after the merge, from the plan that was merged; what an earlier merge
has left of it goes away.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mergekit_himerging.files import write_text
from mergekit_himerging.names import is_local, shorten_names
from mergekit_himerging.plan import PLAN_FILE, Plan, read_plan
from mergekit_himerging.recipe import to_document
from mergekit_himerging.staging import find_target
from mergekit_himerging.views.markdown import (
    REPORT_FILE,
    put_section,
    write_card_section,
    write_report,
)
from mergekit_himerging.views.plot import draw_plan
from mergekit_himerging.views.words import list_names

PLOT_FILE = "hi_merging_plot.svg"
"""Name of the plot in a merged folder."""

CARD_FILE, RECIPE_FILE = "README.md", "mergekit_config.yml"
"""What MergeKit writes, with its copy of the recipe."""


def finish_folder(
    folder: Path, config: Any, *, hides_paths: bool, say: Callable[[str], None]
) -> None:
    """Write report, plot and card section of a merge.

    Args:
        folder: where MergeKit has written the model, and we the plan.
        config: the recipe.
        hides_paths: local folders are cut from the names in all that lies in the
            folder: in the plan, and in MergeKit's copies of the recipe.
        say: prints a line.
    """
    path = folder / PLAN_FILE
    for name in (REPORT_FILE, PLOT_FILE):
        (folder / name).unlink(missing_ok=True)
    plan = read_plan(path) if path.is_file() else None
    document = to_document(config)
    if hides_paths:
        labels = _label(plan, document)
        if plan is not None:
            plan = _rename(plan, labels)
            write_text(path, plan.to_json())
        for name in (CARD_FILE, RECIPE_FILE):
            _rewrite(folder / name, labels)
    if plan is None:
        return
    recipe = yaml.safe_dump(
        plan.recipe or document, sort_keys=False, allow_unicode=True
    )
    plot: str | None = PLOT_FILE
    try:
        draw_plan(plan, folder / PLOT_FILE)
    except ValueError as error:
        plot = None
        say(f"no plot: {error}")
    write_text(folder / REPORT_FILE, write_report(plan, recipe=recipe, plot=plot))
    card = folder / CARD_FILE
    if card.is_file():
        section = write_card_section(plan, recipe=recipe)
        write_text(card, put_section(card.read_text(encoding="utf-8"), section))
    say(f"report written to {find_target(folder) / REPORT_FILE}")


def _label(plan: Plan | None, document: Any) -> dict[str, str]:
    """Shorten every local name of a merge, and each part of a reference."""
    names = set(list_names(plan)) if plan is not None else set()
    names |= set(_find_strings(document))
    names |= {part for name in names if is_local(name) for part in name.split("+")}
    labels = shorten_names(name for name in names if is_local(name))
    return {name: label for name, label in labels.items() if name != label}


def _find_strings(value: Any) -> list[str]:
    """List the texts of a recipe that name a model or data."""
    if isinstance(value, Mapping):
        found = []
        for key, item in value.items():
            if key in ("model", "base_model", "calibration", "path", "source", "plan"):
                found += [item] if isinstance(item, str) else []
            found += _find_strings(item)
        return found
    if isinstance(value, list):
        return [text for item in value for text in _find_strings(item)]
    return []


def _rename(plan: Plan, labels: Mapping[str, str]) -> Plan:
    """Put labels for names wherever they stand in a plan."""

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {rename(key): rename(item) for key, item in value.items()}
        if isinstance(value, list):
            return [rename(item) for item in value]
        return _replace(value, labels) if isinstance(value, str) else value

    return Plan.model_validate(rename(json.loads(plan.to_json())))


def _rewrite(path: Path, labels: Mapping[str, str]) -> None:
    if path.is_file():
        write_text(path, _replace(path.read_text(encoding="utf-8"), labels))


def _replace(text: str, labels: Mapping[str, str]) -> str:
    # The longest first, since one name may begin another.
    for name in sorted(labels, key=len, reverse=True):
        text = text.replace(name, labels[name])
    return text
