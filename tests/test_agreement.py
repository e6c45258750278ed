"""Agreement with the expert: divergences of whole models, slopes, plain prompts."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tokenizer
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from test_analysis import ROWS, Bench, assert_measured, make_analysis, save_school
from test_analysis import write_rows as write_records
from test_measured import differences
from tokenizers import pre_tokenizers

from mergekit_himerging.analysis import agreement
from mergekit_himerging.analysis.calibration import tokenize_rows
from mergekit_himerging.analysis.candidates import score_merges
from mergekit_himerging.analysis.differences import measure_differences
from mergekit_himerging.analysis.row_files import read_rows
from mergekit_himerging.analysis.rows import parse_row
from mergekit_himerging.analysis.session import make_plan, make_replay, read_data
from mergekit_himerging.analysis.slopes import measure_slopes
from mergekit_himerging.analysis.teachers import add_teachers
from mergekit_himerging.api import check
from mergekit_himerging.estimate import estimate_cost
from mergekit_himerging.plan import read_plan
from mergekit_himerging.planning import plan_recipe
from mergekit_himerging.search import SearchSettings, search_merge
from mergekit_himerging.views.markdown import write_report

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    return save_school(tmp_path_factory.mktemp("school"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))


class AgreementBench(Bench):
    """Scores a state dict by its whole distributions, one text at a time."""

    def distributions(self, state, text):
        self.model.load_state_dict({n: t.float() for n, t in state.items()})
        ids, positions = text
        with torch.no_grad():
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return torch.distributions.Categorical(logits=logits[positions].double())

    def score(self, state, expert):
        return np.array(
            [
                -float(
                    torch.distributions.kl_divergence(
                        self.distributions(self.tuned[expert], text),
                        self.distributions(state, text),
                    ).mean()
                )
                for text in self.texts[expert]
            ]
        )


def ids_of(text):
    return make_tokenizer()(text, add_special_tokens=False)["input_ids"]


def answers(name):
    """The ids of each row, and where its answer's characters are predicted."""
    return [
        (ids_of(p + c), list(range(len(p) - 1, len(p + c) - 1))) for p, c in ROWS[name]
    ]


def prompts(name):
    """The ids of each prompt, and all positions: an answer begins after the last."""
    return [(ids_of(p), list(range(len(p)))) for p, _ in ROWS[name]]


def make_agreement(school, folder, *, of_model=None, **parameters):
    """Make a recipe: `a` has answers, `b` plain prompts and texts alone."""
    recipe = make_analysis(
        school,
        folder,
        "a",
        "b",
        of_model={"metric": "agreement", **(of_model or {})},
        **parameters,
    )
    keys = ("prompt", "text", "prompt", "text")
    write_records(
        folder, "b", [{k: p} for k, (p, _) in zip(keys, ROWS["b"], strict=True)]
    )
    return recipe


def bench_of(school, **options):
    texts = {"a": answers("a"), "b": prompts("b")}
    return AgreementBench.of(school, "a", "b", **{"texts": texts, **options})


def plan_of(recipe):
    config = MergeConfiguration.model_validate(recipe)
    return plan_recipe(config, MergeOptions(quiet=True))


def taught(merge, replay):
    tasks = read_data(merge, CPU, accept_share=0.0)
    return add_teachers(tasks, merge.resolve(None), replay, device=CPU, memory=2**30)


@pytest.mark.parametrize("pair_bytes", [64 * 2**20, 1500])
def test_scores_equal_divergences_of_whole_models(
    school, tmp_path, monkeypatch, pair_bytes
):
    monkeypatch.setattr(agreement, "PAIR_BYTES", pair_bytes)
    recipe = make_agreement(
        school, tmp_path, of_model={"density": 0.5}, accept_share=0, guard="report"
    )
    plan = make_plan(plan_of(recipe))
    found = assert_measured(plan, bench_of(school, density=0.5))
    assert all(scores["base"].mean() < -0.1 for scores in found.values())


def test_logits_of_all_targets_are_never_held(school, tmp_path, monkeypatch):
    n_words = len(make_tokenizer())
    monkeypatch.setattr(agreement, "PAIR_BYTES", 5 * 4 * n_words)
    merge = plan_of(make_agreement(school, tmp_path))
    replay = make_replay(merge, CPU)
    tasks = taught(merge, replay)
    assert max(b.n_targets for t in tasks for b in t.choosing.batches) > 5
    asked = []
    read_out = replay.read_out

    def count(outer, hidden):
        asked.append(len(hidden))
        return read_out(outer, hidden)

    monkeypatch.setattr(replay, "read_out", count)
    score_merges([merge.resolve(None)], tasks, replay, device=CPU, memory=2**30)
    assert max(asked) == 5


def test_expert_agrees_with_itself_and_a_diluted_one_does_not(school, tmp_path):
    whole = make_plan(plan_of(make_agreement(school, tmp_path, accept_share=0)))
    diluted = make_plan(
        plan_of(
            make_agreement(school, tmp_path, of_model={"density": 0.5}, accept_share=0)
        )
    )
    for task, other in zip(whole.tasks, diluted.tasks, strict=True):
        assert task.score_single == pytest.approx(0, abs=1e-6)
        assert other.score_single < -1e-3
        assert other.score_base == pytest.approx(task.score_base, abs=1e-6)


@pytest.mark.parametrize(
    "way", [measure_slopes, functools.partial(measure_differences, step=0.05)]
)
def test_slopes_equal_differences_of_whole_merges(school, tmp_path, monkeypatch, way):
    monkeypatch.setattr(agreement, "PAIR_BYTES", 1500)
    merge = plan_of(make_agreement(school, tmp_path, of_model={"weight": 0.4}))
    replay = make_replay(merge, CPU)
    found = way(
        merge.resolve(None),
        merge.resolve(None),
        taught(merge, replay),
        replay,
        device=CPU,
        memory=2**30,
        cuts={},
    )
    bench = bench_of(school, weight=0.4)
    expected = differences(bench, lambda state, e: float(bench.score(state, e).mean()))
    assert np.abs(expected).max() > 0.01
    assert np.allclose(found.slopes, expected, atol=1e-4)


def test_measured_merge_comes_nearer_to_the_experts(school, merge, tmp_path):
    recipe = make_agreement(
        school,
        tmp_path,
        of_model={"weight": 0.3},
        resolve="measured",
        accept_share=0,
        guard="report",
    )
    merged = merge(recipe)
    plan = read_plan(tmp_path / "plan.json")
    assert plan.steps[0].taken
    bench = bench_of(school, weight=0.3)
    for task in plan.tasks:
        score = float(bench.score(merged, Path(task.model).name).mean())
        assert task.score_treated == pytest.approx(score, abs=1e-5)
    assert sum(t.recovered_treated - t.recovered_merged for t in plan.tasks) > 0.04
    text = write_report(plan, recipe=json.dumps(recipe), plot=None)
    assert "divergence from the expert in nats per token, 0 is best" in text


def test_metrics_of_two_models_may_differ(school, tmp_path):
    recipe = make_agreement(school, tmp_path, accept_share=0)
    recipe["models"][0]["parameters"]["metric"] = "loss"
    plan = make_plan(plan_of(recipe))
    loss = Bench.of(school, "a", "b")
    agreed = bench_of(school)
    for task, bench, name in zip(plan.tasks, (loss, agreed), "ab", strict=True):
        brute = bench.score(bench.merged(), name).mean()
        assert task.score_merged == pytest.approx(brute, abs=1e-5)


def test_search_holds_every_density_against_the_same_expert(school, tmp_path):
    merge = plan_of(make_agreement(school, tmp_path))
    result = search_merge(merge, SearchSettings(grid=2, evaluations=4))
    bench = bench_of(school)
    places = [None, *range(bench.n_layers)]
    diluted = [trial for trial in result.trials if trial.model]
    assert len(diluted) >= 4
    for trial in diluted[:4]:
        factors = {
            (layer, Path(model).name): (values.density or 1, values.scale or 1, 1.0)
            for layer in places
            for model, values in trial.choice.items()
        }
        for model, score in trial.scores.items():
            name = Path(model).name
            brute = bench.score(bench.merged(factors), name).mean()
            assert score == pytest.approx(brute, abs=1e-5)
            assert result.single[model] == pytest.approx(0, abs=1e-6)


def test_estimate_counts_the_pass_of_the_experts(school, tmp_path):
    agreed = plan_of(make_agreement(school, tmp_path))
    recipe = make_agreement(school, tmp_path, of_model={"metric": "loss"})
    recipe["models"][1]["parameters"]["calibration"] = recipe["models"][0][
        "parameters"
    ]["calibration"]
    plain = plan_of(recipe)
    n_batches = [
        sum(
            len(part.batches)
            for task in read_data(merge, CPU, accept_share=0.5)
            for part in (task.choosing, task.accepting)
        )
        for merge in (agreed, plain)
    ]
    assert n_batches[0] == n_batches[1]
    more = estimate_cost(agreed), estimate_cost(plain)
    assert more[0].n_block_calls - more[1].n_block_calls == 3 * n_batches[0]
    assert more[0].n_passes == more[1].n_passes + 1


def test_check_finds_nothing_wrong_with_prompts_alone(school, tmp_path):
    report = check(make_agreement(school, tmp_path))
    assert report.problems == ()
    assert report.cost is not None


def test_batches_without_teacher_are_not_scored_as_something_else(school, tmp_path):
    merge = plan_of(make_agreement(school, tmp_path))
    replay = make_replay(merge, CPU)
    tasks = read_data(merge, CPU, accept_share=0.0)
    with pytest.raises(ValueError, match="must have a teacher, got none"):
        score_merges([merge.resolve(None)], tasks, replay, device=CPU, memory=2**30)


def test_prompt_alone_is_refused_where_an_answer_is_scored(school, tmp_path):
    recipe = make_agreement(school, tmp_path, of_model={"metric": "loss"})
    with pytest.raises(
        ValueError,
        match=r"b\.jsonl line 1 must have 'prompt' and 'completion', or .*, got keys "
        r"\['prompt'\]; only metric 'agreement' takes a prompt alone",
    ):
        make_plan(plan_of(recipe))


def test_prompt_with_half_an_answer_is_refused_everywhere():
    with pytest.raises(ValueError, match=r"got keys \['choices', 'prompt'\]$"):
        parse_row({"prompt": "a", "choices": ["b"]}, "x line 1", needs_answer=False)


def test_prompt_of_a_python_call_is_refused_for_loss():
    row = parse_row({"prompt": "ab"}, "x line 1", needs_answer=False)
    with pytest.raises(
        ValueError,
        match="x line 1 must have an answer for metric 'loss', got a prompt alone; "
        "use metric 'agreement'",
    ):
        tokenize_rows(
            [row], make_tokenizer(), metric="loss", max_length=9, vocab_size=99
        )


def test_whole_text_loses_its_end_where_it_is_too_long(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "abcd"}\n', encoding="utf-8")
    rows = read_rows("x.jsonl", [tmp_path], needs_answer=False)
    found = tokenize_rows(
        rows, make_tokenizer(), metric="agreement", max_length=3, vocab_size=99
    )
    assert found.samples[0].options[0].ids == tuple(ids_of("abc"))
    assert found.n_truncated == 1


def test_prompt_without_a_token_is_named():
    tokenizer = make_tokenizer()
    split = pre_tokenizers.Split("-", "removed")
    tokenizer.backend_tokenizer.pre_tokenizer = split
    row = parse_row({"prompt": "-"}, "x line 1", needs_answer=False)
    with pytest.raises(
        ValueError,
        match=r"x line 1 must have a token of its own to agree at, got none \(of 0 ",
    ):
        tokenize_rows([row], tokenizer, metric="agreement", max_length=9, vocab_size=99)
