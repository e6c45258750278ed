"""Models to evaluate: what a recipe or a reference names, loaded when its turn comes.

Invariant: a merge is made in memory by MergeKit's own tasks, of any method, and holds
what `mergekit-yaml` would write.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.graph import Executor, Task
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
)

from mergekit_himerging.analysis.cache import folders_of, hash_model, make_fingerprint
from mergekit_himerging.analysis.references import (
    Loaded,
    load_reference,
    make_ready,
    pick_dtype,
)
from mergekit_himerging.analysis.session import make_plan, pick_device
from mergekit_himerging.evaluation.run import Candidate
from mergekit_himerging.plan import Plan
from mergekit_himerging.planning import PlannedMerge
from mergekit_himerging.recipe import to_document
from mergekit_himerging.seam import forget_loaders


def find_plan(merge: PlannedMerge) -> Plan | None:
    """Return the plan that a merge is made by: named, measured, or none."""
    plan = merge.read_plan()
    return make_plan(merge) if plan is None and merge.tasks else plan


def load_merge(merge: PlannedMerge, plan: Plan | None) -> Loaded:
    """Merge in memory.

    Args:
        merge: of any method.
        plan: what its layers are treated by.

    Raises:
        ValueError: transformers' model lacks a tensor that the merge would write, or
            needs one that it would not.
    """
    config, options = merge.config, merge.options
    tensors = merge.resolve(plan)
    by_task = {tensor.task: tensor for tensor in tensors}
    executor = Executor(
        [cast(Task[Any], task) for task in by_task],
        math_device=torch.device(options.device or "cpu"),
        storage_device=torch.device("cpu"),
    )
    state: dict[str, torch.Tensor] = {}
    for task, value in executor.run(quiet=True):
        if value is None:
            continue
        weight = by_task[cast(Any, task)].weight
        dtype = weight.force_dtype or config.out_dtype
        state[weight.name] = value.to(dtype_from_name(dtype)) if dtype else value
    tokenizer, model_config = merge.load_output()
    device = pick_device(options)
    auto: Any = AutoModelForCausalLM  # which itself loads from folders alone
    with torch.device("meta"):
        empty = auto.from_config(
            model_config, trust_remote_code=options.trust_remote_code
        )
    model, info = type(empty).from_pretrained(
        None,
        config=model_config,
        state_dict=state,
        dtype=pick_dtype(device, config.out_dtype or config.dtype),
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        wrong = sorted(map(str, info.get(kind) or ()))
        if wrong:
            words = kind.replace("_keys", "")
            raise ValueError(
                f"merged tensors must be the model's, got {len(wrong)} {words} "
                f"(the first: {wrong[0]}); merge to a folder and evaluate that"
            )
    generation = _read_generation(merge)
    if generation is not None:
        model.generation_config = generation
    return make_ready(model, device), tokenizer


def _read_generation(merge: PlannedMerge) -> GenerationConfig | None:
    """Read the end marks and the like that MergeKit would copy with the tokenizer."""
    config = merge.config
    if config.tokenizer or config.tokenizer_source or config.chat_template:
        return None
    donor = (config.base_model or config.referenced_models()[0]).model
    try:
        return GenerationConfig.from_pretrained(
            donor.path, revision=donor.revision or "main"
        )
    except OSError:
        return None


def make_merge_candidate(
    name: str, merge: PlannedMerge, plan: Plan | None
) -> Candidate:
    """Describe a merge that is made when its turn comes."""
    models = merge.config.referenced_models()
    content = {
        "recipe": to_document(merge.config),
        "plan": None if plan is None else plan.model_dump(mode="json"),
        "models": {str(m): hash_model(folders_of(m)) for m in models},
        "device": pick_device(merge.options).type,
    }
    return Candidate(
        name=name,
        role="merge",
        load=lambda: load_merge(merge, plan),
        fingerprint=make_fingerprint(content),
    )


def make_model_candidate(
    reference: ModelReference,
    options: MergeOptions,
    *,
    role: Any,
    task: str | None = None,
    others: Sequence[ModelReference] = (),
) -> Candidate:
    """Describe a model that is loaded when its turn comes."""
    forget_loaders()
    LoaderCache().setup(options=options)
    return Candidate(
        name=str(reference),
        role=role,
        load=lambda: load_reference(
            reference, options, others, device=pick_device(options)
        ),
        task=task,
        fingerprint=make_fingerprint(
            {
                "model": hash_model(folders_of(reference)),
                "device": pick_device(options).type,
            }
        ),
    )


def match_tasks(
    experts: Mapping[str, str], tasks: Iterable[str]
) -> dict[str, str | None]:
    """Match each expert to the held-out data that goes with its calibration data.

    Files match where the names before their first dot are equal, as in
    ``medical.calibration.jsonl`` and ``medical.test.jsonl``.

    Args:
        experts: calibration setting by model; empty where there is none.
        tasks: names of the held-out tasks.

    Returns:
        Task by model; None where no task, or more than one, matches.
    """

    def stem(name: str) -> str:
        return Path(name).name.split(".")[0].casefold()

    found: dict[str, str | None] = {}
    names = list(tasks)
    for model, calibration in experts.items():
        fitting = [
            name for name in names if calibration and stem(name) == stem(calibration)
        ]
        found[model] = fitting[0] if len(fitting) == 1 else None
    return found
