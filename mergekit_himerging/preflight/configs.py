"""Configurations that must agree, since the merge has the base's; and dtypes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mergekit.common import dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_himerging.preflight.finding import Finding
from mergekit_himerging.preflight.headers import DTYPE_NAMES, FLOATS
from mergekit_himerging.preflight.models import Model

SHAPES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts"),
    *("moe_intermediate_size", "num_experts_per_tok", "kv_lora_rank", "q_lora_rank"),
    *(
        "n_embd",
        "n_head",
        "n_inner",
        "multi_query",
        "parallel_attn",
        "new_decoder_arch",
    ),
)
"""What tensors are cut by. Heads may differ in number without a shape that does."""

NUMBERS = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    *("hidden_act", "activation_function", "hidden_activation", "logit_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    *("logits_scaling", "attention_bias", "mlp_bias", "max_position_embeddings"),
    *("use_qk_norm", "qk_layernorm", "scale_embedding", "routed_scaling_factor"),
)
"""What changes a forward and no shape."""


def check_dtypes(
    config: MergeConfiguration, options: MergeOptions, models: Sequence[Model]
) -> Iterator[Finding]:
    """Compare the dtypes that are asked for with those of files and configurations."""
    for key, value in (
        ("dtype", config.dtype),
        ("out_dtype", config.out_dtype),
        ("--lora-merge-dtype", options.lora_merge_dtype),
    ):
        try:
            dtype = dtype_from_name(value)
        except RuntimeError:
            dtype = None
        if value and (dtype is None or not dtype.is_floating_point):
            yield Finding(
                "error",
                f"{key} must be one of float32, bfloat16, float16, float64, got "
                f"'{value}'; write one of them",
            )
    if config.dtype or config.out_dtype:
        return
    types = {
        model: sorted({s.dtype for s in model.stored.values() if s.dtype in FLOATS})
        for model in models
        if model.stored
    }
    base = next((model for model in types if model.is_base), None)
    if base is None or not types[base]:
        return
    for model, found in types.items():
        if set(found) - set(types[base]):
            yield Finding(
                "warning",
                f"models must have one dtype unless the recipe names it, got "
                f"{' and '.join(found)} in '{model.reference}' and "
                f"{' and '.join(types[base])} in the base, which the merge has; write "
                "'dtype: float32' and an 'out_dtype:'",
            )
    said = getattr(base.config, "dtype", None)
    if said is not None and DTYPE_NAMES.get(said) not in types[base]:
        yield Finding(
            "warning",
            f"{base.name} must have the dtype of its files in its config.json, got "
            f"{str(said).removeprefix('torch.')} there and {' and '.join(types[base])} "
            "in the files; the merge would say the same, so name 'out_dtype:'",
        )


def check_configs(models: Sequence[Model]) -> Iterator[Finding]:
    """Compare the configurations of all models with the base's.

    Args:
        models: of the recipe; those whose configuration cannot be read are left out.
    """
    known = [model for model in models if model.config is not None]
    base = next((model for model in known if model.is_base), None)
    if base is None:
        return
    for model in known:
        if model is not base:
            yield from _compare(model, base)


def _compare(model: Model, base: Model) -> Iterator[Finding]:
    kinds = {
        one: (
            list(getattr(one.config, "architectures", None) or []),
            one.config.model_type,
        )
        for one in (model, base)
    }
    if kinds[model] != kinds[base]:
        (names, kind), (base_names, base_kind) = kinds[model], kinds[base]
        same = (
            model.architecture is not None and model.architecture == base.architecture
        )
        yield Finding(
            "warning" if same and kind == base_kind else "error",
            f"'{model.reference}' must have the architecture of the base, got {names} "
            f"({kind}) and {base_names} ({base_kind}); merge models of one kind",
        )
        return
    texts = [one.text_config.to_dict() for one in (model, base)]
    for keys, level, remedy in (
        (SHAPES, "error", "merge models that were tuned from the base"),
        (NUMBERS, "warning", "the merge has the base's, so check that it fits both"),
    ):
        differing = [
            f"{key} {texts[0].get(key)!r} and {texts[1].get(key)!r}"
            for key in keys
            if texts[0].get(key) != texts[1].get(key)
            # What one leaves open is derived from the rest.
            and (keys is NUMBERS or None not in (texts[0].get(key), texts[1].get(key)))
        ]
        if differing:
            yield Finding(
                "error" if level == "error" else "warning",
                f"'{model.reference}' must have the configuration of the base "
                f"'{base.reference}', got {', '.join(differing)} there; {remedy}",
            )


def check_same_folder(models: Sequence[Model]) -> Iterator[Finding]:
    """Find models whose weights are the same files under two names."""
    seen: dict[tuple[Path, ...], Model] = {}
    for model in models:
        files = sorted({stored.path.resolve() for stored in model.stored.values()})
        if not files:
            continue
        first = seen.setdefault(tuple(files), model)
        if first is not model:
            yield Finding(
                "error",
                f"models must be distinct, got the same files in '{first.reference}' "
                f"and '{model.reference}'; remove one, or raise its weight",
            )
