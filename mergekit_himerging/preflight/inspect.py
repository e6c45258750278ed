"""All checks of a recipe, before and after MergeKit has planned it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_himerging.parameters import SELF
from mergekit_himerging.preflight.adapters import check_adapters
from mergekit_himerging.preflight.configs import (
    check_configs,
    check_dtypes,
    check_same_folder,
)
from mergekit_himerging.preflight.coverage import check_coverage
from mergekit_himerging.preflight.deltas import check_deltas
from mergekit_himerging.preflight.entry import recipe_folders
from mergekit_himerging.preflight.finding import Finding, sort_findings
from mergekit_himerging.preflight.heads import check_heads
from mergekit_himerging.preflight.models import Model, read_models
from mergekit_himerging.preflight.output import check_folder
from mergekit_himerging.preflight.planned import Planned
from mergekit_himerging.preflight.quantised import check_quantised
from mergekit_himerging.preflight.slices import check_slices
from mergekit_himerging.preflight.vocabulary import check_vocabularies
from mergekit_himerging.preflight.weights import check_weights
from mergekit_himerging.recipe import read_tasks

Check = Callable[[], Iterator[Finding]]


def inspect_recipe(
    config: MergeConfiguration,
    options: MergeOptions,
    out: Path | None,
    folders: Sequence[Path] = (),
) -> list[Finding]:
    """Check a recipe and its local models before MergeKit loads or plans anything.

    Reads configurations, indexes, headers, tokenizers and a few rows of heads and
    adapters. Models on a hub are checked by ``inspect_planned``.

    Args:
        config: the recipe as it was given.
        options: MergeKit's.
        out: where the merge will be written; None where nowhere.
        folders: where data is looked for before the working directory, beside that of
            the recipe that a command was started with.

    Returns:
        All that is found, errors first.
    """
    models, findings = read_models(config, options, loaded=False)
    found = [*findings, *_run(_list_shared(config, options, models))]
    found += _run(
        {
            "configurations": lambda: check_configs(models),
            "slices": lambda: check_slices(config, models),
            "adapters": lambda: check_adapters(models, options),
            "calibration": lambda: _check_namesake(config, folders),
        }
    )
    if out is not None:
        checks: dict[str, Check] = {
            "output folder": lambda: check_folder(config, options, models, out)
        }
        found += _run(checks)
    return sort_findings(found)


def inspect_planned(merge: Planned) -> list[Finding]:
    """Check a planned merge, with all models at hand, before a tensor is merged.

    Reads headers and at most a few megabytes of sampled values. What ``inspect_recipe``
    has found in local models may be found again, in the same words.

    Args:
        merge: as planned, downloaded models and merged adapters in MergeKit's cache.

    Returns:
        All that is found, errors first.
    """
    models, findings = read_models(merge.config, merge.options, loaded=True)
    found = [*findings, *_run(_list_shared(merge.config, merge.options, models))]
    found += _run(
        {
            "weights": lambda: check_weights(merge),
            "tensors": lambda: check_coverage(merge, models),
        }
    )
    if not any(finding.level == "error" for finding in found):
        found += _run({"deltas": lambda: check_deltas(merge, models)})
    return sort_findings(found)


def _check_namesake(
    config: MergeConfiguration, folders: Sequence[Path]
) -> Iterator[Finding]:
    """Warn of a file that has the name of what is no file."""
    if not any(task.calibration == SELF for task in read_tasks(config)):
        return
    places = [*folders, *recipe_folders(), Path.cwd()]
    found = next((folder / SELF for folder in places if (folder / SELF).exists()), None)
    if found is not None:
        yield Finding(
            "warning",
            f"'calibration: {SELF}' lets each expert draw rows from itself, and "
            f"'{found}' is not read; a file of that name is './{SELF}'",
        )


def _list_shared(
    config: MergeConfiguration, options: MergeOptions, models: Sequence[Model]
) -> dict[str, Check]:
    """List the checks of what may be at hand only after a download."""

    def check_files() -> Iterator[Finding]:
        for model in models:
            if model.checkpoint is not None:
                yield from model.checkpoint.findings
            yield from check_quantised(model)

    return {
        "files": check_files,
        "heads": lambda: check_heads(models),
        "vocabularies": lambda: check_vocabularies(config, models),
        "dtypes": lambda: check_dtypes(config, options, models),
        "names": lambda: check_same_folder(models),
    }


def _run(checks: dict[str, Check]) -> list[Finding]:
    """Run checks one after the other; one that fails itself is a warning."""
    found = []
    for name, check in checks.items():
        try:
            found += list(check())
        except Exception as error:  # a check must never stop a merge that would work
            reason = " ".join(str(error).split())
            found.append(
                Finding(
                    "warning",
                    f"the check of {name} must run, got {type(error).__name__}: "
                    f"{reason}; look at what it names yourself",
                )
            )
    return found
