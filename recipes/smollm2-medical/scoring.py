"""Log-likelihood of answers: the one piece that training and evaluation share.

Losses exist at answer positions only, never in the prompt, and the head is applied
there alone: its 49152 columns cost more than a decoder block otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and one answer to it, as token ids.

    Attributes:
        ids: prompt and answer, the answer last.
        n_answer: tokens of the answer, at least 1.
    """

    ids: tuple[int, ...]
    n_answer: int

    def __post_init__(self) -> None:
        if not 0 < self.n_answer < len(self.ids):
            raise ValueError(
                f"prompt and answer must have tokens, got {len(self.ids)} ids "
                f"of which {self.n_answer} are the answer"
            )


def encode_example(
    tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, *, close: bool = False
) -> Example:
    """Tokenise prompt and answer apart and join them, without chat template.

    Args:
        close: append the end-of-text token to the answer. Training does, so that an
            expert stops; scores do not, so that they measure the answer alone.
    """
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    if close:
        answer_ids = [*answer_ids, tokenizer.eos_token_id]
    return Example((*prompt_ids, *answer_ids), len(answer_ids))


def answer_losses(
    model: LlamaForCausalLM,
    examples: Sequence[Example],
    *,
    prefix: DynamicCache | None = None,
) -> list[torch.Tensor]:
    """Return the negative log-likelihood of each answer token, in nats.

    Args:
        model: gradients flow through it where they are enabled.
        examples: one batch; padded to the right here.
        prefix: keys and values of tokens before the examples' own, one row for each;
            extended in place.

    Returns:
        For each example ``[n_answer]``, float32.
    """
    longest = max(len(example.ids) for example in examples)
    # The pad id is never seen: masked as a key, and no answer position reads it.
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    attended = torch.zeros_like(ids)
    predicts = torch.zeros_like(ids, dtype=torch.bool)
    for row, example in enumerate(examples):
        length = len(example.ids)
        ids[row, :length] = torch.tensor(example.ids)
        attended[row, :length] = 1
        # The state at position i predicts token i + 1.
        predicts[row, length - 1 - example.n_answer : length - 1] = True
    if prefix is not None:
        before = torch.ones(len(examples), prefix.get_seq_length(), dtype=torch.long)
        attended = torch.cat([before, attended], dim=1)
    hidden = model.model(
        ids,
        attention_mask=attended,
        past_key_values=prefix,
        use_cache=prefix is not None,
    )[0]
    # [batch, longest, hidden] -> [answer tokens, hidden], row by row
    logits = model.lm_head(hidden[predicts]).float()
    # predicts never holds in the last column, so the roll never wraps a target.
    targets = ids.roll(-1, dims=1)[predicts]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return list(losses.split([example.n_answer for example in examples]))


def choice_losses(
    model: LlamaForCausalLM, examples: Sequence[Example]
) -> list[torch.Tensor]:
    """Return what ``answer_losses`` does for answers to one and the same prompt.

    The prompt is read once and not once for each answer: a quarter of the work.
    """
    # The prompt's last token stays with the answers: its state predicts their first.
    n_shared = len(examples[0].ids) - examples[0].n_answer - 1
    shared = torch.tensor([examples[0].ids[:n_shared]])
    prefix = model.model(shared, use_cache=True).past_key_values
    prefix.batch_repeat_interleave(len(examples))
    answers = [
        Example(example.ids[n_shared:], example.n_answer) for example in examples
    ]
    return answer_losses(model, answers, prefix=prefix)
