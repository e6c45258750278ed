"""The Python API: against merges on disk, runs with other rules, and plain forwards."""

import copy
import gc
import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from conftest import (
    VOCABULARY,
    make_llama,
    make_recipe,
    make_tokenizer,
    save_model,
    tune,
)
from mergekit.config import MergeConfiguration
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from safetensors.torch import load_file, save_file
from test_analysis import (
    ROWS,
    Bench,
    completions,
    encode,
    log_probability,
    make_analysis,
    save_school,
    write_rows,
)
from transformers import AutoModelForCausalLM, GenerationConfig

import mergekit_himerging
from mergekit_himerging import api
from mergekit_himerging.analysis import session
from mergekit_himerging.analysis.overlap import hash_row
from mergekit_himerging.analysis.row_files import read_rows
from mergekit_himerging.evaluation.models import load_merge
from mergekit_himerging.evaluation.records import Settings
from mergekit_himerging.parameters import RecipeError
from mergekit_himerging.plan import Plan, read_plan

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_school(tmp_path_factory.mktemp("学校"))


def make_measured(school: Path, folder: Path, **parameters: Any) -> dict[str, Any]:
    """Make a recipe with calibration data that treats some layers."""
    changes = {"guard": "report", "density": 0.5, **parameters}
    recipe = make_analysis(school, folder, "a", "b", **changes)
    del recipe["parameters"]["plan_out"]
    return recipe


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    """Keep plans apart from the user's, find them again here, and time in short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mergekit_himerging.estimate.TIMED_SECONDS", 0.0)
        folder = str(tmp_path_factory.mktemp("cache"))
        patch.setenv("MERGEKIT_HIMERGING_CACHE", folder)
        yield


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Keep what is loaded out of the collections that evaluations ask for."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def analysed(school, tmp_path_factory) -> tuple[dict[str, Any], Plan]:
    """A recipe and its plan."""
    recipe = make_measured(school, tmp_path_factory.mktemp("分析"))
    return recipe, api.analyze(recipe)


# Merges in memory


def load_written(folder: Path) -> Tensors:
    """Read what transformers makes of a merged folder, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.state_dict())


def assert_equals_disk(
    recipe: Mapping[str, Any], merge: Callable[..., Tensors], tmp_path: Path
) -> None:
    """Hold a merge in memory against what `mergekit-yaml` writes."""
    written = merge(recipe)
    planned = api.plan(recipe)
    model, tokenizer = load_merge(planned, planned.read_plan())
    ours = dict(model.state_dict())
    for name, tensor in written.items():
        assert torch.equal(ours[name], tensor.float()), name
    loaded = load_written(tmp_path / "merged")
    assert ours.keys() == loaded.keys()
    assert [name for name in loaded if not torch.equal(ours[name], loaded[name])] == []
    from_folder = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.get_vocab() == from_folder.get_vocab()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "merged")
    assert model.config.vocab_size == config.vocab_size
    assert model.config.num_hidden_layers == config.num_hidden_layers


def slice_up(recipe: dict[str, Any], *ranges: list[int]) -> dict[str, Any]:
    sources = [{"model": recipe["base_model"]}, *recipe.pop("models")]
    recipe["slices"] = [
        {"sources": [{**source, "layer_range": layers} for source in sources]}
        for layers in ranges
    ]
    return recipe


METHODS: dict[str, dict[str, Any]] = {
    "ties": {"merge_method": "ties", "parameters": {"weight": 0.6, "density": 0.5}},
    "linear": {"merge_method": "linear", "parameters": {"weight": 0.3}},
    "hi_merging": {"parameters": {"density": 0.3, "scope": "layer"}},
    "rounded": {"parameters": {"weight": 0.6}, "out_dtype": "bfloat16"},
}


@pytest.mark.parametrize("changes", METHODS.values(), ids=METHODS.keys())
def test_merge_in_memory_is_the_merge_on_disk(changes, school, merge, tmp_path):
    recipe = make_recipe(school, "a", "b", **changes)
    assert_equals_disk(recipe, merge, tmp_path)


def test_merge_by_a_plan_in_memory_is_the_merge_on_disk(
    analysed, school, merge, tmp_path
):
    _, plan = analysed
    assert {t.action for t in plan.treatments} != {"keep"}
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    recipe = make_recipe(
        school, "a", "b", parameters={"plan": str(path), "density": 0.5}
    )
    assert_equals_disk(recipe, merge, tmp_path)


@pytest.mark.parametrize(
    ("method", "ranges"),
    [("hi_merging", ([0, 2], [1, 3])), ("ties", ([0, 2], [1, 3])), ("ties", ([1, 2],))],
    ids=["more", "more by ties", "less by ties"],
)
def test_merge_of_slices_in_memory_is_the_merge_on_disk(
    method, ranges, school, merge, tmp_path
):
    recipe = make_recipe(school, "a", "b", merge_method=method)
    recipe["parameters"] = {"density": 0.5, "weight": 0.5}
    assert_equals_disk(slice_up(recipe, *ranges), merge, tmp_path)


@pytest.mark.parametrize("method", ["hi_merging", "linear"])
def test_merge_of_tied_heads_in_memory_is_the_merge_on_disk(method, merge, tmp_path):
    base = make_llama(seed=0, tied=True)
    for seed, name in enumerate("ab", start=1):
        save_model(tune(base, seed=seed), tmp_path / name)
    save_model(base, tmp_path / "base")
    recipe = make_recipe(tmp_path, "a", "b", merge_method=method)
    recipe["parameters"] = {"weight": 0.5}
    assert_equals_disk(recipe, merge, tmp_path)


@pytest.mark.parametrize("method", ["hi_merging", "linear"])
def test_merge_of_vocabularies_in_memory_is_the_merge_on_disk(method, merge, tmp_path):
    base = make_llama(seed=0)
    save_model(base, tmp_path / "base")
    save_model(tune(base, seed=1), tmp_path / "a")
    wide = tune(base, seed=2)
    wide.resize_token_embeddings(len(VOCABULARY) + 2, mean_resizing=False)
    save_model(wide, tmp_path / "b")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["中", "文"])
    tokenizer.save_pretrained(tmp_path / "b")
    recipe = make_recipe(tmp_path, "a", "b", merge_method=method)
    recipe |= {"parameters": {"weight": 0.5}, "tokenizer": {"source": "union"}}
    assert_equals_disk(recipe, merge, tmp_path)


def test_merge_in_memory_ends_answers_as_the_merge_on_disk(merge, tmp_path):
    base = make_llama(seed=0)
    save_model(tune(base, seed=1), tmp_path / "a")
    save_model(base, tmp_path / "base")
    GenerationConfig(eos_token_id=[1, 20]).save_pretrained(tmp_path / "base")
    recipe = make_recipe(tmp_path, "a")
    merge(recipe)
    model, _ = load_merge(api.plan(recipe), None)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert written.generation_config.eos_token_id == [1, 20]
    assert model.generation_config.eos_token_id == [1, 20]


# Deciding anew


RULES: dict[str, dict[str, Any]] = {
    "interfering": {"mixed": "interfering"},
    "raw": {"compare": "raw"},
    "few layers": {"max_layers": 1},
    "sure": {"confidence": 1.5},
    "harder": {"layer_density": 0.1, "layer_scale": 0.0},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_plan_decided_anew_is_that_of_a_run_with_these_rules(rules, analysed):
    recipe, plan = analysed
    anew = api.make_plan(plan, **rules)
    parameters = {**recipe["parameters"], **rules}
    run = api.analyze({**recipe, "parameters": parameters})
    assert anew.treatments == run.treatments
    assert anew.order == run.order
    assert anew.settings == run.settings
    assert anew.guard is None
    assert {t.score_treated for t in anew.tasks} == {None}
    assert Plan.model_validate_json(anew.to_json()) == anew


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"mixd": "degraded"}, r"rules must be among .*'mixed'.*, got \['mixd'\]"),
        ({"layer_density": 50}, r"layer_density must be in \[0, 1\], got 50"),
        ({"mixed": "all"}, "mixed must be one of 'degraded', 'interfering', got 'all'"),
    ],
)
def test_wrong_rules_are_refused(rules, message, analysed):
    with pytest.raises(ValueError, match=message):
        api.make_plan(analysed[1], **rules)


def test_plan_without_scores_cannot_be_decided_anew(analysed):
    bare = analysed[1].model_copy(update={"tasks": ()})
    with pytest.raises(ValueError, match="must have scores to decide from, got none"):
        api.make_plan(bare)


def test_measured_plan_cannot_be_decided_anew(analysed):
    tasks = [task.model_copy(update={"layers": ()}) for task in analysed[1].tasks]
    measured = analysed[1].model_copy(update={"tasks": tuple(tasks)})
    with pytest.raises(ValueError, match="got a plan of 'resolve: measured'; analyse"):
        api.make_plan(measured)


# Analyses


def test_recipe_may_be_file_mapping_or_record_and_stays_as_it_is(
    analysed, school, tmp_path
):
    recipe, plan = analysed
    before = copy.deepcopy(recipe)
    record = MergeConfiguration.model_validate(recipe)
    written = record.to_yaml()
    path = tmp_path / "配方.yml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    plans = [api.analyze(kind) for kind in (recipe, record, path, str(path))]
    assert recipe == before
    assert record.to_yaml() == written
    assert all(found == plan for found in plans)


def test_model_that_is_trained_on_in_one_process_is_measured_anew(
    school, tmp_path, monkeypatch
):
    """MergeKit keeps models that it has opened, whatever becomes of their files."""
    models = shutil.copytree(school, tmp_path / "models")
    recipe = make_measured(models, tmp_path)
    before = api.analyze(recipe)
    path = models / "a" / "model.safetensors"
    base = load_file(models / "base" / "model.safetensors")
    tuned = {n: t + 0.3 * (t - base[n]) for n, t in load_file(path).items()}
    path.unlink()
    save_file(tuned, path, metadata={"format": "pt"})
    after = api.analyze(recipe)
    assert after.tasks != before.tasks
    # As a process says that has never seen the earlier weights.
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "other"))
    LoaderCache.loaders.clear()
    assert api.analyze(recipe) == after


def test_pad_token_that_the_models_were_not_resized_for_is_no_problem(school, tmp_path):
    models = shutil.copytree(school, tmp_path / "models")
    for folder in models.iterdir():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        tokenizer.save_pretrained(folder)
    n_rows = len(load_file(models / "base" / "model.safetensors")["lm_head.weight"])
    assert tokenizer.pad_token_id >= n_rows
    padded = api.analyze(make_measured(models, tmp_path))
    plain = api.analyze(make_measured(school, tmp_path))
    assert [t.layers for t in padded.tasks] == [t.layers for t in plain.tasks]


def test_analysis_without_data_is_refused(school):
    with pytest.raises(RecipeError, match="must have calibration data, got none"):
        api.analyze(make_recipe(school, "a"))


@pytest.mark.parametrize("call", [api.analyze, api.search], ids=["analyze", "search"])
def test_recipe_of_another_method_is_refused(call, school):
    recipe = make_recipe(school, "a", merge_method="task_arithmetic")
    recipe["parameters"] = {"weight": 1.0}
    with pytest.raises(RecipeError, match="must be hi_merging, got 'task_arithmetic'"):
        call(recipe)


def test_export_of_a_carried_recipe_plans_the_same_values(analysed):
    recipe, plan = analysed
    exported = api.export(plan, "hi_merging")
    assert exported == api.export(plan, "hi_merging", recipe=recipe)
    written = api.plan(yaml.safe_load(exported.text)).resolve(None)
    expected = api.plan(recipe).resolve(plan)
    for tensor, wanted in zip(written, expected, strict=True):
        assert tensor.task.input_parameters == wanted.task.input_parameters


def test_export_of_a_plan_without_recipe_is_refused(analysed):
    bare = analysed[1].model_copy(update={"recipe": {}})
    with pytest.raises(ValueError, match="must carry its recipe, got none"):
        api.export(bare, "hi_merging")


def test_search_over_a_recipe_is_the_search_over_its_merge(analysed):
    recipe, _ = analysed
    settings = api.SearchSettings(grid=2, evaluations=4)
    found = api.search(recipe, settings=settings)
    assert found == api.search(api.plan(recipe), settings=settings)
    assert found.best.objective == max(trial.objective for trial in found.trials)


# Checks


def test_check_finds_all_problems_at_once(school, tmp_path):
    recipe = make_measured(school, tmp_path, density=50)
    recipe["models"].append({"model": "./缺失", "parameters": {"calibration": "没有"}})
    recipe["models"][0]["parameters"]["calibration"] = str(tmp_path / "无.jsonl")
    recipe["parameters"]["wieght"] = 1
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    report = api.check(path, out=school / "base")
    assert report.cost is None
    for expected in (
        "density must be in [0, 1], got 50",
        "unknown parameter 'wieght'",
        "model './缺失' does not exist",
        "无.jsonl",
        "没有",
        "the output folder must not be an input",
    ):
        assert sum(expected in problem for problem in report.problems) == 1, expected


def test_check_finds_a_plan_for_other_models(analysed, school, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(analysed[1].to_json(), encoding="utf-8")
    recipe = make_recipe(school, "a", parameters={"plan": str(path)})
    (problem,) = api.check(recipe).problems
    assert "plan is for the models" in problem
    recipe["parameters"]["plan"] = "缺.json"
    (problem,) = api.check(recipe).problems
    assert "plan must be a file, found none at" in problem


def test_check_finds_rows_that_cannot_be_scored(school, tmp_path):
    recipe = make_measured(school, tmp_path)
    write_rows(tmp_path, "a", [{"prompt": "a", "completion": "b" * 5000}])
    write_rows(tmp_path, "b", [{"prompt": "a"}])
    report = api.check(recipe)
    assert any("b.jsonl" in problem for problem in report.problems)
    assert report.cost is None


def test_check_finds_a_model_that_is_cut_short(school, tmp_path):
    recipe = make_measured(school, tmp_path)
    folder = tmp_path / "短"
    save_model(make_llama(seed=5), folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-64])
    recipe["models"][0]["model"] = str(folder)
    (problem,) = api.check(recipe).problems
    n_bytes = len(content)
    assert f"'{file}' must have {n_bytes} bytes, got {n_bytes - 64}" in problem


def test_check_finds_a_shard_that_is_cut_short_or_missing(school, tmp_path):
    recipe = make_measured(school, tmp_path)
    folder = tmp_path / "片"
    save_model(make_llama(seed=5), folder, max_shard_size="50KB")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(content[:-64])
    recipe["models"][0]["model"] = str(folder)
    (problem,) = api.check(recipe).problems
    assert f"must have {len(content)} bytes, got {len(content) - 64}" in problem
    first.write_bytes(content)
    second.unlink()
    (problem,) = api.check(recipe).problems
    assert second.name in problem


def test_check_finds_a_full_disk(school, tmp_path, monkeypatch):
    def usage(folder: Path) -> Any:
        assert folder == tmp_path
        return type("Usage", (), {"free": 1000})

    monkeypatch.setattr("mergekit_himerging.estimate.shutil.disk_usage", usage)
    recipe = make_measured(school, tmp_path)
    (problem,) = api.check(recipe, out=tmp_path / "new" / "merged").problems
    assert f"the disk of '{tmp_path}' must have 0.00 GiB" in problem


@pytest.mark.parametrize(
    ("parameters", "n_passes"),
    [
        ({}, 4),
        ({"scope": "layer"}, 8),  # twice for the plain merge, twice for the treated
        ({"scope": "model"}, 8),
        ({"analysis_memory": "64KB"}, 5),  # one model's layers at a time
    ],
    ids=["in one go", "by layer", "by model", "with little memory"],
)
def test_check_of_a_good_recipe_counts_what_the_analysis_does(
    parameters, n_passes, school, tmp_path, monkeypatch
):
    recipe = make_measured(school, tmp_path, **parameters)
    report = api.check(recipe, out=tmp_path / "merged")
    assert report.problems == ()
    assert report.cost is not None
    calls, read = 0, 0
    get_tensor = LazyTensorLoader.get_tensor

    def count(self: Any, key: str, *rest: Any, **more: Any) -> torch.Tensor:
        nonlocal read
        tensor = get_tensor(self, key, *rest, **more)
        read += tensor.numel() * tensor.element_size()
        return tensor

    advance = session.Replay.with_block

    def count_blocks(self: Any, layer: int, weights: Any, use: Any) -> None:
        def counted(run: Any) -> None:
            def run_one(*arguments: Any) -> torch.Tensor:
                nonlocal calls
                calls += 1
                result: torch.Tensor = run(*arguments)
                return result

            use(run_one)

        advance(self, layer, weights, counted)

    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(LazyTensorLoader, "get_tensor", count)
    monkeypatch.setattr(session.Replay, "with_block", count_blocks)
    plan = api.analyze(recipe)
    assert any(treatment.action != "keep" for treatment in plan.treatments)
    assert report.cost.n_block_calls == calls
    sizes = [
        (name, tensor.numel() * tensor.element_size())
        for model in ("base", "a", "b")
        for name, tensor in load_file(school / model / "model.safetensors").items()
    ]
    in_files = sum(size for _, size in sizes)
    spared = 0
    if all(treatment.density_factor == 1 for treatment in plan.treatments):
        # The treated merge has the cuts of the plain one.
        scope = parameters.get("scope", "tensor")
        ranked = {"tensor": "no name", "layer": ".layers.", "model": ""}[scope]
        spared = 2 * sum(size for name, size in sizes if ranked in name)
    assert report.cost.bytes_read == read + in_files + spared
    assert report.cost.n_passes == n_passes
    assert report.cost.n_tokens == sum(task.n_tokens for task in plan.tasks)
    assert 0 < report.cost.seconds < 60


def test_check_of_a_recipe_without_an_analysis_tells_no_cost(school):
    assert api.check(make_recipe(school, "a")) == api.CheckReport((), None)


def test_check_takes_what_mergekit_cannot_merge_as_a_problem(school, tmp_path):
    folder = tmp_path / "gpt2"
    config = transformers.GPT2Config(
        vocab_size=len(VOCABULARY), n_embd=8, n_layer=3, n_head=2
    )
    save_model(transformers.GPT2LMHeadModel(config), folder)
    recipe = make_recipe(school, "a")
    recipe["models"].append({"model": str(folder)})
    problems = api.check(recipe).problems
    assert any("architecture" in problem for problem in problems)


# Evaluations


QUICK = Settings(generates=False, n_resamples=50)


def write_held_out(folder: Path, name: str) -> Path:
    pairs = [(f"x{prompt}", answer) for prompt, answer in ROWS[name]]
    rows = [{"prompt": p, "completion": c} for p, c in pairs]
    return Path(write_rows(folder, f"{name}.test", rows))


def mean_loss(state: Tensors, name: str) -> float:
    """Score held-out rows by plain forwards, one at a time."""
    model = make_llama(seed=0).eval()
    model.load_state_dict({n: t.float() for n, t in state.items()})
    tokenizer = make_tokenizer()
    with torch.no_grad():
        each = [
            float(log_probability(model, encode(tokenizer, f"x{prompt}", answer)))
            for prompt, answer in ROWS[name]
        ]
    return -sum(each) / len(each)


def test_recipes_of_two_methods_are_scored_beside_base_and_experts(
    analysed, school, tmp_path
):
    recipe, plan = analysed
    ties = make_recipe(school, "a", "b", merge_method="ties")
    ties["parameters"] = {"weight": 1.0, "density": 1.0, "normalize": True}
    files = []
    for name, content in (("新", recipe), ("老", ties)):
        files.append(tmp_path / f"{name}.yml")
        text = yaml.safe_dump(content, allow_unicode=True)
        files[-1].write_text(text, encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    held_out = {name: write_held_out(tmp_path, name) for name in "ab"}
    found = api.evaluate(files, list(held_out.values()), settings=QUICK)
    models = {info.name: info for info in found.models}
    base, a, b = (str(school / name) for name in ("base", "a", "b"))
    assert set(models) == {base, a, b, "新.yml", "老.yml"}
    roles = {name: info.role for name, info in models.items()}
    assert roles == {
        **{base: "base", a: "expert", b: "expert"},
        **{"新.yml": "merge", "老.yml": "merge"},
    }
    assert (models[a].task, models[b].task) == ("a.test", "b.test")

    bench = Bench.of(school, "a", "b", density=0.5)
    factors = {
        (t.layer, Path(t.model).name): (
            t.factors.density,
            t.factors.scale,
            t.factors.weight,
        )
        for t in plan.treatments
    }
    states = {base: bench.base, a: bench.tuned["a"], b: bench.tuned["b"]}
    states["新.yml"] = bench.merged(factors)
    losses = {
        (result.model, result.task): result.estimates["loss"].value
        for result in found.results
    }
    for (model, state), name in itertools.product(states.items(), "ab"):
        expected = pytest.approx(mean_loss(state, name), abs=1e-5)
        assert losses[model, f"{name}.test"] == expected, (model, name)
    assert losses["老.yml", "a.test"] != losses["新.yml", "a.test"]
    assert set(tmp_path.rglob("*")) - set(before) == set(held_out.values())


def test_recipes_of_one_name_keep_their_own_labels(school, tmp_path):
    held_out = write_held_out(tmp_path, "a")
    files = []
    for folder, weight in (("x", 0.1), ("y", 0.9), ("z", 0.5)):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "recipe.yml")
        recipe = make_recipe(school, "a", parameters={"weight": weight})
        files[-1].write_text(yaml.safe_dump(recipe), encoding="utf-8")
    found = api.evaluate(files, [held_out], settings=QUICK)
    merges = [info.name for info in found.models if info.role == "merge"]
    assert sorted(merges) == ["x/recipe.yml", "y/recipe.yml", "z/recipe.yml"]


def test_recipes_with_two_bases_must_be_given_one(school, tmp_path):
    held_out = write_held_out(tmp_path, "a")
    files = []
    for base in "bc":
        files.append(tmp_path / f"{base}.yml")
        recipe = make_recipe(school, "a") | {"base_model": str(school / base)}
        files[-1].write_text(yaml.safe_dump(recipe), encoding="utf-8")
    with pytest.raises(ValueError, match=r"recipes must share a base.*name one"):
        api.evaluate(files, [held_out], settings=QUICK)
    base = str(school / "base")
    found = api.evaluate(files, [held_out], base=base, settings=QUICK)
    assert [info.name for info in found.models if info.role == "base"] == [base]


def refuse_work(*_: Any, **__: Any) -> None:
    pytest.fail("nothing must be measured before the check")


def test_calibration_rows_are_refused_before_anything_is_measured(
    analysed, school, tmp_path, monkeypatch
):
    recipe, plan = analysed
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    # Another order, other keys, another file: the same content.
    rows = [{"input": "", "instruction": "new", "output": "row"}]
    rows += [{"completion": c, "prompt": p} for p, c in reversed(ROWS["a"])]
    held_out = write_rows(tmp_path, "考试", rows)
    monkeypatch.setattr("mergekit_himerging.api.find_plan", refuse_work)
    monkeypatch.setattr("mergekit_himerging.api.run.evaluate", refuse_work)
    with pytest.raises(ValueError, match=r"got 4 of 5 .*考试.jsonl line 2"):
        api.evaluate([path], [held_out])
    hashes = {hash_row(row) for row in read_rows(held_out, [])}
    assert len(hashes & {r for task in plan.tasks for r in task.calibration_rows}) == 4


@pytest.mark.parametrize("role", ["merge", "expert", "base"])
def test_calibration_rows_of_a_merged_folder_are_refused(
    role, analysed, school, tmp_path
):
    folder = tmp_path / "merged"
    folder.mkdir()
    text = analysed[1].to_json()
    (folder / "hi_merging_plan.json").write_text(text, encoding="utf-8")
    held_out = write_rows(tmp_path, "t", completions("b"))
    others = {
        "merge": {},
        "expert": {"experts": {"t": str(folder)}},
        "base": {"base": str(folder)},
    }[role]
    models = [str(folder)] if role == "merge" else [str(school / "a")]
    with pytest.raises(ValueError, match="got 4 of 4 that are"):
        api.evaluate(models, [held_out], settings=QUICK, **others)


def test_expert_is_another_model_than_the_base_and_of_one_task(school, tmp_path):
    data = {name: write_held_out(tmp_path, name) for name in "ab"}
    base = str(school / "base")
    with pytest.raises(ValueError, match=r"of 'a' must be another model than the base"):
        api.evaluate([str(school / "a")], data, base=base, experts={"a": base})
    with pytest.raises(ValueError, match="'m' must be the expert of one task, got 'a'"):
        api.evaluate([str(school / "a")], data, experts={"a": "m", "b": "m"})


def test_model_is_scored_once_however_its_folder_is_spelled(
    analysed, school, tmp_path, monkeypatch
):
    monkeypatch.chdir(school)
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(analysed[0]), encoding="utf-8")
    data = {name: write_held_out(tmp_path, name) for name in "ab"}
    found = api.evaluate(
        [path], data, base="./base", experts={"a": "./a"}, settings=QUICK
    )
    assert sorted(info.role for info in found.models) == [
        "base",
        "expert",
        "expert",
        "merge",
    ]
    with pytest.raises(ValueError, match=r"another model than the base, got './base'"):
        api.evaluate([path], data, experts={"a": "./base"})


def test_expert_without_a_task_is_named(analysed, tmp_path, caplog):
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(analysed[0]), encoding="utf-8")
    held_out = [
        write_rows(tmp_path, name, completions("c")) for name in ("a", "b_test")
    ]
    found = api.evaluate([path], held_out, settings=QUICK)
    told = [r.getMessage() for r in caplog.records if "no held-out" in r.getMessage()]
    assert len(told) == 1
    assert "/b', so no recovered gain is told of it; name its task with" in told[0]
    assert {r.expert.rsplit("/", 1)[-1] for r in found.recovered} == {"a"}


def test_overlap_may_be_allowed(analysed, tmp_path):
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(analysed[0]), encoding="utf-8")
    held_out = write_rows(tmp_path, "a", completions("a"))
    found = api.evaluate([path], [held_out], settings=QUICK, allow_overlap=True)
    assert found.tasks[0].n_rows == 4


def test_stopped_evaluation_goes_on_from_what_is_kept(
    analysed, school, tmp_path, monkeypatch
):
    held_out = [write_held_out(tmp_path, name) for name in "ab"]
    models = [str(school / "a"), str(school / "b")]
    options: dict[str, Any] = {"settings": QUICK, "keep_in": tmp_path / "kept"}
    done: list[str] = []

    def stop(model: str, task: str, number: int, total: int) -> None:
        done.append(model)
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.evaluate(models, held_out, progress=stop, **options)
    assert len(done) == 3
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert len(kept) == 3
    found = api.evaluate(models, held_out, **options)
    assert kept < {path.name for path in (tmp_path / "kept").iterdir()}
    fresh = api.evaluate(models, held_out, settings=QUICK)
    assert json.loads(found.to_json()) == json.loads(fresh.to_json())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"experts": {"other": "a"}},
            r"experts must be of the tasks .*got \['other'\]",
        ),
        ({"data": ["x/t.jsonl", "y/t.jsonl"]}, "data must have names of their own"),
        ({"data": ["缺.jsonl"]}, "缺.jsonl"),
    ],
)
def test_wrong_calls_are_refused(change, message, school, tmp_path):
    held_out = write_held_out(tmp_path, "a")
    call = {"data": [held_out], **change}
    with pytest.raises(ValueError, match=message):
        api.evaluate([str(school / "a")], **call)


# Imports


@pytest.mark.parametrize("name", ["analyze", "check", "evaluate", "make_plan"])
def test_package_gives_the_functions(name):
    assert getattr(mergekit_himerging, name) is getattr(api, name)
    assert name in mergekit_himerging.__all__


def test_package_has_no_other_names():
    with pytest.raises(AttributeError, match="has no attribute 'analyse'"):
        mergekit_himerging.analyse  # noqa: B018


def test_options_reach_the_analysis(analysed, tmp_path, capsys, monkeypatch):
    recipe, plan = analysed
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))
    assert api.analyze(recipe, MergeOptions(quiet=False)) == plan
    assert "scored (loss)" in capsys.readouterr().out
    assert read_plan(next((tmp_path / "cache").iterdir())) == plan
