"""The rows of `calibration: self`, drawn once and kept.

Invariant: they lie in the cache and never beside a merge, for a model may know texts of
its training by heart; the plan holds their hashes, as it does of a file's rows.
"""

import json
import logging

import torch

from mergekit_himerging.analysis.cache import (
    find_place,
    folders_of,
    hash_code,
    hash_model,
    make_fingerprint,
    read_versions,
)
from mergekit_himerging.analysis.drawing import draw_rows, open_turn
from mergekit_himerging.analysis.references import load_reference
from mergekit_himerging.analysis.row_files import read_rows
from mergekit_himerging.analysis.rows import Row
from mergekit_himerging.files import write_text
from mergekit_himerging.planning import PlannedMerge
from mergekit_himerging.recipe import TaskSettings

LOG = logging.getLogger(__name__)


def make_self_rows(
    merge: PlannedMerge, task: TaskSettings, device: torch.device, *, may_draw: bool
) -> tuple[Row, ...] | None:
    """Find the rows that a task's expert has drawn from itself, or draw them.

    Args:
        merge: whose task it is.
        task: with calibration ``self``.
        device: where the expert runs, whole.
        may_draw: whether rows that are not kept are drawn.

    Returns:
        The rows; None where there are none and none may be drawn.

    Raises:
        ValueError: the chat template or the expert does not allow it.
    """
    templates, _ = merge.load_output()
    turn = open_turn(templates)
    config, options = merge.config, merge.options
    models = {str(model): model for model in config.referenced_models()}
    expert, base = models[task.model], config.base_model
    sources = dict.fromkeys(m for m in (expert, base) if m is not None)
    fingerprint = make_fingerprint(
        {
            "files": {str(m): hash_model(folders_of(m)) for m in sources},
            "turn": None if turn is None else [turn.before, turn.after],
            "samples": task.samples,
            "seed": merge.settings["seed"],
            "device": device.type,
            "versions": read_versions(),
            "code": hash_code(),
        }
    )
    path = find_place(f"self-{fingerprint}.jsonl")
    if path.is_file():
        try:
            rows = read_rows(str(path), [])
        except ValueError as error:
            LOG.warning("hi_merging: drawn rows are drawn again: %s", error)
        else:
            merge.say(f"rows drawn from '{task.model}' are read from {path}")
            return rows
    if not may_draw:
        return None
    merge.say(f"drawing {task.samples} rows from '{task.model}' itself")
    rows = draw_rows(
        load_reference(
            expert, options, [m for m in sources if m != expert], device=device
        ),
        turn,
        name=task.model,
        n_rows=task.samples,
        seed=merge.settings["seed"],
    )
    lines = [json.dumps(_to_record(row), ensure_ascii=False) + "\n" for row in rows]
    try:
        write_text(path, "".join(lines))
    except OSError as error:
        LOG.warning("hi_merging: drawn rows are not kept for later runs: %s", error)
    else:
        merge.say(f"rows drawn from '{task.model}' written to {path}")
    return rows


def _to_record(row: Row) -> dict[str, object]:
    """Write a drawn row as a file of calibration data has it."""
    if row.shape == "completion":
        return {"prompt": row.prompt, "completion": row.completion}
    turns = (*row.turns, ("assistant", row.completion))
    record: dict[str, object] = {
        "messages": [{"role": role, "content": content} for role, content in turns]
    }
    return {**record, "cut": True} if row.is_cut else record
