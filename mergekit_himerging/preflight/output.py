"""What lies in the output folder already and would pass for a part of the merge."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mergekit.common import dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_himerging.preflight.finding import Finding, list_names
from mergekit_himerging.preflight.headers import Stored
from mergekit_himerging.preflight.models import Model

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}

MODEL_ENDS = (".safetensors", ".bin", ".index.json", ".gguf", ".pth", ".h5", ".msgpack")

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"),
    *("special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Files beside a model that transformers reads where they lie."""


def check_folder(
    config: MergeConfiguration,
    options: MergeOptions,
    models: Sequence[Model],
    out: Path,
) -> Iterator[Finding]:
    """Find files that the merge would not write over.

    Args:
        config: the recipe.
        options: MergeKit's.
        models: of the recipe.
        out: the output folder; it need not exist.
    """
    if not out.exists():
        return
    if not out.is_dir():
        yield Finding(
            "error", f"the output must be a folder, got a file ('{out}'); name another"
        )
        return
    names = sorted(path.name for path in out.iterdir())
    kept = {name for name in names if name.endswith(MODEL_ENDS)}
    kept |= {name for name in names if name == "adapter_config.json"}
    base = next((model for model in models if model.is_base), None)
    if kept and base is not None and _is_single(config, options, base):
        is_safe = options.safe_serialization
        kept -= {"model.safetensors" if is_safe else "pytorch_model.bin"}
    if kept:
        yield Finding(
            "error",
            f"the output folder must hold no files of another model, got "
            f"{list_names(sorted(kept))} ('{out}'), which would be read with it; "
            "remove them, or write somewhere else",
        )
    yield from _check_tokenizer(config, base, names, out)


def _is_single(config: MergeConfiguration, options: MergeOptions, base: Model) -> bool:
    """Whether the merge is surely one file, which is written over an earlier one."""
    dtype = dtype_from_name(config.out_dtype or config.dtype)

    def size(stored: Stored) -> int:
        count = 1
        for extent in stored.shape:
            count *= extent
        return count * (dtype.itemsize if dtype else BYTES.get(stored.dtype, 8))

    total = sum(size(stored) for stored in base.stored.values())
    # Twice, for a head or vocabulary that the base does not have.
    return 0 < 2 * total <= options.out_shard_size or (
        total > 0 and options.out_shard_size <= 0
    )


def _check_tokenizer(
    config: MergeConfiguration, base: Model | None, names: Sequence[str], out: Path
) -> Iterator[Finding]:
    if base is None or base.folder is None:
        return
    stale = [
        name
        for name in names
        if name in TOKENIZER_FILES and not (base.folder / name).exists()
    ]
    if config.chat_template or config.tokenizer or config.tokenizer_source:
        stale = [name for name in stale if name == "generation_config.json"]
    if stale:
        yield Finding(
            "warning",
            f"the output folder must hold no tokenizer files of another model, got "
            f"{list_names(stale)} ('{out}'), which the base does not have and the "
            "merge leaves there; remove them, or write somewhere else",
        )
