"""Adapters: their base, and whether the cached merge is still theirs.

MergeKit keys its cache by the paths alone, so an adapter that was trained anew, or a
merge that was stopped, is taken as it lies there.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from mergekit.common import dtype_from_name
from mergekit.options import MergeOptions

from mergekit_himerging.preflight.checkpoint import Checkpoint, read_checkpoint
from mergekit_himerging.preflight.finding import Finding
from mergekit_himerging.preflight.headers import (
    DTYPE_NAMES,
    describe_error,
    read_header,
    read_json,
)
from mergekit_himerging.preflight.models import Model, read_raw_config
from mergekit_himerging.preflight.samples import pick_evenly
from mergekit_himerging.seam import name_cached

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
QUANTISED_COPY = re.compile(r"(-unsloth)?-(bnb-)?[48]bit$")
PLAIN = frozenset(
    {
        *("peft_type", "task_type", "base_model_name_or_path", "auto_mapping"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias"),
        *("target_modules", "exclude_modules", "modules_to_save", "revision"),
        *("layers_to_transform", "layers_pattern", "peft_version", "megatron_core"),
        *("init_lora_weights", "qalora_group_size", "ensure_weight_tying"),
    }
)
"""Settings under which an adapter's merge is ``W + scale * B @ A``."""

ROWS = 16
"""Rows of a weight that are compared with the cached merge."""


def check_adapters(models: Sequence[Model], options: MergeOptions) -> Iterator[Finding]:
    """Check the adapters of a recipe before MergeKit merges them into their bases.

    Args:
        models: of the recipe.
        options: MergeKit's.
    """
    adapted = [model for model in models if model.reference.lora is not None]
    if adapted and not options.lora_merge_cache:
        yield Finding(
            "error",
            f"adapters must have a folder to be merged in, got none (for "
            f"'{adapted[0].reference}'); add '--lora-merge-cache cache/'",
        )
    for model in adapted:
        yield from _check_adapter(model, options)
    for model in models:
        if model.reference.lora is None and model.folder is not None:
            yield from _check_no_adapter(model)


def _check_no_adapter(model: Model) -> Iterator[Finding]:
    if model.folder is None or not model.stored:
        return
    if (model.folder / "adapter_config.json").exists():
        yield Finding(
            "warning",
            f"'{model.reference}' must be a model or an adapter, got both in one "
            "folder; only the model is merged, so write it as "
            f"'path/to/base+{model.reference}' if the adapter is meant",
        )


def _check_adapter(model: Model, options: MergeOptions) -> Iterator[Finding]:
    reference = model.reference
    if reference.lora is None:
        return
    folder = Path(reference.lora.path)
    if not folder.is_dir():
        return  # on a hub; MergeKit downloads it when it merges
    path = folder / "adapter_config.json"
    if not path.exists():
        yield Finding(
            "error",
            f"'{folder}' must be an adapter, got no 'adapter_config.json' "
            f"('{reference}'); write a whole model without '+'",
        )
        return
    try:
        settings = read_json(path)
        weights = next((p for n in WEIGHTS if (p := folder / n).exists()), None)
        if weights is None:
            raise ValueError(
                f"'{folder}' must hold 'adapter_model.safetensors', got no weights; "
                "download the whole adapter"
            )
        if weights.suffix == ".safetensors":
            read_header(weights)
    except (ValueError, OSError) as error:
        yield Finding("error", describe_error(error))
        return
    yield from _check_base(model, settings)
    if options.lora_merge_cache:
        yield from _check_cache(model, options, settings, weights)


def _check_base(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    expected = str(settings.get("base_model_name_or_path") or "")
    given = model.reference.model.path
    raw = read_raw_config(model.folder)[0] if model.folder is not None else {}
    names = {_short(given), _short(str(raw.get("_name_or_path") or given))}
    if model.folder is not None:
        names.add(_short(str(model.folder.resolve())))
    if expected and _short(expected) not in names:
        yield Finding(
            "warning",
            f"adapter '{model.reference.lora}' must be put on the model that it was "
            f"trained on, got '{given}' instead of '{expected}' "
            "(adapter_config.json); name that one before the '+'",
        )
    wanted = settings.get("target_modules") or []
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    wanted += settings.get("modules_to_save") or []
    touched = [w for w in wanted if str(w) in ("lm_head", "embed_tokens", "wte")]
    if touched and model.is_tied:
        yield Finding(
            "warning",
            f"adapter '{model.reference.lora}' must not change '{touched[0]}' of a "
            "base with tie_word_embeddings true, got both; head and embedding part in "
            "the merge, so compare its outputs with the adapter's",
        )


def _short(name: str) -> str:
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower()
    return QUANTISED_COPY.sub("", last)


def find_cached(model: Model, cache: str) -> Path:
    """Return the folder that MergeKit keeps an adapter's merge in."""
    lora = model.reference.lora
    if lora is None:
        raise ValueError(f"'{model.reference}' must have an adapter, got none")
    return Path(cache) / name_cached(model.reference)


def _check_cache(
    model: Model, options: MergeOptions, settings: Mapping[str, Any], weights: Path
) -> Iterator[Finding]:
    cached = find_cached(model, str(options.lora_merge_cache))
    if not cached.exists():
        return
    what = f"the cached merge of '{model.reference}'"
    remedy = f"remove '{cached}'"
    merged = read_checkpoint(cached)
    if not merged.is_whole or not (cached / "config.json").exists():
        facts = [f.text.partition("; ")[0] for f in merged.findings]
        fact = facts[0] if facts else "no config.json"
        yield Finding("error", f"{what} must be whole, got: {fact}; {remedy}")
        return
    wanted = dtype_from_name(options.lora_merge_dtype)
    types = sorted({stored.dtype for stored in merged.tensors.values()})
    if wanted is not None and DTYPE_NAMES[wanted] not in types:
        yield Finding(
            "error",
            f"{what} must be in '--lora-merge-dtype {options.lora_merge_dtype}', got "
            f"{' and '.join(types)}; {remedy}",
        )
        return
    is_current = _compare(model, merged, settings, weights)
    if is_current is None and _is_newer(weights, cached):
        is_current = False
    if is_current is False:
        yield Finding(
            "error",
            f"{what} must be of the adapter as it is now, got one of other weights; "
            f"MergeKit would take it as it is, so {remedy}",
        )


def _is_newer(weights: Path, cached: Path) -> bool:
    sources = [weights, weights.with_name("adapter_config.json")]
    made = (cached / "config.json").stat().st_mtime
    return max(path.stat().st_mtime for path in sources) > made


def _compare(
    model: Model, merged: Checkpoint, settings: Mapping[str, Any], weights: Path
) -> bool | None:
    """Merge a few rows again; None where that takes more than ``B @ A``."""
    rank = int(settings.get("r") or 0)
    base = model.folder
    is_plain = (
        settings.get("peft_type", "LORA") == "LORA"
        and rank > 0
        and settings.get("init_lora_weights", True) in (True, False, "gaussian")
    )
    if not is_plain or base is None or weights.suffix != ".safetensors":
        return None
    if {name for name, value in settings.items() if value} - PLAIN:
        return None
    stored = read_checkpoint(base).tensors
    root = math.sqrt(rank) if settings.get("use_rslora") else rank
    scale = float(settings.get("lora_alpha", rank)) / root
    with safetensors.safe_open(weights, framework="pt") as adapter:
        pairs = {}
        for down in sorted(adapter.keys()):
            name = down.removeprefix("base_model.model.")
            name = name.replace(".lora_A.weight", ".weight")
            up = down.replace(".lora_A.", ".lora_B.")
            if down != up and name in stored and name in merged.tensors:
                pairs[name] = (down, up)
        verdicts = []
        for name in pick_evenly(list(pairs), 8):
            shape = stored[name].shape
            if len(shape) != 2 or shape != merged.tensors[name].shape:
                continue
            start = max(0, (shape[0] - ROWS) // 2)
            rows = slice(start, start + ROWS)
            down, up = (adapter.get_tensor(key).float() for key in pairs[name])
            update = scale * (up[rows] @ down)
            before = _read_rows(stored[name].path, name, rows)
            after = _read_rows(merged.tensors[name].path, name, rows)
            if before is None or after is None or update.shape != before.shape:
                return None
            expected = before.float() + update
            rounding = torch.finfo(after.dtype).eps * float(expected.norm()) / 2
            size = float(update.norm())
            if size > 2 * rounding:  # else the update is lost in it
                off = float((after.float() - expected).norm())
                verdicts.append(off <= 0.1 * size + rounding)
    return all(verdicts) if verdicts else None


def _read_rows(path: Path, name: str, rows: slice) -> torch.Tensor | None:
    if path.suffix != ".safetensors":
        return None
    with safetensors.safe_open(path, framework="pt") as file:
        found: torch.Tensor = file.get_slice(name)[rows]
    return found if found.is_floating_point() else None
