"""Held-out rows under models: scores and answers against one row at a time."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_llama, make_tokenizer
from tokenizers import decoders
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from mergekit_himerging.analysis.calibration import (
    Row,
    Sample,
    TokenSequence,
    make_batches,
    score_samples,
    tokenize_rows,
)
from mergekit_himerging.analysis.rows import parse_row
from mergekit_himerging.evaluation.forward import score_targets
from mergekit_himerging.evaluation.generation import generate_answers
from mergekit_himerging.evaluation.options import count_shared
from mergekit_himerging.evaluation.scoring import Scorer

SMALL = {
    "vocab_size": len(VOCABULARY),
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
ATTENTION = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_qwen2() -> PreTrainedModel:
    config = Qwen2Config(
        **ATTENTION, use_sliding_window=True, sliding_window=4, max_window_layers=1
    )
    return Qwen2ForCausalLM(config)


def make_gemma2() -> PreTrainedModel:
    # A cap far below the logits, so that leaving it out would show.
    config = Gemma2Config(
        **ATTENTION, head_dim=8, sliding_window=4, final_logit_softcapping=0.1
    )
    return Gemma2ForCausalLM(config)


def make_gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(**SMALL, n_positions=36, n_embd=32, n_layer=2, n_head=4)
    )


def make_mamba() -> PreTrainedModel:
    return MambaForCausalLM(
        MambaConfig(**SMALL, hidden_size=32, num_hidden_layers=2, state_size=4)
    )


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: make_llama(seed=0),
    "qwen2 with a sliding window": make_qwen2,
    "gemma2 with capped logits": make_gemma2,
    "gpt2": make_gpt2,
    "mamba": make_mamba,
}


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform, so that errors show
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return tokenizer


def ask(prompt: str, *choices: str, answer: int = 0) -> Row:
    record = {"prompt": prompt, "choices": list(choices), "answer": answer}
    return parse_row(record, f"row {prompt}")


QUESTIONS = (
    ask("abcdefghijklmnop?", "yes", "no", answer=1),
    ask("abc?", "0123456789", "z"),
    ask("q", "a", "b"),  # nothing is shared before the token that predicts
    ask("12345678?", "one", "two", "three", answer=2),
    ask("xyz.", "onward", "onwards"),
    ask("k?", "l", "m", "n", "o", answer=3),
)
FREE = (
    parse_row({"prompt": "2,4?", "completion": "6"}, "row 1"),
    parse_row({"text": "thesky.isblue"}, "row 2"),
    parse_row({"instruction": "add", "input": "1,1", "output": "2"}, "row 3"),
)


def spell(text: str) -> list[int]:
    """Token ids, written without a tokenizer."""
    unknown = VOCABULARY.index("<unk>")
    return [VOCABULARY.index(c) if c in VOCABULARY else unknown for c in text]


def score_one(model: PreTrainedModel, prompt: str, target: str) -> float:
    """Mean log-probability of a target, by one plain forward without a mask."""
    before, ids = spell(prompt), spell(prompt + target)
    with torch.no_grad():
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    logs = [table[n - 1, ids[n]].item() for n in range(max(1, len(before)), len(ids))]
    return sum(logs) / len(logs)


def make_scorer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **changes: Any
) -> Scorer:
    return Scorer(model, tokenizer, **{"max_length": 64, "max_tokens": 256, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_rows_score_as_one_by_one(
    name: str, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
):
    model = make_model(name)
    rows = [*QUESTIONS, *FREE]
    scores = make_scorer(model, tokenizer).score(rows)

    losses, accuracies = [], []
    for row in QUESTIONS:
        each = [score_one(model, row.prompt, f" {choice}") for choice in row.choices]
        losses.append(-each[row.answer])
        right = each.pop(row.answer)
        accuracies.append(float(all(right > other for other in each)))
    losses.append(-score_one(model, "2,4?", "6"))
    losses.append(-score_one(model, "", "thesky.isblue"))
    losses.append(-score_one(model, "add\n\n1,1\n\n", "2"))
    assert scores.loss == pytest.approx(losses, abs=2e-5)
    assert scores.accuracy == (*accuracies, None, None, None)
    assert set(accuracies) == {0.0, 1.0}

    ours = [r for r in caplog.records if r.name.startswith("mergekit_himerging")]
    # Sharing prompts must be what was tested, but for a state-space model.
    warned = ["MambaForCausalLM cannot compute"] if name == "mamba" else []
    assert [r.getMessage()[:31] for r in ours] == warned


@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_batch_size(
    name: str, tokenizer: PreTrainedTokenizerFast
):
    model = make_model(name)
    rows = [*QUESTIONS, *FREE]
    large, small = (
        make_scorer(model, tokenizer, max_tokens=max_tokens).score(rows)
        for max_tokens in (10_000, 1)
    )
    assert large.loss == pytest.approx(small.loss, abs=2e-5)
    assert large.accuracy == small.accuracy


def test_scores_are_the_analysis_scores(tokenizer: PreTrainedTokenizerFast):
    model = make_model("llama")
    scores = make_scorer(model, tokenizer).score(QUESTIONS)
    for metric, ours in (
        ("loss", [-value for value in scores.loss]),
        ("accuracy", scores.accuracy),
    ):
        samples = tokenize_rows(
            QUESTIONS, tokenizer, metric=metric, max_length=64, vocab_size=42
        ).samples
        batches = make_batches(samples, max_tokens=64, pad_id=0)
        logs = []
        for batch in batches:
            with torch.no_grad():
                logits = model(
                    batch.input_ids, attention_mask=batch.attention_mask
                ).logits
            table = logits[batch.target_rows, batch.target_positions].log_softmax(-1)
            logs.append(table.gather(1, batch.target_ids[:, None])[:, 0])
        expected = score_samples(samples, torch.cat(logs), batches, metric=metric)
        assert ours == pytest.approx(expected.tolist(), abs=2e-5)


def test_a_prompt_is_computed_once_for_its_options(tokenizer: PreTrainedTokenizerFast):
    model = make_model("llama")
    rows = [ask("abcdefghijklmnopqrstuvwxyz?", "a", "b", "c", "d")]
    scorer = make_scorer(model, tokenizer)
    scorer.score(rows)  # the check of the first question runs all of them whole
    cells = 0

    def count(_: object, arguments: object, keywords: dict[str, torch.Tensor]) -> None:
        nonlocal cells
        cells += keywords["input_ids"].numel()

    scorer._can_share = lambda _: True  # type: ignore[method-assign]
    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    scorer.score(rows)
    handle.remove()
    # 26 tokens before the last of the prompt, then "? x" four times.
    assert cells == 26 + 4 * 3


def test_a_wrong_cache_is_found_out_and_warned_of_once(
    tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    model = make_model("llama")
    right = make_scorer(model, tokenizer).score(QUESTIONS)
    forward = model.model.forward

    def forget(*arguments: Any, **keywords: Any) -> Any:
        outputs = forward(*arguments, **keywords)
        if keywords.get("use_cache"):
            outputs.last_hidden_state = outputs.last_hidden_state * 1.1
        return outputs

    monkeypatch.setattr(model.model, "forward", forget)
    scorer = make_scorer(model, tokenizer)
    assert scorer.score(QUESTIONS).loss == pytest.approx(right.loss, abs=2e-5)
    scorer.score(QUESTIONS)
    assert caplog.text.count("its cache changes log-probabilities by") == 1


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        (((3, 4, 5, 6), (3, 4, 5, 7)), 2),
        (((3, 4, 5, 6), (3, 9, 5, 6)), 1),
        (((8, 4, 5, 6), (3, 4, 5, 6)), 0),
    ],
)
def test_shared_tokens_end_before_the_one_that_predicts(options: Any, shared: int):
    sample = Sample(tuple(TokenSequence(ids, 3) for ids in options), 0)
    assert count_shared(sample) == shared


@pytest.mark.parametrize("name", MODELS)
def test_head_runs_at_targets_alone_and_says_the_same(name: str):
    model = make_model(name)
    sequences = [TokenSequence((5, 6, 7, 8, 9), 3), TokenSequence((9, 8, 7), 1)]
    (batch,) = make_batches(
        [Sample((sequence,), 0) for sequence in sequences], max_tokens=99, pad_id=0
    )
    seen = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda _, arguments, output: seen.append(output.shape[:2])
    )
    found, _ = score_targets(model, batch)
    handle.remove()
    assert seen == [(1, 4)]
    with torch.no_grad():
        plain = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    table = plain.log_softmax(-1)
    wanted = [
        table[row, position, token].item()
        for row, position, token in zip(
            batch.target_rows, batch.target_positions, batch.target_ids, strict=True
        )
    ]
    assert found.tolist() == pytest.approx(wanted, abs=1e-6)


def test_rows_that_lost_tokens_are_counted_once(tokenizer: PreTrainedTokenizerFast):
    rows = (QUESTIONS[2], QUESTIONS[0], FREE[0], FREE[1])
    scores = make_scorer(make_model("llama"), tokenizer, max_length=12).score(rows)
    assert scores.n_truncated == 2  # the long question and the text
    # Two options together, then the right one alone; 5; 12.
    assert scores.n_tokens == (3 + 3 + 3) + (12 + 11 + 12) + 5 + 12


def test_a_row_that_does_not_fit_names_its_place(tokenizer: PreTrainedTokenizerFast):
    scorer = make_scorer(make_model("gpt2"), tokenizer)
    row = parse_row({"prompt": "a", "completion": "b" * 40}, "held.jsonl line 7")
    with pytest.raises(ValueError, match=r"held.jsonl line 7 .* at most 35 .*got 40"):
        scorer.score([row])


def continue_one(model: PreTrainedModel, ids: list[int], n_new: int) -> str:
    """Greedy tokens, one full forward each, as text up to the end mark."""
    written: list[int] = []
    with torch.no_grad():
        for _ in range(n_new):
            logits = model(torch.tensor([ids + written])).logits[0, -1]
            written.append(int(logits.argmax()))
    kept = itertools.takewhile(lambda token: token != 1, written)
    # Special tokens are left out.
    return "".join(VOCABULARY[token] for token in kept if token > 2)


def free_rows(*prompts: str) -> list[Row]:
    return [
        parse_row({"prompt": prompt, "completion": "z"}, f"row {prompt}")
        for prompt in prompts
    ]


PROMPTS = ("a", "abcdefghijklmnopqrst", "zz.", "0123", "9876", "hello,world")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_tokens", [36, 10_000])
def test_answers_are_those_of_one_prompt_at_a_time(
    name: str, max_tokens: int, tokenizer: PreTrainedTokenizerFast
):
    model = make_model(name)
    answers, n_cut = generate_answers(
        model,
        tokenizer,
        free_rows(*PROMPTS),
        max_new_tokens=5,
        max_length=64,
        max_tokens=max_tokens,
    )
    assert answers == tuple(continue_one(model, spell(p), 5) for p in PROMPTS)
    assert len(set(answers)) > 1
    assert n_cut == 0


def test_prompts_share_a_batch_where_that_changes_nothing(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    model = make_model("llama")
    generate, rows = model.generate, []

    def count(**options: Any) -> Any:
        rows.append(len(options["input_ids"]))
        return generate(**options)

    monkeypatch.setattr(model, "generate", count)
    options = {"max_new_tokens": 4, "max_length": 64, "max_tokens": 10_000}
    generate_answers(model, tokenizer, free_rows(*PROMPTS), **options)
    assert rows == [2, 1, 6]  # the check, then all


def test_a_model_that_reads_padding_gets_prompts_of_one_length(
    tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    model = make_model("llama")
    alone = tuple(continue_one(model, spell(prompt), 4) for prompt in PROMPTS)
    forward = model.forward

    def ignore_mask(
        input_ids: torch.Tensor, attention_mask: Any = None, **keywords: Any
    ) -> Any:
        return forward(input_ids, **keywords)

    monkeypatch.setattr(model, "forward", ignore_mask)
    options = {"max_new_tokens": 4, "max_length": 64, "max_tokens": 10_000}
    answers, _ = generate_answers(model, tokenizer, free_rows(*PROMPTS), **options)
    assert answers == alone
    assert "only prompts of one length share a batch" in caplog.text


def test_sampling_settings_of_a_model_play_no_part(tokenizer: PreTrainedTokenizerFast):
    model = make_model("llama")
    own = GenerationConfig(
        do_sample=True, temperature=9.0, repetition_penalty=5.0, eos_token_id=[1, 20]
    )
    model.generation_config = own
    options = {"max_new_tokens": 8, "max_length": 64, "max_tokens": 999}
    answers, _ = generate_answers(model, tokenizer, free_rows(*PROMPTS), **options)
    # Its own end marks do: token 20 ends an answer.
    expected = [continue_one(model, spell(prompt), 8) for prompt in PROMPTS]
    assert answers == tuple(text.partition(VOCABULARY[20])[0] for text in expected)
    assert model.generation_config is own


def test_a_long_prompt_loses_its_beginning(tokenizer: PreTrainedTokenizerFast):
    model = make_model("gpt2")  # 36 positions
    (row,) = free_rows("abcdefghijklmnopqrstuvwxyz012345")
    options = {"max_new_tokens": 8, "max_length": 64, "max_tokens": 999}
    answers, n_cut = generate_answers(model, tokenizer, [row], **options)
    assert answers == (continue_one(model, spell(row.prompt[-28:]), 8),)
    assert n_cut == 1


def test_long_reference_takes_nothing_from_the_prompt(
    tokenizer: PreTrainedTokenizerFast,
):
    model = make_model("gpt2")  # 36 positions
    options = {"max_new_tokens": 8, "max_length": 64, "max_tokens": 999}
    (row,) = free_rows("abcdefghijklmnopqrst")
    long = replace(row, completion="0123456789" * 3)
    for one in (row, long):
        answers, n_cut = generate_answers(model, tokenizer, [one], **options)
        assert answers == (continue_one(model, spell(row.prompt), 8),)
        assert n_cut == 0


def test_answers_leave_half_of_a_short_model_to_the_prompt(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
):
    model = make_model("gpt2")  # 36 positions
    options = {"max_new_tokens": 36, "max_length": 64, "max_tokens": 999}
    (row,) = free_rows("abcdefghijklmnopqrstuvwxyz012345")
    answers, n_cut = generate_answers(model, tokenizer, [row], **options)
    assert answers == (continue_one(model, spell(row.prompt[-18:]), 18),)
    assert n_cut == 1
    assert "answers are cut at 18 tokens" in caplog.text


@pytest.mark.parametrize(
    ("completion", "answer"), [("z", "ab"), ("y\nz", "ab\ncd")], ids=["line", "lines"]
)
def test_an_answer_ends_with_its_line_where_the_reference_has_one(
    completion: str, answer: str, monkeypatch: pytest.MonkeyPatch
):
    words = [*VOCABULARY, "\n"]
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["\n"])
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    model = make_llama(seed=0, vocab_size=len(words)).eval()
    script = [words.index(char) for char in "\nab\ncd\n"]
    steps = 0

    def write(input_ids: torch.Tensor, **keywords: Any) -> Any:
        """Say the script, whatever is asked."""
        nonlocal steps
        steps += 1
        outputs = forward(input_ids, **keywords)
        outputs.logits[:, -1, script[(steps - 1) % len(script)]] = 1e3
        return outputs

    forward = model.forward
    monkeypatch.setattr(model, "forward", write)
    row = parse_row({"prompt": "x", "completion": completion}, "row 1")
    answers, _ = generate_answers(
        model, tokenizer, [row], max_new_tokens=7, max_length=64, max_tokens=99
    )
    assert answers == (answer,)
    assert steps == (4 if answer == "ab" else 7)


def test_what_a_chat_template_puts_before_an_answer_is_no_part_of_it(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}0{% endif %}{{ m.content }}<eos>{% endfor %}"
    )
    row = parse_row(
        {
            "messages": [
                {"role": "user", "content": "ab"},
                {"role": "assistant", "content": "cd"},
            ]
        },
        "row 1",
    )
    model = make_model("llama")
    prompts = []

    def generate(**options: Any) -> torch.Tensor:
        prompts.append(options["input_ids"].tolist())
        more = torch.tensor([[*spell("0cd"), 1, 0]])
        return torch.cat([options["input_ids"], more], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    options = {"max_new_tokens": 8, "max_length": 64, "max_tokens": 99}
    answers, _ = generate_answers(model, tokenizer, [row], **options)
    assert prompts == [[[*spell("ab"), 1]]]
    assert answers == ("cd",)
