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
    BEGIN,
    REPORT_FILE,
    put_section,
    write_card_section,
    write_report,
)
from mergekit_himerging.views.plot import draw_plan
from mergekit_himerging.views.words import list_names

PLOT_FILE = "hi_merging_plot.svg"
"""Name of the plot in a merged folder."""

OUR_FILES = (PLAN_FILE, REPORT_FILE, PLOT_FILE)
"""What only a merge of ours leaves in a folder."""

CARD_FILE, RECIPE_FILE = "README.md", "mergekit_config.yml"
"""What MergeKit writes, with its copy of the recipe."""


def finish_folder(
    folder: Path,
    config: Any,
    *,
    hides_paths: bool,
    lines: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Write report, plot and card section of a merge.

    Args:
        folder: where MergeKit has written the model, and we the plan.
        config: the recipe.
        hides_paths: local folders are cut from the names in all that lies in the
            folder: in the plan, and in MergeKit's copies of the recipe.
        lines: what base and merge wrote in the smoke test.
        say: prints a line.
    """
    path = folder / PLAN_FILE
    plan = read_plan(path) if path.is_file() else None
    document = to_document(config)
    if hides_paths:
        labels = _label(plan, document)
        if plan is not None:
            plan = _rename(plan, labels)
            write_text(path, plan.to_json())
        _hide_in_copies(folder, document, labels)
    section = ""
    if plan is not None:
        recipe = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        plot = _try_plot(plan, folder / PLOT_FILE, say)
        report = write_report(plan, recipe=recipe, plot=plot, lines=lines)
        write_text(folder / REPORT_FILE, report)
        section = write_card_section(plan, recipe=recipe)
        say(f"report written to {find_target(folder) / REPORT_FILE}")
    _write_section(folder, section)


def forget_merge(folder: Path) -> list[str]:
    """Take away what tells of a merge that is no longer in a folder.

    Args:
        folder: where another merge has written its model.

    Returns:
        Names of the files that are gone, or that lost our section.

    Raises:
        OSError: a file cannot be read, written or removed.
        ValueError: the card is not UTF-8.
    """
    gone = [name for name in OUR_FILES if (folder / name).is_file()]
    for name in gone:
        (folder / name).unlink()
    card = folder / CARD_FILE
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    if BEGIN in text:
        write_text(card, put_section(text, ""))
        gone.append(f"the section of {CARD_FILE}")
    return gone


def _try_plot(plan: Plan, path: Path, say: Callable[[str], None]) -> str | None:
    """Draw the plan, or say why not; returns the plot's name."""
    try:
        draw_plan(plan, path)
    except ValueError as error:
        say(f"no plot: {error}")
        return None
    return path.name


def _write_section(folder: Path, section: str) -> None:
    """Put a section, or none, into the card that was written or that stays."""
    card = folder / CARD_FILE
    if card.is_file() and section:
        write_text(card, put_section(card.read_text(encoding="utf-8"), section))
        return
    earlier = find_target(folder) / CARD_FILE
    if not card.is_file() and earlier.is_file():
        text = earlier.read_text(encoding="utf-8")
        if BEGIN in text:
            write_text(card, put_section(text, section))


def _hide_in_copies(folder: Path, document: Any, labels: Mapping[str, str]) -> None:
    """Put labels for names into MergeKit's copies of the recipe."""
    copy, card = folder / RECIPE_FILE, folder / CARD_FILE
    if not copy.is_file():
        return
    source = copy.read_text(encoding="utf-8")
    hidden = _replace(source, labels)
    if set(_find_strings(yaml.safe_load(hidden))) & set(labels):  # escaped or folded
        renamed = _rename_all(document, labels)
        hidden = yaml.safe_dump(renamed, sort_keys=False, allow_unicode=True)
    write_text(copy, hidden)
    text = card.read_text(encoding="utf-8")
    write_text(card, _replace(text.replace(source, hidden), labels))


def _label(plan: Plan | None, document: Any) -> dict[str, str]:
    """Shorten every local name of a merge, and each part of a reference.

    Base and models are shortened as ``Plan.check_fit`` shortens those of a recipe.
    """
    names = set(list_names(plan)) if plan is not None else set()
    names |= set(_find_strings(document))
    names |= {part for name in names if is_local(name) for part in name.split("+")}
    labels = shorten_names(name for name in names if is_local(name))
    if plan is not None:
        fitting = shorten_names(plan.models) | shorten_names([plan.base])
        if len(set(fitting.values())) == len(fitting):
            labels |= fitting
    return {name: label for name, label in labels.items() if name != label}


def _find_strings(value: Any) -> list[str]:
    """List the texts of a recipe."""
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _find_strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _find_strings(item)]
    return [value] if isinstance(value, str) else []


def _rename(plan: Plan, labels: Mapping[str, str]) -> Plan:
    """Put labels for names wherever they stand in a plan."""
    return Plan.model_validate(_rename_all(json.loads(plan.to_json()), labels))


def _rename_all(value: Any, labels: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            _replace(key, labels): _rename_all(item, labels)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_rename_all(item, labels) for item in value]
    return _replace(value, labels) if isinstance(value, str) else value


def _replace(text: str, labels: Mapping[str, str]) -> str:
    # The longest first, since one name may begin another.
    for name in sorted(labels, key=len, reverse=True):
        text = text.replace(name, labels[name])
    return text
