"""Held-out data, comparisons, tables and whole evaluations."""

import gc
import io
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_llama, make_tokenizer, tune
from rich.console import Console

from mergekit_himerging.analysis.overlap import hash_row
from mergekit_himerging.analysis.rows import parse_row
from mergekit_himerging.evaluation.data import (
    Task,
    find_overlap,
    read_task,
    refuse_overlap,
)
from mergekit_himerging.evaluation.metrics import (
    score_answers,
)
from mergekit_himerging.evaluation.records import Evaluation, Role, Settings
from mergekit_himerging.evaluation.run import Candidate, evaluate
from mergekit_himerging.evaluation.table import make_tables

CHOICES = {"prompt": "天空?", "choices": ["red", "blue"], "answer": "B"}
SAME = {
    "completion": {"prompt": "天空?", "completion": "blue"},
    "space and width": {"prompt": " 天空？\n", "completion": " blue "},
    "instruction": {"instruction": "天空?", "output": "blue"},
    "turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "天空?"},
            {"role": "assistant", "content": "blue"},
        ]
    },
    "text": {"text": "天空? blue"},
    "other wrong options": {**CHOICES, "choices": ["blue", "green"], "answer": "A"},
}


@pytest.mark.parametrize("name", SAME)
def test_same_content_has_the_same_hash_in_every_shape(name: str):
    row = parse_row(SAME[name], "held.jsonl line 1")
    assert hash_row(row) == hash_row(parse_row(CHOICES, "elsewhere"))
    # sha256 of '天空?blue' in UTF-8, by another program.
    assert hash_row(row) == "2cb468ffa97c3aa3"


@pytest.mark.parametrize(
    "record",
    [
        {**CHOICES, "answer": "A"},
        {**CHOICES, "prompt": "地?"},
        {"instruction": "天空?", "input": "now", "output": "blue"},
    ],
)
def test_other_content_has_another_hash(record: object):
    assert hash_row(parse_row(record, "")) != hash_row(parse_row(CHOICES, ""))


def write_rows(path: Path, *records: object) -> None:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("\n".join(lines), encoding="utf-8")


def test_held_out_rows_that_were_calibrated_on_are_found_and_refused(tmp_path: Path):
    write_rows(tmp_path / "英语.jsonl", {"text": "new"}, CHOICES, SAME["instruction"])
    task = read_task("英语.jsonl", folders=[tmp_path])
    calibrated = {hash_row(parse_row(SAME["turns"], ""))}
    assert task.name == "英语"
    assert find_overlap(task.rows, calibrated) == (
        "英语.jsonl line 2",
        "英语.jsonl line 3",
    )
    with pytest.raises(ValueError, match=r"got 2 of 3 .*first: 英语.jsonl line 2\)"):
        refuse_overlap(task, calibrated)
    refuse_overlap(task, {"0" * 16})


@pytest.mark.parametrize("name", [n for n in SAME if n != "text"])
def test_held_out_row_is_found_whose_prompt_alone_calibrated(name: str):
    """As with agreement, which needs no answers."""
    alone = parse_row({"prompt": " 天空? "}, "", needs_answer=False)
    other = parse_row({"prompt": "天"}, "", needs_answer=False)
    held_out = parse_row(SAME[name], "held.jsonl line 1")
    assert find_overlap([held_out], {hash_row(alone)}) == ("held.jsonl line 1",)
    assert find_overlap([held_out], {hash_row(other)}) == ()


def test_a_subset_is_chosen_by_content_and_seed(tmp_path: Path):
    records = [{"text": char} for char in "abcdefgh"]
    write_rows(tmp_path / "a.jsonl", *records)
    write_rows(tmp_path / "b.jsonl", *records[::-1])

    def read(name: str, **options: Any) -> list[str]:
        task = read_task(name, folders=[tmp_path], **options)
        return [row.completion for row in task.rows]

    assert read("a.jsonl") == list("abcdefgh")
    chosen = read("a.jsonl", n_rows=3, seed=1)
    assert len(set(chosen)) == 3
    assert read("b.jsonl", n_rows=3, seed=1) == chosen
    assert read("a.jsonl", n_rows=3, seed=2) != chosen


def test_missing_packages_are_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(
        ValueError, match=r"got no 'sacrebleu'; run pip .*\[evaluate\]'"
    ):
        score_answers(["a"], ["a"])
    (candidate, *_), _ = make_candidates()
    with pytest.raises(ValueError, match="got no 'sacrebleu'"):
        evaluate([candidate], make_tasks())
    # Losses and accuracies need none of them.
    evaluate([candidate], make_tasks(), SILENT)


QUICK = Settings(max_new_tokens=3, n_resamples=50)
SILENT = QUICK.model_copy(update={"generates": False})


def make_tasks() -> list[Task]:
    letters = [
        {"prompt": f"{a}{b}?", "choices": [a, b, "z"], "answer": 0}
        for a, b in ("ab", "cd", "ef", "gh")
    ]
    numbers = [{"prompt": f"{n}+", "completion": str(n)} for n in range(3)]
    return [
        Task(
            name, f"{name}.jsonl", tuple(parse_row(record, name) for record in records)
        )
        for name, records in (("letters", letters), ("numbers", numbers))
    ]


def make_candidates(
    *, fingerprint: str | None = None
) -> tuple[list[Candidate], list[str]]:
    """Make base, two experts and two merges, and a list that loading them fills."""
    loads: list[str] = []

    def make(name: str, role: Role, seed: int, task: str | None = None) -> Candidate:
        def load() -> Any:
            loads.append(name)
            base = make_llama(seed=0, n_layers=1)
            model = tune(base, seed=seed, by=0.2) if seed else base
            return model.to(torch.bfloat16), make_tokenizer()

        mark = fingerprint and f"{fingerprint} {name}"
        return Candidate(name, role, load, task, mark)

    candidates = [
        make("base", "base", 1),
        make("x", "expert", 0, "letters"),
        make("y", "expert", 2, "numbers"),
        make("ties", "merge", 3),
        make("hi", "merge", 4),
    ]
    return candidates, loads


@pytest.fixture(autouse=True, scope="module")
def _quick_collection() -> Iterator[None]:
    """What was imported need not be looked at each time that a model is freed."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return evaluate(make_candidates()[0], make_tasks(), QUICK)


def test_every_model_has_scores_on_every_task(evaluation: Evaluation):
    assert [model.name for model in evaluation.models] == [
        *("base", "x", "y", "hi", "ties")
    ]
    pairs = [(result.model, result.task) for result in evaluation.results]
    names = ["base", "x", "y", "hi", "ties"]
    assert pairs == [(n, task) for task in ("letters", "numbers") for n in names]
    letters, numbers = evaluation.results[0], evaluation.results[5]
    assert list(letters.estimates) == ["loss", "accuracy"]
    assert set(numbers.estimates) == {
        *("loss", "exact_match", "rouge1", "rouge2", "rougeL", "bleu", "corpus_bleu")
    }
    assert letters.estimates["loss"].value == pytest.approx(
        sum(letters.samples["loss"]) / 4
    )
    assert letters.estimates["loss"].unit == "nats per token"
    assert (letters.measured.n_truncated, letters.measured.answers) == (0, (None,) * 4)
    # Prompts of 3 tokens, with '<unk>' for the space before an option: 4 rows of one
    # target and of three options.
    assert (letters.measured.n_tokens, letters.measured.n_targets) == (80, 32)


def test_merges_are_compared_with_all_others_once(evaluation: Evaluation):
    pairs = {(d.model, d.other) for d in evaluation.differences if d.task == "letters"}
    assert pairs == {
        *(("hi", "base"), ("hi", "x"), ("hi", "y"), ("hi", "ties")),
        *(("ties", "base"), ("ties", "x"), ("ties", "y")),
    }


def test_a_difference_is_above_0_where_the_model_is_better(evaluation: Evaluation):
    by_pair = {(r.model, r.task): r for r in evaluation.results}
    checked = set()
    for difference in evaluation.differences:
        ours, theirs = (
            by_pair[name, difference.task].estimates[difference.metric].value
            for name in (difference.model, difference.other)
        )
        better = theirs - ours if difference.metric == "loss" else ours - theirs
        assert difference.gain.value == pytest.approx(better, abs=1e-12)
        checked.add(difference.metric)
    assert checked >= {"loss", "accuracy", "rouge1"}


def test_recovered_gain_is_that_of_the_tasks_expert(evaluation: Evaluation):
    loss = {(r.model, r.task): r.estimates["loss"].value for r in evaluation.results}
    experts = {"letters": "x", "numbers": "y"}
    found = [r for r in evaluation.recovered if r.metric == "loss"]
    assert {(r.model, r.expert, r.task) for r in found} == {
        (merge, expert, task)
        for merge in ("hi", "ties")
        for task, expert in experts.items()
    }
    for recovered in found:
        base, expert, merge = (
            loss[name, recovered.task]
            for name in ("base", recovered.expert, recovered.model)
        )
        if expert >= base:
            assert recovered.share is None
        else:
            assert recovered.share is not None
            share = (base - merge) / (base - expert)
            assert recovered.share.value == pytest.approx(share)
    assert {r.task for r in found if r.share is None} == {"numbers"}


def test_forgetting_is_measured_on_tasks_that_are_not_a_models_own(
    evaluation: Evaluation,
):
    triples = {(d.model, d.other, d.task) for d in evaluation.forgetting}
    assert triples == {("x", "base", "numbers"), ("y", "base", "letters")}
    candidates = [c for c in make_candidates()[0] if c.name != "y"]
    tasks = {
        (d.model, d.task) for d in evaluate(candidates, make_tasks(), QUICK).forgetting
    }
    assert tasks == {("x", "numbers"), ("hi", "numbers"), ("ties", "numbers")}


def test_the_order_of_candidates_plays_no_part(evaluation: Evaluation):
    candidates, _ = make_candidates()
    shuffled = [candidates[n] for n in (3, 1, 4, 0, 2)]
    assert evaluate(shuffled, make_tasks(), QUICK) == evaluation


def test_one_model_is_in_memory_at_a_time_and_in_float32_on_a_cpu():
    loaded: list[weakref.ref[torch.nn.Module]] = []
    dtypes: list[torch.dtype] = []

    def load() -> Any:
        assert [reference() for reference in loaded] == [None] * len(loaded)
        model = make_llama(seed=0, n_layers=1).to(torch.bfloat16)
        model.register_forward_pre_hook(
            lambda module, _: dtypes.append(next(module.parameters()).dtype)
        )
        loaded.append(weakref.ref(model))
        return model, make_tokenizer()

    models = [Candidate("base", "base", load), Candidate("hi", "merge", load)]
    evaluate(models, make_tasks(), SILENT)
    assert len(loaded) == 2
    assert set(dtypes) == {torch.float32}


def test_json_keeps_everything(evaluation: Evaluation):
    text = evaluation.to_json()
    assert Evaluation.model_validate_json(text) == evaluation
    assert json.loads(text)["schema"] == 1
    assert "医学" in evaluation.model_copy(update={"versions": {"医学": "1"}}).to_json()


def test_a_loss_that_is_not_finite_names_row_model_and_task():
    def forbid(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
        logits[..., VOCABULARY.index("a")] = -torch.inf
        return logits

    def load() -> Any:
        model = make_llama(seed=0, n_layers=1)
        model.lm_head.register_forward_hook(forbid)
        return model, make_tokenizer()

    broken = Candidate("hi", "merge", load)
    message = r"letters must have a finite loss, got inf \(model 'hi', task 'letters'\)"
    with pytest.raises(ValueError, match=message):
        evaluate([broken], make_tasks(), SILENT)


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path):
    candidates, loads = make_candidates(fingerprint="v1")
    done: list[tuple[str, str, int, int]] = []

    def stop(*state: Any) -> None:
        done.append(state)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(candidates[:2], make_tasks(), QUICK, keep_in=tmp_path, progress=stop)
    assert done == [
        ("base", "letters", 1, 4),
        ("base", "numbers", 2, 4),
        ("x", "letters", 3, 4),
    ]
    assert loads == ["base", "x"]
    kept = evaluate(candidates[:2], make_tasks(), QUICK, keep_in=tmp_path)
    assert loads == ["base", "x", "x"]  # for the task that was not done
    fresh = evaluate(candidates[:2], make_tasks(), QUICK)
    assert kept == fresh
    loads.clear()
    resampled = QUICK.model_copy(update={"n_resamples": 60, "max_tokens": 64})
    evaluate(candidates[:2], make_tasks()[::-1], resampled, keep_in=tmp_path)
    assert loads == []


@pytest.mark.parametrize("change", ["model", "rows", "settings", "code", "damage"])
def test_what_is_kept_is_used_for_the_same_content_alone(
    change: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    (candidate, *_), loads = make_candidates(fingerprint="v1")
    (task, _), settings = make_tasks(), QUICK
    evaluate([candidate], [task], settings, keep_in=tmp_path)
    if change == "model":
        (candidate, *_), loads = make_candidates(fingerprint="v2")
        loads.append("base")
    elif change == "rows":
        task = Task(task.name, task.source, task.rows[1:])
    elif change == "settings":
        settings = settings.model_copy(update={"max_new_tokens": 2})
    elif change == "code":
        name = "mergekit_himerging.evaluation.run.hash_code"
        monkeypatch.setattr(name, lambda: "another state of the code")
    else:
        (path,) = tmp_path.iterdir()
        path.write_text("{", encoding="utf-8")
    evaluate([candidate], [task], settings, keep_in=tmp_path)
    assert loads == ["base", "base"]
    assert ("measured again" in caplog.text) == (change == "damage")


def test_without_a_fingerprint_nothing_is_kept(tmp_path: Path):
    (candidate, *_), _ = make_candidates()
    evaluate([candidate], make_tasks()[:1], QUICK, keep_in=tmp_path)
    assert list(tmp_path.iterdir()) == []


def rename(candidate: Candidate, **changes: Any) -> Candidate:
    fields = {"name": candidate.name, "role": candidate.role, "load": candidate.load}
    return Candidate(**{**fields, **changes})


BAD: dict[str, tuple[Callable[[list[Candidate]], list[Candidate]], str]] = {
    "none": (lambda _: [], "candidates must be one or more, got none"),
    "a name twice": (lambda c: [c[0], c[0]], "distinct names, got 'base' twice"),
    "two bases": (
        lambda c: [c[0], rename(c[0], name="b")],
        r"one base at most, got \['b', 'base'\]",
    ),
    "an unknown task": (
        lambda c: [rename(c[1], task="music")],
        r"task must be one of \['letters', 'numbers'\] or None, got 'music' \('x'\)",
    ),
    "a base with a task": (
        lambda c: [rename(c[0], task="letters")],
        r"task must be None for a base, got 'letters' \('base'\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_candidates_that_do_not_fit_are_refused_before_loading(name: str):
    change, message = BAD[name]
    candidates, loads = make_candidates()
    with pytest.raises(ValueError, match=message):
        evaluate(change(candidates), make_tasks(), QUICK)
    assert loads == []


def print_tables(evaluation: Evaluation, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(make_tables(evaluation, width=width))
    return out.getvalue()


def test_rows_that_a_model_did_not_see_whole_are_told(evaluation: Evaluation):
    assert "lost" not in print_tables(evaluation, 200)
    first, *others = evaluation.results
    measured = first.measured.model_copy(update={"n_truncated": 3, "n_prompts_cut": 2})
    results = (first.model_copy(update={"measured": measured}), *others)
    text = print_tables(evaluation.model_copy(update={"results": results}), 200)
    assert (
        f"{first.model}: 3 rows lost tokens to its length, 2 prompts lost their "
        "beginning to the answer's"
    ) in text


def test_models_that_were_scored_on_other_tokens_are_told():
    """Two chat templates: what the messages become differs, plain rows do not."""
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    chat = Task("chat", "chat.jsonl", (parse_row({"messages": turns}, "chat"),))

    def make(name: str, mark: str) -> Candidate:
        def load() -> Any:
            tokenizer = make_tokenizer()
            tokenizer.chat_template = (
                "{% for m in messages %}" + mark + "{{ m['content'] }}{% endfor %}"
            )
            return make_llama(seed=0, n_layers=1), tokenizer

        return Candidate(name, "merge", load)

    found = evaluate(
        [make("one", "+"), make("same", "+"), make("strange", "z")],
        [*make_tasks(), chat],
        SILENT,
    )
    text = print_tables(found, 200)
    assert text.count("scored on other tokens than") == 1
    assert "strange: scored on other tokens than one" in text


def test_names_with_brackets_and_colons_are_no_markup(evaluation: Evaluation):
    name = "runs/[final]/:smile:"
    results = [
        result.model_copy(update={"model": name}) for result in evaluation.results[:1]
    ]
    task = [t for t in evaluation.tasks if t.name == results[0].task]
    bare = evaluation.model_copy(
        update={
            "results": tuple(results),
            "tasks": tuple(task),
            **dict.fromkeys(("recovered", "differences", "forgetting"), ()),
        }
    )
    assert name in print_tables(bare, 200)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_hold_every_value_within_the_width(evaluation: Evaluation, width: int):
    text = print_tables(evaluation, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text  # nothing but text in a pipe
    assert "…" not in text
    for result in evaluation.results:
        value = result.estimates["loss"].value
        assert f"{value:.3f}" in text
    for word in (
        "letters (4 rows)",
        "hi - ties",
        "gain of x recovered",
        "corpus BLEU-4",
    ):
        assert word in text, word


def test_the_best_value_has_a_star(evaluation: Evaluation):
    text = print_tables(evaluation, 200)
    best = min(r.estimates["loss"].value for r in evaluation.results[:5])
    assert f"{best:.3f}*" in text
    assert text.count(f"{best:.3f}*") == 1
