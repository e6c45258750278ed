"""Tokenizer, tiny Llama and training loop of the quick start.

One thread and one seed give the same weights on the same machine and torch version.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from data import Row
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
IGNORED = -100
BETAS = (0.9, 0.98)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how hard to train.

    Attributes:
        n_steps: optimiser steps.
        batch_size: rows a step.
        learning_rate: peak value, reached after ``n_warmup`` steps, then linear to 0.
        n_warmup: steps of linear warm-up.
        weight_decay: decoupled weight decay, per unit of learning rate.
    """

    n_steps: int
    batch_size: int
    learning_rate: float
    n_warmup: int = 50
    weight_decay: float = 0.01

    @property
    def n_rows(self) -> int:
        """Rows that the whole schedule consumes."""
        return self.n_steps * self.batch_size


def build_tokenizer(
    texts: Iterable[str], *, vocab_size: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which digits and Chinese signs stay alone.

    Args:
        texts: training text; words in it become single tokens as far as there is room.
        vocab_size: upper bound on entries, the 256 bytes included.

    Returns:
        A tokenizer that adds no special tokens by itself and decodes any text exactly.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{Han}|\p{P}|\p{N}|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="right",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """Build a Llama of 6 layers and about 0.3 million random float32 weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def encode_rows(
    tokenizer: PreTrainedTokenizerFast, rows: list[Row]
) -> list[tuple[list[int], int]]:
    """Return (ids of prompt, completion and end, number of prompt ids) of each row."""
    prompts = tokenizer([row.prompt for row in rows])["input_ids"]
    texts = tokenizer([row.prompt + row.completion for row in rows])["input_ids"]
    eos = tokenizer.eos_token_id
    return [
        ([*text, eos], len(prompt)) for prompt, text in zip(prompts, texts, strict=True)
    ]


def pad_batch(
    encoded: list[tuple[list[int], int]], *, pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the right.

    Args:
        encoded: rows from ``encode_rows``.
        pad_id: id written behind a row's end.

    Returns:
        Ids ``[rows, tokens]`` and targets ``[rows, tokens]``: the ids where a token
        belongs to the completion or is its end, ``IGNORED`` elsewhere.
    """
    width = max(len(ids) for ids, _ in encoded)
    ids_out = torch.full((len(encoded), width), pad_id)
    targets = torch.full((len(encoded), width), IGNORED)
    for index, (ids, n_prompt) in enumerate(encoded):
        ids_out[index, : len(ids)] = torch.tensor(ids)
        targets[index, n_prompt : len(ids)] = torch.tensor(ids[n_prompt:])
    return ids_out, targets


def train_model(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    schedule: Schedule,
    *,
    seed: int,
) -> float:
    """Train every weight of ``model`` in place on the completions of ``rows``.

    Args:
        model: float32, on the CPU; written to.
        tokenizer: the model's.
        rows: ``schedule.n_rows`` rows, each used once.
        schedule: length and strength.
        seed: order of the rows.

    Returns:
        Mean loss of the last 50 steps, nats per target token.
    """
    encoded = encode_rows(tokenizer, rows)
    random.Random(seed).shuffle(encoded)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=schedule.learning_rate,
        betas=BETAS,
        weight_decay=schedule.weight_decay,
    )
    history: list[float] = []
    model.train()
    for step in range(schedule.n_steps):
        rise = (step + 1) / schedule.n_warmup
        fall = (schedule.n_steps - step) / schedule.n_steps
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * min(rise, fall)
        start = step * schedule.batch_size
        ids, targets = pad_batch(
            encoded[start : start + schedule.batch_size],
            pad_id=tokenizer.pad_token_id,
        )
        # Padding is on the right and attention causal: no mask needed.
        logits = model(input_ids=ids, use_cache=False).logits
        # [rows, tokens - 1]; each row counts alike, however long its completion is.
        losses = cross_entropy(
            logits[:, :-1].transpose(1, 2),
            targets[:, 1:],
            ignore_index=IGNORED,
            reduction="none",
        )
        n_targets = (targets[:, 1:] != IGNORED).sum(dim=1)
        loss = (losses.sum(dim=1) / n_targets).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
    model.eval()
    return sum(history[-50:]) / len(history[-50:])
