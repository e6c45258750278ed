"""Streamed scores against brute force: whole state dicts swapped, full forwards.

The oracle shares nothing with the engine: it adds deltas to state dicts, loads them
into a transformers model and runs its own forward on one text at a time, unpadded.
"""

import math
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from mergekit_himerging.analysis.calibration import (
    NotANumberError,
    Sample,
    TokenSequence,
    make_batches,
)
from mergekit_himerging.analysis.jobs import Front, Job, Measured, Variants
from mergekit_himerging.analysis.replay import Replay, UnsupportedModelError
from mergekit_himerging.analysis.selfcheck import SelfCheck, pick_rows
from mergekit_himerging.analysis.streams import run_jobs, split_jobs

Tensors = dict[str, torch.Tensor]

SHAPE = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
WINDOW = 4
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR_ATTENTION = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make_config(name: str) -> transformers.PretrainedConfig:
    t = transformers
    makers: Mapping[str, Any] = {
        "llama": lambda: t.LlamaConfig(**SHAPE),
        "llama, tied": lambda: t.LlamaConfig(**SHAPE, tie_word_embeddings=True),
        "qwen2": lambda: t.Qwen2Config(**SHAPE),
        "qwen2, window": lambda: t.Qwen2Config(
            **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
        ),
        "qwen3": lambda: t.Qwen3Config(**SHAPE),
        "mistral, window": lambda: t.MistralConfig(**SHAPE, sliding_window=WINDOW),
        "gemma2": lambda: t.Gemma2Config(
            **SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=8
        ),
        "gemma3": lambda: t.Gemma3TextConfig(
            **SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=8
        ),
        "phi3": lambda: t.Phi3Config(**SHAPE),
        "gpt2": lambda: t.GPT2Config(
            **IDS, vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64
        ),
        "olmo2": lambda: t.Olmo2Config(**SHAPE),
        "cohere": lambda: t.CohereConfig(**SHAPE, use_qk_norm=True),
        "granite": lambda: t.GraniteConfig(**SHAPE),
        "mixtral": lambda: t.MixtralConfig(**SHAPE, num_local_experts=4),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**SHAPE, **EXPERTS),
        "qwen3_next": lambda: t.Qwen3NextConfig(
            **{**SHAPE, "num_hidden_layers": 4},
            **EXPERTS,
            **LINEAR_ATTENTION,
            shared_expert_intermediate_size=16,
        ),
        "mamba": lambda: t.MambaConfig(**SMALL, **IDS, state_size=4),
        "falcon": lambda: t.FalconConfig(
            **SMALL,
            **IDS,
            num_attention_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
            tie_word_embeddings=False,
        ),
    }
    return makers[name]()


ARCHITECTURES = [
    *("llama", "llama, tied", "qwen2", "qwen2, window", "qwen3", "mistral, window"),
    *("gemma2", "gemma3", "phi3", "gpt2", "olmo2", "cohere", "granite", "mixtral"),
    *("qwen3_moe", "qwen3_next", "mamba", "falcon"),
]


class Family:
    """A base, experts and their merge, as state dicts; names as in the module."""

    def __init__(self, name: str, n_experts: int) -> None:
        self.config = make_config(name)
        self.n_layers = self.config.num_hidden_layers
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(self.config).float().eval()
        generator = torch.Generator().manual_seed(1)

        def noise(tensor: torch.Tensor, by: float) -> torch.Tensor:
            if not tensor.is_floating_point():
                return torch.zeros_like(tensor)
            return by * torch.randn(tensor.shape, generator=generator)

        state = self.model.state_dict()
        self.base = {n: t + noise(t, 0.1) for n, t in state.items()}
        self.deltas = {
            f"expert{i}": {n: noise(t, 0.05) for n, t in state.items()}
            for i in range(n_experts)
        }
        for tensors in (self.base, *self.deltas.values()):
            self._tie(tensors)
        share = 1 / n_experts
        self.merge_delta = {
            n: sum(share * delta[n] for delta in self.deltas.values())
            for n in self.base
        }

    def _tie(self, tensors: Tensors) -> None:
        if self.config.tie_word_embeddings and "lm_head.weight" in tensors:
            embedding = self.model.get_input_embeddings().weight
            name = next(n for n, p in self.model.named_parameters() if p is embedding)
            tensors["lm_head.weight"] = tensors[name]

    def plus(self, delta: Tensors, layers: set[int] | None = None) -> Tensors:
        """Base plus a delta: whole (None), or of the blocks ``layers`` only."""
        return {
            name: tensor + delta[name]
            if layers is None or layer_of(name) in layers
            else tensor
            for name, tensor in self.base.items()
        }

    def minus_layer(self, delta: Tensors, layer: int) -> Tensors:
        """Base plus a delta, but for the blocks of one layer."""
        return {
            name: tensor if layer_of(name) == layer else tensor + delta[name]
            for name, tensor in self.base.items()
        }

    def score(self, state: Tensors, texts: list[TokenSequence]) -> torch.Tensor:
        """Log-probabilities of all targets by full forwards, one text at a time."""
        self.model.load_state_dict(state)
        scores = []
        with torch.no_grad():
            for text in texts:
                logits = self.model(torch.tensor([text.ids]), use_cache=False).logits[0]
                for position in range(text.n_prompt, len(text.ids)):
                    row = logits[position - 1].double()
                    scores.append((row - row.logsumexp(0))[text.ids[position]])
        return torch.stack(scores)

    def load(self, layer: int | None) -> Variants:
        """Hand out one layer's weights, as the engine's source."""

        def pick(state: Tensors) -> Tensors:
            return {n: t for n, t in state.items() if layer_of(n) == layer}

        return Variants(
            base=pick(self.base),
            singles={m: pick(self.plus(d)) for m, d in self.deltas.items()},
            merged=pick(self.plus(self.merge_delta)),
        )

    def load_outer(self, front: Front, model: str) -> Tensors:
        found = self.load(None)
        return found.singles[model] if front == "single" else getattr(found, front)

    def make_replay(self) -> Replay:
        return Replay(
            self.config,
            n_layers=self.n_layers,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


def layer_of(name: str) -> int | None:
    numbers = [part for part in name.split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else None


def make_texts(seed: int, lengths: tuple[int, ...]) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TokenSequence(
            ids=tuple(torch.randint(3, 64, (n,), generator=generator).tolist()),
            n_prompt=max(1, n // 2),
        )
        for n in lengths
    ]


def in_order(measured: list[Measured], jobs: list[Job], field: str) -> torch.Tensor:
    """Put targets back into the order of texts and positions."""
    values = torch.cat([getattr(m, field) for m in measured], dim=-1)
    keys = [
        (int(sequence), int(position))
        for job in jobs
        for sequence, position in zip(
            job.batch.target_sequence, job.batch.target_positions, strict=True
        )
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return values[..., order]


def measure(
    family: Family,
    model: str,
    texts: list[TokenSequence],
    *,
    max_tokens: int = 24,
    memory: int = 2**30,
) -> dict[str, torch.Tensor]:
    samples = tuple(Sample(options=(text,), answer=0) for text in texts)
    batches = make_batches(samples, max_tokens=max_tokens, pad_id=0)
    jobs = [Job(model, batch, "layers") for batch in batches]
    check = SelfCheck(family.make_replay, jobs[0], 1e-4)
    measured = run_jobs(jobs, family, family.make_replay(), memory=memory, check=check)
    fields = Measured.__dataclass_fields__
    return {field: in_order(measured, jobs, field) for field in fields}


def compare(full: list[float], streamed: list[float]) -> None:
    """Compare a full forward of the base with a stream."""
    check = SelfCheck(lambda: None, None, 1e-4)
    result = torch.tensor(full, dtype=torch.float64)
    check._forwards["base"] = SimpleNamespace(name="Llama", finish=lambda: result)
    stream = torch.tensor(streamed, dtype=torch.float64)
    check.compare(Measured(base=stream, merged=stream))


def test_model_that_gives_nan_is_not_called_unsupported():
    with pytest.raises(NotANumberError, match=r"got NaN under the base weights; set"):
        compare([-1.0, math.nan], [-1.0, math.nan])
    with pytest.raises(UnsupportedModelError, match="by nan nats"):
        compare([-1.0, -2.0], [-1.0, math.nan])
    compare([-1.0, -math.inf], [-1.0, -math.inf])
    with pytest.raises(UnsupportedModelError, match="by inf nats"):
        compare([-1.0, -math.inf], [-1.0, -2.0])


@pytest.mark.parametrize("n_experts", [2, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_impact_equals_brute_force(architecture, n_experts):
    family = Family(architecture, n_experts)
    texts = make_texts(7, (9, 6, 12))
    model = f"expert{n_experts - 1}"
    streamed = measure(family, model, texts)
    delta = family.deltas[model]

    def close(found: torch.Tensor, state: Tensors) -> None:
        assert torch.allclose(found, family.score(state, texts), atol=1e-5, rtol=0)

    close(streamed["base"], family.base)
    close(streamed["single"], family.plus(delta))
    close(streamed["merged"], family.plus(family.merge_delta))
    for layer in range(family.n_layers):
        for kind, part in (("single", delta), ("merged", family.merge_delta)):
            without = family.minus_layer(part, layer)
            close(streamed[f"removed_{kind}"][layer], without)
            close(streamed[f"added_{kind}"][layer], family.plus(part, {layer}))


@pytest.mark.parametrize(
    ("max_tokens", "memory"), [(12, 2**30), (60, 2**18), (12, 2**18)]
)
def test_score_does_not_depend_on_batches_and_chunks(max_tokens, memory):
    family = Family("qwen2, window", 2)
    texts = make_texts(3, (9, 12, 5, 7))
    whole = measure(family, "expert0", texts, max_tokens=60)
    parts = measure(family, "expert0", texts, max_tokens=max_tokens, memory=memory)
    for field, values in whole.items():
        assert torch.allclose(values, parts[field], atol=1e-5, rtol=0), field


def test_chunks_keep_within_memory_and_lose_no_job():
    family = Family("llama", 2)
    batches = make_batches(
        tuple(Sample((text,), 0) for text in make_texts(0, (5, 6, 7, 8, 9))),
        max_tokens=9,
        pad_id=0,
    )
    jobs = [Job("expert0", batch, "layers") for batch in batches]
    memory = 2 * max(job.n_bytes(3, 32, 4) for job in jobs)
    chunks = list(split_jobs(jobs, family.make_replay(), memory))
    assert len(chunks) > 1
    assert [job for chunk in chunks for job in chunk] == jobs
    assert all(sum(j.n_bytes(3, 32, 4) for j in chunk) <= memory for chunk in chunks)
    with pytest.raises(
        ValueError,
        match=r"analysis_memory must be at least 1MiB .*got 0\.000954MiB; raise it",
    ):
        list(split_jobs(jobs, family.make_replay(), 1000))


def test_missing_weight_is_named_and_not_made_up():
    family = Family("llama", 2)
    del family.base["model.layers.1.mlp.up_proj.weight"]
    before = threading.active_count()
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        measure(family, "expert0", make_texts(0, (5,)))
    assert threading.active_count() == before


def test_blocks_that_share_state_are_refused():
    config = transformers.Gemma3nTextConfig(
        **{**SHAPE, "num_hidden_layers": 4},
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    with pytest.raises(UnsupportedModelError, match="hand on state"):
        Replay(config, n_layers=4, dtype=torch.float32, device=torch.device("cpu"))


def test_model_that_is_no_causal_language_model_is_refused():
    config = transformers.T5Config(num_layers=3)
    with pytest.raises(UnsupportedModelError, match="causal language models"):
        Replay(config, n_layers=3, dtype=torch.float32, device=torch.device("cpu"))


def test_self_check_catches_a_stream_that_is_off(monkeypatch):
    """A block whose output depends on what ran before it is what the check is for."""
    family = Family("llama", 2)
    calls = iter(range(10**6))
    forward = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def drifting(self, hidden):
        return forward(self, hidden) * (1 + 1e-3 * next(calls))

    monkeypatch.setattr(
        transformers.models.llama.modeling_llama.LlamaMLP, "forward", drifting
    )
    with pytest.raises(UnsupportedModelError, match=r"differ .* by [0-9.e-]+ nats"):
        measure(family, "expert0", make_texts(0, (5,)))


@pytest.mark.parametrize("n_rows", [1, 2])
def test_self_check_of_the_first_rows_holds_logits_of_these_alone(monkeypatch, n_rows):
    family = Family("llama", 2)
    samples = [Sample(options=(text,), answer=0) for text in make_texts(3, (9, 8, 8))]
    (batch,) = make_batches(samples, max_tokens=64, pad_id=0)
    few = pick_rows(batch, vocabulary=64, most_bytes=(n_rows + 1) * 9 * 64 * 4 - 1)
    assert len(few.input_ids) == n_rows
    kept = few.target_sequence
    assert torch.equal(kept, batch.target_sequence[: len(kept)])
    assert set(batch.target_sequence[len(kept) :].tolist()).isdisjoint(kept.tolist())
    assert len(set(kept.tolist())) == n_rows
    held = []
    full_forward = Replay.full_forward

    def record(self, *arguments):
        logits = full_forward(self, *arguments)
        held.append(tuple(logits.shape))
        return logits

    monkeypatch.setattr(Replay, "full_forward", record)
    check = SelfCheck(family.make_replay, Job("expert0", few, "layers"), 1e-4)
    run_jobs(
        [Job("expert0", batch, "layers")],
        family,
        family.make_replay(),
        memory=2**30,
        check=check,
    )
    assert held == [(n_rows, 9, 64)] * 2  # of the base and of the merge
