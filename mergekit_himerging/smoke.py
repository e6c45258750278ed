"""A line from the base and one from the merge, before a merge gets its name.

Invariant: each is loaded as transformers loads its folder, in the dtype of its files,
one at a time. A test that cannot be made stops no merge, and is never left out in
silence.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from mergekit_himerging.analysis.continuation import find_ends
from mergekit_himerging.analysis.session import pick_device
from mergekit_himerging.parameters import RecipeError

LOG = logging.getLogger(__name__)

PROMPT = "Once upon a time"

N_TOKENS = 16
"""Most new tokens of a line."""

N_REPEATED = 8
"""A line has degenerated where so many of its last tokens are the same."""

MEMORY_RATIO = 1.2
"""Memory that a model needs, by the size of its files."""

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux says what a container may take."""


@dataclass(frozen=True, slots=True)
class _Line:
    """What a model wrote.

    Attributes:
        text: without the prompt and special tokens.
        is_finite: whether all logits were.
        is_degenerate: whether it ended in one token again and again.
    """

    text: str
    is_finite: bool
    is_degenerate: bool


def try_merge(
    folder: Path, base: ModelReference, options: MergeOptions
) -> dict[str, str]:
    """Let the base and the merge go on from one prompt, by the likeliest token.

    A merge that repeats one token where the base does not is a warning, and so is a
    test that cannot be made: for want of a tokenizer or of memory, or since the base
    is no causal language model that transformers can load.

    Args:
        folder: the finished merge.
        base: as MergeKit has loaded it.
        options: MergeKit's; the math device runs both.

    Returns:
        What each wrote, and the prompt, by words for them; none where it was skipped.

    Raises:
        RecipeError: transformers can run the base but not the merge, or only the
            merge's logits are not finite.
    """
    device = pick_device(options)
    if not any(folder.glob("tokenizer*")):  # as with --no-copy-tokenizer
        _say_skipped("it has no tokenizer")
        return {}
    original = Path(LoaderCache().get(base).index.base_path)
    named = (base.model.path, base.model.revision)
    trusts = options.trust_remote_code
    try:
        _check_memory((original, folder), device)
        before = _write_line(original, named, device, trusts=trusts)
    except Exception as error:  # of transformers or of a model's own code
        _say_skipped(f"'{base}' was not run: {_one_line(error)}")
        return {}
    try:
        after = _write_line(folder, (str(folder), None), device, trusts=trusts)
    except (MemoryError, torch.OutOfMemoryError) as error:
        _say_skipped(f"it does not fit: {_one_line(error)}")
        return {}
    except Exception as error:  # the same
        raise RecipeError(
            f"the merge must run as its base does, got {_one_line(error)} (in "
            f"{folder.name}); it was removed, and 'smoke_test: false' keeps it"
        ) from error
    if before.is_finite and not after.is_finite:
        raise RecipeError(
            "the merge must give finite logits as its base does, got NaN or infinity "
            f"after '{PROMPT}' (in {folder.name}); it was removed: lower the weights, "
            "or choose an out_dtype of more range; 'smoke_test: false' keeps it"
        )
    found = {"prompt": PROMPT, "base": before.text, "merge": after.text}
    if not before.is_finite:
        found["found"] = "logits of base and merge that are not finite"
    elif after.is_degenerate and not before.is_degenerate:
        found["found"] = "the merge repeats one token where the base does not"
    if "found" in found:
        LOG.warning("hi_merging: smoke test: %s; look at it", found["found"])
    return found


def _say_skipped(reason: str) -> None:
    LOG.warning("hi_merging: no smoke test of the merge, since %s", reason)


def _write_line(
    folder: Path,
    tokens: tuple[str, str | None],
    device: torch.device,
    *,
    trusts: bool,
) -> _Line:
    """Load a model and let it go on; ``tokens`` names its tokenizer and revision."""
    name, revision = tokens
    tokenizer = AutoTokenizer.from_pretrained(
        name, revision=revision, trust_remote_code=trusts
    )
    model: Any = _load(folder, trusts=trusts)
    model.to(device)
    # Its own settings may sample or penalise.
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=N_TOKENS,
        eos_token_id=find_ends(model, tokenizer) or None,
        pad_token_id=tokenizer.pad_token_id or 0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    prompt = torch.tensor([tokenizer(PROMPT)["input_ids"]], device=device)
    with torch.inference_mode():
        written = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt)
        )
    new = written.sequences[0, prompt.shape[1] :].tolist()
    last = new[-N_REPEATED:]
    return _Line(
        text=str(tokenizer.decode(new, skip_special_tokens=True)),
        is_finite=all(bool(logits.isfinite().all()) for logits in written.logits),
        is_degenerate=len(last) == N_REPEATED and len(set(last)) == 1,
    )


def _load(folder: Path, *, trusts: bool) -> PreTrainedModel:
    """Load a folder as transformers does by itself, without its bars.

    Raises:
        ValueError: it is another kind of model, or has no values for a tensor.
    """
    auto: Any = AutoModelForCausalLM
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, info = auto.from_pretrained(
            folder, trust_remote_code=trusts, output_loading_info=True
        )
    finally:
        if shows_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    kind = type(model).__name__
    named = (model.config.architectures or [kind])[0]
    if named != kind:
        raise ValueError(f"only causal language models can write, got {named}")
    missing = sorted(map(str, info["missing_keys"]))
    if missing:
        raise ValueError(
            f"{len(missing)} tensors without a value (the first: {missing[0]})"
        )
    result: PreTrainedModel = model.eval()
    return result


def _check_memory(folders: tuple[Path, ...], device: torch.device) -> None:
    """Refuse to load what does not fit.

    Raises:
        ValueError: a model takes more than is free.
    """
    needed = int(MEMORY_RATIO * max(map(_measure_files, folders)))
    for place, free in _list_free(device):
        if free < needed:
            raise ValueError(
                f"{place} must have {needed / 2**30:.2f} GiB for a model, got "
                f"{free / 2**30:.2f} GiB; load it where there is more"
            )


def _measure_files(folder: Path) -> int:
    """Return the size of a folder's weights, bytes."""
    stored = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
    return sum(path.stat().st_size for path in stored)


def _list_free(device: torch.device) -> Iterator[tuple[str, int]]:
    """Yield what must hold a model, with its free bytes."""
    yield "memory", psutil.virtual_memory().available
    try:
        bound = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        lines = (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # no container, or one without a bound
        pass
    else:
        counts = dict(line.split() for line in lines)
        cached = int(counts["inactive_file"]) + int(counts["active_file"])
        yield "the container", bound - used + cached
    if device.type == "cuda":
        yield "the accelerator", torch.cuda.mem_get_info(device)[0]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."
