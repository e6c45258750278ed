"""Weights that are codes, not numbers, which a merge would add up all the same."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mergekit_himerging.preflight.finding import Finding, list_names
from mergekit_himerging.preflight.headers import FLOATS, Stored
from mergekit_himerging.preflight.models import Model, read_raw_config

BUFFERS = re.compile(
    r"(\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|position_ids|"
    r"num_batches_tracked|token_type_ids|tid2eid|(^|\.)mask|causal_mask)$"
)
"""Tensors that are whole numbers or flags by nature."""

CODES = re.compile(
    r"\.(qweight|qzeros|g_idx|scales|q_weight|q_scale|q_scale_max|q_invperm|q_perm|"
    r"q_groups|absmax|quant_map|nested_absmax|nested_quant_map|SCB|weight_format|CB|"
    r"weight_scale|weight_scale_inv|weight_packed|weight_shape|weight_zero_point|"
    r"input_scale|output_scale|k_scale|v_scale|W_q|codes|codebooks|weight_global_scale|"
    r"input_global_scale|activation_scale|scale_weight|pre_quant_scale)$"
    r"|\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)$"
    r"|_(blocks|scales)$"
)
"""Names beside quantised weights: GPTQ, AWQ, bitsandbytes, FP8, MXFP4, HQQ, AQLM."""

SETTINGS = ("quantization_config", "compression_config", "quantization")
"""Entries of ``config.json`` that say how weights are quantised."""

REMEDY = "merge the model before quantisation"


def check_quantised(model: Model) -> Iterator[Finding]:
    """Find quantised weights of one model, by type, by name and by configuration."""
    stored = model.stored
    names = [name for name in stored if _is_code(name, stored[name])]
    if names:
        types = sorted({stored[name].dtype for name in names})
        yield Finding(
            "error",
            f"{model.name} must have weights in floating point, got "
            f"{' and '.join(types)} ({list_names(sorted(names))}); {REMEDY}",
        )
    if model.folder is None:
        return
    raw, findings = read_raw_config(model.folder)
    yield from findings
    for settings in (raw, *(v for k, v in raw.items() if k == "text_config")):
        yield from _check_settings(model, settings, has_codes=bool(names))


def _is_code(name: str, stored: Stored) -> bool:
    if BUFFERS.search(name):
        return False
    return stored.dtype not in FLOATS or CODES.search(name) is not None


def _check_settings(
    model: Model, settings: Mapping[str, Any], *, has_codes: bool
) -> Iterator[Finding]:
    for key in SETTINGS:
        given = settings.get(key) if isinstance(settings, Mapping) else None
        if given and not has_codes:
            how = given.get("quant_method", "") if isinstance(given, Mapping) else ""
            yield Finding(
                "error",
                f"{model.name} must not be quantised, got '{key}' "
                f"{how or 'set'} (config.json); {REMEDY}, or remove the entry if the "
                "weights are not quantised",
            )
