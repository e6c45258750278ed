"""Any transformers language model, run one block at a time.

No code of any architecture is known here: the model's own forward is run with its
blocks' `forward` overridden, the arguments that it hands to each block are recorded,
and the real blocks are then called with them. Invariant: weights are never held; every
call gets them, and a call that lacks one fails instead of reading uninitialised memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate.big_modeling import init_empty_weights
from torch.func import functional_call

Weights = Mapping[str, torch.Tensor]

IMMUTABLE = (
    *(type(None), bool, int, float, complex, str, bytes, slice),
    *(torch.Tensor, torch.dtype, torch.device, torch.Size),
)


class UnsupportedModelError(ValueError):
    """A model that cannot be replayed block by block, so it is not analysed."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the model hands to one block besides the hidden state.

    Attributes:
        arguments: positional arguments after the hidden state.
        keywords: keyword arguments.
        hidden_keyword: the hidden state's keyword, None where it is positional.
    """

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    hidden_keyword: str | None


@dataclass(frozen=True, slots=True)
class Recording:
    """One batch up to the first block.

    Attributes:
        hidden: input of the first block, ``[rows, tokens, width]``.
        calls: the other arguments of every block.
    """

    hidden: torch.Tensor
    calls: tuple[Call, ...]


RunBlock = Callable[[torch.Tensor, Call], torch.Tensor]
"""Hidden state and call of one block -> its output, ``[rows, tokens, width]``."""


class Replay:
    """A model without weights whose blocks can be called one by one.

    Args:
        config: the model's configuration.
        n_layers: how many decoder blocks it must have.
        dtype: of buffers and activations.
        device: where buffers lie and calls run.
        trust_remote_code: as transformers takes it.

    Raises:
        UnsupportedModelError: it is no causal language model, its blocks cannot be told
            apart, or they carry state from one to the next.
    """

    def __init__(
        self,
        config: transformers.PretrainedConfig,
        *,
        n_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.model = _build(config, dtype, device, trust_remote_code)
        self.name = type(self.model).__name__
        self.blocks_name = _find_blocks(self.model, n_layers)
        self.blocks = list(self.model.get_submodule(self.blocks_name).children())
        self._holders = [_Holder(block) for block in self.blocks]
        self._intercept: Callable[..., Any] | None = None
        for layer, block in enumerate(self.blocks):
            block.forward = self._dispatch(layer, block.forward)
        self._outputs: list[Any] = [None] * n_layers
        self._discover_outputs()

    @property
    def width(self) -> int:
        """Entries of one position's hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def vocabulary(self) -> int:
        """Entries of one position's logits."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def outer_names(self) -> list[str]:
        """Names of the weights outside the blocks; of tied ones, one."""
        prefix = self.blocks_name + "."
        return [
            name for name in _weight_names(self.model) if not name.startswith(prefix)
        ]

    def block_names(self, layer: int) -> list[str]:
        """Names of one block's weights, inside the block."""
        return _weight_names(self.blocks[layer])

    def pick_weights(
        self, planned: Weights, names: Sequence[str], prefix: str
    ) -> Weights:
        """Pick the weights of a module from those that MergeKit planned.

        Args:
            planned: by MergeKit's name: the checkpoint's, or the module's own, with or
                without the prefix of the headless model.
            names: the module's weights, by local name.
            prefix: of the module in the model, with its dot.

        Raises:
            UnsupportedModelError: a weight is missing; nothing replaces it.
        """
        headless = getattr(self.model, "base_model_prefix", "") + "."
        picked = {}
        for name in names:
            full = prefix + name
            tied = [full, full.removeprefix(headless)]
            found = next((planned[n] for n in tied if n in planned), None)
            if found is None:
                raise UnsupportedModelError(
                    f"weight '{full}' of {self.name} is not among the tensors that "
                    "MergeKit merges, so the model cannot be analysed; "
                    "remove 'calibration' for the model-wise merge"
                )
            picked[name] = found.to(self.device, self.dtype)
        return picked

    def pick_block(self, planned: Weights, layer: int) -> Weights:
        """Pick one block's weights, see `pick_weights`."""
        prefix = f"{self.blocks_name}.{layer}."
        return self.pick_weights(planned, self.block_names(layer), prefix)

    def pick_outer(self, planned: Weights) -> Weights:
        """Pick the weights outside the blocks, see `pick_weights`."""
        return self.pick_weights(planned, self.outer_names, "")

    def record(
        self, outer: Weights, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> Recording:
        """Run the model up to its first block and note what every block is handed.

        Args:
            outer: weights outside the blocks.
            input_ids: ``[rows, tokens]``, padded on the right.
            attention_mask: ``[rows, tokens]``, 0 on padding.
        """
        calls: list[Call] = []
        first: list[torch.Tensor] = []

        def note(layer: int, _: Any, *arguments: Any, **keywords: Any) -> Any:
            hidden, call = _split(arguments, keywords)
            if layer == 0:
                first.append(hidden)
            calls.append(call)
            return self._wrap(layer, hidden)

        self._run_model(note, outer, input_ids, attention_mask)
        return Recording(first[0], tuple(calls))

    def with_block(
        self, layer: int, weights: Weights, work: Callable[[RunBlock], None]
    ) -> None:
        """Give ``work`` one real block with these weights to call as often as it likes.

        Raises:
            UnsupportedModelError: the weights are not exactly the block's.
        """
        wanted = self.block_names(layer)
        if set(weights) != set(wanted):
            odd = sorted(set(weights) ^ set(wanted))
            raise UnsupportedModelError(f"weights of block {layer} must fit, got {odd}")
        named = {f"block.{name}": tensor for name, tensor in weights.items()}
        functional_call(self._holders[layer], named, (work,))

    def read_out(self, outer: Weights, hidden: torch.Tensor) -> torch.Tensor:
        """Apply what follows the last block.

        Args:
            outer: weights outside the blocks.
            hidden: outputs of the last block, ``[rows, tokens, width]``; any positions
                side by side, since norm and head act on each alone.

        Returns:
            Logits, ``[rows, tokens, vocabulary]``.
        """
        last = len(self.blocks) - 1

        def replace(layer: int, _: Any, *arguments: Any, **keywords: Any) -> Any:
            given, _call = _split(arguments, keywords)
            return self._wrap(layer, hidden if layer == last else given)

        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
        logits: torch.Tensor = self._run_model(replace, outer, ids, None)
        return logits

    def full_forward(
        self,
        outer: Weights,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        weights_of: Callable[[int], Weights],
    ) -> torch.Tensor:
        """Run the model's own forward, fetching each block's weights as it comes.

        Returns:
            Logits, ``[rows, tokens, vocabulary]``.
        """

        def fetch(layer: int, real: Any, *arguments: Any, **keywords: Any) -> Any:
            named = {f"block.{n}": t for n, t in weights_of(layer).items()}
            output: list[Any] = []

            def work(_: RunBlock) -> None:
                output.append(real(*arguments, **keywords))

            functional_call(self._holders[layer], named, (work,))
            return output[0]

        logits: torch.Tensor = self._run_model(fetch, outer, input_ids, attention_mask)
        return logits

    def _run_model(
        self,
        intercept: Callable[..., Any],
        outer: Weights,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        if set(outer) != set(self.outer_names):
            odd = sorted(set(outer) ^ set(self.outer_names))
            raise UnsupportedModelError(f"weights outside blocks must fit, got {odd}")
        keywords = {"input_ids": input_ids, "use_cache": False, "return_dict": True}
        if attention_mask is not None:
            keywords["attention_mask"] = attention_mask
        self._intercept = intercept
        try:
            output = functional_call(self.model, dict(outer), (), keywords)
        finally:
            self._intercept = None
        logits: torch.Tensor = output.logits
        return logits

    def _dispatch(self, layer: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **keywords: Any) -> Any:
            if self._intercept is None:
                return real(*arguments, **keywords)
            return self._intercept(layer, real, *arguments, **keywords)

        return forward

    def _wrap(self, layer: int, hidden: torch.Tensor) -> Any:
        """Put a hidden state into the block's own type of output."""
        output = self._outputs[layer]
        return hidden if output is None else type(output)((hidden, *output[1:]))

    @torch.no_grad()
    def _discover_outputs(self) -> None:
        """Run a block of each class, on two tokens and zeros, for its output type.

        Raises:
            UnsupportedModelError: a block is handed state that outlives the call.
        """
        known: dict[type, Any] = {}

        def run(layer: int, real: Any, *arguments: Any, **keywords: Any) -> Any:
            _refuse_state(self.name, layer, arguments, keywords)
            kind = type(self.blocks[layer])
            if kind in known:
                self._outputs[layer] = known[kind]
                return self._wrap(layer, _split(arguments, keywords)[0])
            weights = _zeros(self.blocks[layer], "block.{}", self.device, self.dtype)
            output: list[Any] = []

            def work(_: RunBlock) -> None:
                output.append(real(*arguments, **keywords))

            functional_call(self._holders[layer], weights, (work,))
            if isinstance(output[0], tuple):
                self._outputs[layer] = output[0]
            elif not isinstance(output[0], torch.Tensor):
                raise UnsupportedModelError(
                    f"block {layer} of {self.name} must return a tensor or a tuple, "
                    f"got {type(output[0]).__name__}"
                )
            known[kind] = self._outputs[layer]
            return output[0]

        names = set(self.outer_names)
        zeros = _zeros(self.model, "{}", self.device, self.dtype, only=names)
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        self._run_model(run, zeros, ids, torch.ones_like(ids))


class _Holder(torch.nn.Module):
    """Lets one swap of weights serve many calls of a block."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, work: Callable[[RunBlock], None]) -> None:
        work(self._run)

    def _run(self, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        if call.hidden_keyword is None:
            output = self.block(hidden, *call.arguments, **call.keywords)
        else:
            keywords = {**call.keywords, call.hidden_keyword: hidden}
            output = self.block(*call.arguments, **keywords)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result


def _build(
    config: transformers.PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> transformers.PreTrainedModel:
    try:
        # Buffers stay real: on the meta device rotary tables would be garbage.
        with init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except ValueError as error:
        raise UnsupportedModelError(
            f"only causal language models can be analysed, got {config.model_type}; "
            "remove 'calibration' for the model-wise merge"
        ) from error
    named = (config.architectures or [type(model).__name__])[0]
    if type(model).__name__ != named:
        # Masked models build as causal ones, though their positions see the targets.
        raise UnsupportedModelError(
            f"only causal language models can be analysed, got {named}; "
            "remove 'calibration' for the model-wise merge"
        )
    model.tie_weights()
    model.eval()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(
                name,
                buffer.to(device),
                persistent=name not in module._non_persistent_buffers_set,
            )
    result: transformers.PreTrainedModel = model
    return result


def _find_blocks(model: torch.nn.Module, n_layers: int) -> str:
    """Find the outermost list of as many modules as there are layers."""
    lists: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == n_layers
    ]
    outermost = [
        name
        for name in lists
        if not any(name.startswith(other + ".") for other in lists if other != name)
    ]
    if len(outermost) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} must have one list of {n_layers} blocks, "
            f"got {outermost}; remove 'calibration' for the model-wise merge"
        )
    return outermost[0]


def _weight_names(module: torch.nn.Module) -> list[str]:
    """Names of parameters and persistent buffers, tied ones once."""
    persistent = set(module.state_dict())
    parameters = [name for name, _ in module.named_parameters()]
    buffers = [name for name, _ in module.named_buffers() if name in persistent]
    return parameters + buffers


def _zeros(
    module: torch.nn.Module,
    pattern: str,
    device: torch.device,
    dtype: torch.dtype,
    only: set[str] | None = None,
) -> dict[str, torch.Tensor]:
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        pattern.format(name): torch.zeros(
            state[name].shape,
            device=device,
            dtype=dtype if state[name].is_floating_point() else state[name].dtype,
        )
        for name in _weight_names(module)
        if only is None or name in only
    }


def _split(
    arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[torch.Tensor, Call]:
    """Take the hidden state out of a block's arguments."""
    if arguments:
        return arguments[0], Call(arguments[1:], keywords, None)
    rest = dict(keywords)
    if "hidden_states" not in rest:
        raise UnsupportedModelError(
            f"blocks must be handed 'hidden_states', got {sorted(rest)}; "
            "remove 'calibration' for the model-wise merge"
        )
    return rest.pop("hidden_states"), Call((), rest, "hidden_states")


def _refuse_state(
    model: str, layer: int, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> None:
    """Refuse what a block could write to: it would leak from stream to stream."""
    handed = {**{str(i): value for i, value in enumerate(arguments)}, **keywords}
    for name, value in handed.items():
        if not _is_immutable(value):
            raise UnsupportedModelError(
                f"blocks of {model} hand on state ('{name}', a {type(value).__name__}, "
                f"in block {layer}), so their layers cannot be measured one by one; "
                "remove 'calibration' for the model-wise merge"
            )


def _is_immutable(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_immutable(item) for item in value)
    return isinstance(value, IMMUTABLE)
