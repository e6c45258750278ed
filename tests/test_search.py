"""Search: every number is the score of a merge that `mergekit-yaml` writes."""

import csv
import io
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from test_analysis import Bench, make_analysis, save_school

from mergekit_himerging import search
from mergekit_himerging.kernel import find_cut, find_cuts_at
from mergekit_himerging.planning import plan_recipe
from mergekit_himerging.search import SearchSettings, Values, search_merge


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    return save_school(tmp_path_factory.mktemp("学校"))


def run_search(recipe, **settings):
    config = MergeConfiguration.model_validate(recipe)
    merge = plan_recipe(config, MergeOptions(quiet=True))
    return merge, search_merge(merge, SearchSettings(**settings))


@pytest.fixture(scope="module")
def searched(school, tmp_path_factory):
    """A search over a small grid, and the recipe that it ran on."""
    folder = tmp_path_factory.mktemp("search")
    recipe = make_analysis(school, folder, "a", "b", of_model={"weight": 0.8})
    recipe["parameters"] = {}
    return recipe, *run_search(recipe, grid=4, evaluations=9, weights=(0.5, 1.1))


def with_choice(recipe, choice):
    """Write a choice into a recipe by hand."""
    models = []
    for item in recipe["models"]:
        values = choice.get(item["model"], Values())
        given = {
            name: getattr(values, name)
            for name in ("density", "scale", "weight")
            if getattr(values, name) is not None
        }
        kept = {k: v for k, v in item["parameters"].items() if k == "weight"}
        models.append({"model": item["model"], "parameters": {**kept, **given}})
    return {**recipe, "models": models, "parameters": {}}


def test_trials_are_the_scores_of_merges_on_disk(school, searched, merge, tmp_path):
    recipe, _, result = searched
    bench = Bench.of(school, "a", "b")
    some = [result.trials[0], result.trials[5], result.trials[-1], result.best]
    for number, trial in enumerate(some):
        out = tmp_path / str(number)
        merged = merge(with_choice(recipe, trial.choice), out=out)
        for model, score in trial.scores.items():
            brute = bench.score(merged, model.rsplit("/", 1)[-1])
            assert score == pytest.approx(float(brute.mean()), abs=1e-5)
    for name in "ab":
        own = {n: t.float() for n, t in bench.tuned[name].items()}
        expected = float(bench.score(own, name).mean())
        assert result.single[str(school / name)] == pytest.approx(expected, abs=1e-5)
        expected = float(bench.score(bench.base, name).mean())
        assert result.base[str(school / name)] == pytest.approx(expected, abs=1e-5)


def test_objective_is_the_mean_recovered_gain_and_the_best_has_most(searched):
    _, _, result = searched
    for trial in result.trials:
        shares = [
            (trial.scores[m] - result.base[m]) / (result.single[m] - result.base[m])
            for m in trial.scores
        ]
        assert trial.objective == pytest.approx(np.mean(shares))
        assert list(trial.gains.values()) == pytest.approx(shares)
        assert trial.behind == pytest.approx(result.best.objective - trial.objective)
        assert trial.behind >= 0
    assert result.best.behind == result.best.behind_se == 0
    assert result.trials[0].choice == {}


def test_each_model_gets_its_evaluations_and_its_weights(school, searched):
    _, _, result = searched
    counts = {
        str(school / name): sum(t.model == str(school / name) for t in result.trials)
        for name in "ab"
    }
    # Nine cells and two weights; a choice that was tried before is not tried again.
    assert all(9 <= count <= 11 for count in counts.values())
    choices = [repr(sorted(t.choice.items())) for t in result.trials]
    assert len(set(choices)) == len(choices)


def test_tuned_recipe_holds_the_best_values(searched, school, merge, tmp_path):
    recipe, planned, result = searched
    text = search.write_recipe(planned, result)
    tuned = yaml.safe_load(text)
    assert "学校" in text
    for item in tuned["models"]:
        for name in ("density", "scale", "weight"):
            wanted = getattr(result.best.choice[item["model"]], name)
            if wanted is not None:
                assert item["parameters"][name] == wanted
        assert "calibration" in item["parameters"]
    by_hand = merge(with_choice(recipe, result.best.choice), out=tmp_path / "one")
    for item in tuned["models"]:
        del item["parameters"]["calibration"]
    written = merge(tuned, out=tmp_path / "two")
    assert all(torch.equal(by_hand[name], written[name]) for name in by_hand)
    start = result.trials[0]
    assert f"of the recipe as it was: {start.objective:.4f}" in text


def test_recipe_in_another_folder_finds_its_data(searched, tmp_path):
    recipe, planned, result = searched
    data = Path(recipe["models"][0]["parameters"]["calibration"])
    moved = {
        **recipe,
        "models": [
            {
                **item,
                "parameters": {
                    **item["parameters"],
                    "calibration": Path(item["parameters"]["calibration"]).name,
                },
            }
            for item in recipe["models"]
        ],
    }
    config = MergeConfiguration.model_validate(moved)
    planned = replace(planned, config=config, folders=[data.parent])
    for folder in (data.parent, data.parent / "tuned", tmp_path):
        tuned = yaml.safe_load(search.write_recipe(planned, result, folder))
        for item, old in zip(tuned["models"], recipe["models"], strict=True):
            found = folder / item["parameters"]["calibration"]
            assert found.resolve() == Path(old["parameters"]["calibration"]).resolve()


def test_table_has_a_row_for_every_trial(searched, school):
    _, _, result = searched
    rows = list(csv.DictReader(io.StringIO(search.write_table(result))))
    assert len(rows) == len(result.trials)
    for row, trial in zip(rows, result.trials, strict=True):
        assert float(row["objective"]) == trial.objective
        for model, score in trial.scores.items():
            assert float(row[f"score {model}"]) == score


def test_standard_error_is_that_of_paired_samples():
    scores = {
        "": [np.array([0.0, 0.0, 0.0]), np.array([0.0, 0.0])],
        "x": [np.array([1.0, 2.0, 3.0]), np.array([4.0, 4.0])],
        "y": [np.array([1.0, 1.0, 1.0]), np.array([1.0, 3.0])],
    }
    replies = iter([[scores[""], scores["x"], scores["x"]], [scores["x"], scores["y"]]])
    found = search._Search(["a", "b"], lambda choices: next(replies), is_raw=False)
    found.measure_references()
    found.try_all("a", [{}, {"a": Values(density=0.5)}])
    _, worse = found.result().trials
    # Gains 2 and 4; differences 0, 1, 2 over 2 and 3, 1 over 4.
    a = np.array([0, 1, 2]) / 2
    b = np.array([3, 1]) / 4
    assert worse.behind == pytest.approx((a.mean() + b.mean()) / 2)
    variance = a.var(ddof=1) / 3 + b.var(ddof=1) / 2
    assert worse.behind_se == pytest.approx(np.sqrt(variance) / 2)


def test_worst_task_decides_where_asked():
    """`x` has the better mean, `y` the better worst task."""
    base = [np.array([0.0, 0.0]), np.array([0.0, 0.0])]
    single = [np.array([1.0, 1.0]), np.array([2.0, 2.0])]
    x = [np.array([1.0, 0.8]), np.array([0.2, 0.6])]
    y = [np.array([0.3, 0.5]), np.array([0.9, 0.7])]
    replies = iter([[base, single, single], [x, y]])
    found = search._Search(
        ["a", "b"], lambda choices: next(replies), is_raw=False, objective="worst"
    )
    found.measure_references()
    found.try_all("a", [{}, {"a": Values(density=0.5)}])
    result = found.result()
    first, second = result.trials
    assert result.best == second
    assert first.objective == pytest.approx(0.2)  # task b: 0.4 of 2
    assert second.objective == pytest.approx(0.4)  # both tasks
    assert first.behind == pytest.approx(0.2)
    # The worst tasks differ: b in `x`, a in `y`, so their variances add up.
    variance = np.var([0.1, 0.3], ddof=1) / 2 + np.var([0.3, 0.5], ddof=1) / 2
    assert first.behind_se == pytest.approx(np.sqrt(variance))
    assert result.what == "worst recovered gain"


@pytest.mark.parametrize("peak", [*itertools.product((1, 4, 8, 10), (2, 7, 10))])
def test_coarse_to_fine_finds_the_peak_of_a_smooth_hill(peak):
    """With a quarter of the grid's evaluations."""
    counted = []

    class Hill:
        def best(self):
            return {}

        def try_all(self, model, choices):
            counted.extend(choices)
            cells = [(10 * c["m"].density, 10 * c["m"].scale) for c in choices]
            return [-((d - peak[0]) ** 2) - 2 * (s - peak[1]) ** 2 for d, s in cells]

    search._search_grid(Hill(), "m", SearchSettings(grid=10, evaluations=25))
    assert len(counted) <= 25
    tried = {(round(10 * c["m"].density), round(10 * c["m"].scale)) for c in counted}
    assert len(tried) == len(counted)
    assert peak in tried


def test_budget_of_the_whole_grid_tries_all_of_it():
    cells = []

    class Flat:
        def best(self):
            return {}

        def try_all(self, model, choices):
            cells.extend((c["m"].density, c["m"].scale) for c in choices)
            return [0.0] * len(choices)

    search._search_grid(Flat(), "m", SearchSettings(grid=3, evaluations=9))
    assert sorted(cells) == sorted(itertools.product((1 / 3, 2 / 3, 1.0), repeat=2))


def test_little_memory_gives_the_same_scores(school, searched, tmp_path):
    recipe, _, whole = searched
    small = {**recipe, "parameters": {"analysis_memory": "40KB"}}
    _, parts = run_search(small, grid=4, evaluations=9, weights=(0.5, 1.1))
    for one, other in zip(whole.trials, parts.trials, strict=True):
        assert one.choice == other.choice
        assert one.objective == pytest.approx(other.objective, abs=1e-5)


def test_one_selection_serves_many_densities():
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(40, 30, generator=generator)
    tuned = base + torch.randn(40, 30, generator=generator).round(decimals=1)
    densities = [0.0, 0.05, 0.3, 0.31, 0.9, 1.0]
    cuts = find_cuts_at("m", tuned, base, densities)
    assert cuts == [find_cut(tuned - base, density) for density in densities]
    assert find_cuts_at("m", base, base, [0.5, 1.0]) == [float("inf")] * 2


def test_search_without_data_or_with_a_wide_scope_is_refused(school, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b")
    del recipe["parameters"]["plan_out"]
    wide = {**recipe, "parameters": {"scope": "model"}}
    with pytest.raises(ValueError, match="must rank inside tensors, got scope: model"):
        run_search(wide)
    planned = {**recipe, "parameters": {"plan": "some.json"}}
    with pytest.raises(ValueError, match="must score plain merges, got plan: some"):
        run_search(planned)
    bare = {
        **recipe,
        "models": [{"model": item["model"]} for item in recipe["models"]],
        "parameters": {},
    }
    with pytest.raises(ValueError, match="must have calibration data, got none"):
        run_search(bare)


def test_whole_expert_is_not_diluted_by_what_the_recipe_does_to_the_merge(
    school, searched, merge, tmp_path
):
    recipe = make_analysis(school, tmp_path, "a", "b", of_model={"weight": 0.8})
    diluted = {"lambda": 0.5, "consensus": "sum"}
    recipe["parameters"] = {**diluted, "resolve": "rules"}
    _, result = run_search(recipe, grid=2, evaluations=4)
    assert result.single == pytest.approx(searched[-1].single)
    assert result.base == pytest.approx(searched[-1].base)
    bench = Bench.of(school, "a", "b")
    plain = with_choice(recipe, {})
    merged = merge({**plain, "parameters": diluted}, out=tmp_path / "out")
    for model, score in result.trials[0].scores.items():
        brute = float(bench.score(merged, model.rsplit("/", 1)[-1]).mean())
        assert score == pytest.approx(brute, abs=1e-5)


def test_values_are_put_to_models_that_are_merged_alone(searched):
    recipe, planned, result = searched
    source = {
        "kind": "model_token",
        "model": recipe["models"][0]["model"],
        "token": "a",
    }
    tokens = {"tokenizer": {"source": "base", "tokens": {"a": {"source": source}}}}
    config = MergeConfiguration.model_validate({**recipe, **tokens})
    text = search.write_recipe(replace(planned, config=config), result)
    tuned = yaml.safe_load(text)
    assert "parameters" not in tuned["tokenizer"]["tokens"]["a"]["source"]
    best = result.best.choice[recipe["models"][0]["model"]]
    assert tuned["models"][0]["parameters"]["weight"] == best.weight is not None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"grid": 1}, r"grid must be in \[2, 100\], got 1"),
        ({"evaluations": 3}, "evaluations must be at least 4, got 3"),
    ],
)
def test_setting_of_a_search_out_of_range_is_named(settings, problem):
    with pytest.raises(ValueError, match=problem):
        SearchSettings(**settings)


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        ({}, None, np.mean),
        ({"objective": "worst"}, None, np.min),
        ({"objective": "worst"}, "mean", np.mean),
        ({}, "worst", np.min),
    ],
)
def test_objective_is_the_recipes_own_unless_another_is_asked_for(
    own, asked, expected, school, tmp_path
):
    recipe = make_analysis(school, tmp_path, "a", "b", of_model={"weight": 0.8})
    recipe["parameters"] = own
    _, result = run_search(recipe, grid=2, evaluations=4, objective=asked)
    for trial in result.trials:
        assert trial.objective == pytest.approx(expected(list(trial.gains.values())))
