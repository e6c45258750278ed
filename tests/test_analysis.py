"""The analysis inside `mergekit-yaml`, from files on disk to the plan and the merge.

The oracle is `Bench`: state dicts, Python's sort and full forwards of one text at a
time; it shares no code with the engine.
"""

import copy
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
import yaml
from click.testing import Result
from conftest import (
    VOCABULARY,
    make_llama,
    make_recipe,
    make_tokenizer,
    run_command,
    save_model,
)
from mergekit.scripts.run_yaml import main as mergekit_yaml
from safetensors.torch import load_file, save_file
from test_streams import ARCHITECTURES, Family
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from mergekit_himerging.analysis.calibration import TokenSequence
from mergekit_himerging.plan import PLAN_FILE, Plan, read_plan

Tensors = dict[str, torch.Tensor]

ROWS = {
    "a": [("abc", "defg"), ("what is 1?", "2"), ("xyz", "uvw."), ("q", "rst, 9")],
    "b": [("0123", "456"), ("name?", "zoe."), ("9 8 7", "6"), ("hello", "world")],
    "c": [("m n", "o p"), ("10", "11"), ("yes", "no, no"), ("t", "u")],
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep plans of earlier runs apart from the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(folder))
    return folder


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    path = folder / f"{name}.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def completions(name: str) -> list[dict[str, Any]]:
    return [{"prompt": p, "completion": c} for p, c in ROWS[name]]


def make_analysis(
    zoo: Path, folder: Path, *experts: str, of_model: Any = None, **parameters: Any
) -> dict[str, Any]:
    """Make a recipe with calibration data for each expert, and a plan file."""
    recipe = make_recipe(
        zoo,
        *experts,
        parameters={
            "plan_out": str(folder / "plan.json"),
            "resolve": "rules",
            **parameters,
        },
    )
    for model, name in zip(recipe["models"], experts, strict=True):
        calibration = write_rows(folder, name, completions(name))
        model["parameters"] = {"calibration": calibration, **(of_model or {})}
    return recipe


def encode(tokenizer: Any, prompt: str, completion: str) -> TokenSequence:
    # As transformers loads it: some architectures split text in their own way.
    tokens = tokenizer(
        prompt + completion, add_special_tokens=False, return_offsets_mapping=True
    )
    n_prompt = sum(end <= len(prompt) for _, end in tokens["offset_mapping"])
    return TokenSequence(ids=tuple(tokens["input_ids"]), n_prompt=n_prompt)


def layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None


@functools.cache
def train_experts() -> tuple[transformers.PreTrainedModel, ...]:
    """Return a base and three experts, each fitted to its own rows of `ROWS`."""
    base = make_llama(seed=0)
    tuned = []
    for rows in ROWS.values():
        expert = copy.deepcopy(base)
        adam = torch.optim.Adam(expert.parameters(), lr=4e-3)
        texts = [encode(make_tokenizer(), *row) for row in rows]
        for _ in range(12):
            loss = -sum(log_probability(expert, text) for text in texts)
            adam.zero_grad()
            loss.backward()
            adam.step()
        tuned.append(expert)
    return base, *tuned


def log_probability(model: Any, text: TokenSequence) -> torch.Tensor:
    """Mean log-probability of the targets, by the model's own forward."""
    logits = model(torch.tensor([text.ids]), use_cache=False).logits[0]
    rows = logits[text.n_prompt - 1 : -1].double().log_softmax(-1)
    return rows[range(text.n_targets), text.ids[text.n_prompt :]].mean()


def save_school(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save `base`, `a`, `b` and `c`, where experts know their rows."""
    for name, model in zip(("base", "a", "b", "c"), train_experts(), strict=True):
        save_model(copy.deepcopy(model), folder / name, dtype=dtype)
    return folder


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_school(tmp_path_factory.mktemp("school"))


Texts = Sequence[Sequence[TokenSequence]]
"""The options of each sample, the right one first."""

Factors = Mapping[tuple[int, str], tuple[float, float, float]]
"""(layer, expert) -> factors on density, scale and weight."""

SHRINK = (0.5, 0.5, 1.0)
DROP = (1.0, 1.0, 0.0)


@dataclass
class Bench:
    """A merge by brute force.

    Attributes:
        base, tuned: state dicts.
        texts: each expert's samples.
        weight, density, scale: the same for every expert.
        per_layer: rank a block as a whole, not each tensor.
        same_weight: hold the merge against the single model at its weight.
        dtype: what every model is rounded to.
        model: runs a state dict.
        known: deltas that were computed.
    """

    base: Tensors
    tuned: Mapping[str, Tensors]
    texts: Mapping[str, Texts]
    weight: float = 0.5
    density: float = 1.0
    scale: float = 1.0
    per_layer: bool = False
    same_weight: bool = False
    dtype: torch.dtype = torch.float32
    model: Any = field(default_factory=lambda: make_llama(seed=0).eval())
    known: dict[Any, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, *experts: str, **options: Any) -> "Bench":
        def load(name: str) -> Tensors:
            tensors = load_file(folder / name / "model.safetensors")
            return {name: tensor.float() for name, tensor in tensors.items()}

        texts = {
            name: [[encode(make_tokenizer(), *row)] for row in ROWS[name]]
            for name in experts
        }
        options = {"weight": 1 / len(experts), "texts": texts, **options}
        return cls(load("base"), {name: load(name) for name in experts}, **options)

    @property
    def n_layers(self) -> int:
        return 1 + max(layer_of(name) or 0 for name in self.base)

    def delta(self, expert: str, name: str, factor: tuple[float, ...]) -> torch.Tensor:
        """One tensor of an expert's delta, pruned and scaled, without its weight."""
        key = (expert, name, *factor[:2])
        if key not in self.known:
            raw = {n: t - self.base[n] for n, t in self.tuned[expert].items()}
            mates, layer = [name], layer_of(name)
            if self.per_layer and layer is not None:
                mates = [n for n in raw if layer_of(n) == layer]
            density, scale = factor[0] * self.density, factor[1] * self.scale
            cut = -1.0
            if density < 1:
                sizes = [abs(v) for n in mates for v in raw[n].flatten().tolist()]
                n_dropped = len(sizes) - int(density * len(sizes))
                cut = sorted(sizes)[n_dropped - 1]
            self.known[key] = scale * raw[name].double() * (raw[name].abs() > cut)
        return self.known[key]

    def merge(
        self,
        weights: Mapping[str, float],
        factors: Factors,
        layers: Collection[int | None] | None = None,
    ) -> Tensors:
        """Base plus weighted deltas, whole (None) or of some layers only."""
        state = {name: tensor.double() for name, tensor in self.base.items()}
        for expert, weight in weights.items():
            for name in state:
                layer = layer_of(name)
                if layers is None or layer in layers:
                    factor = factors.get((layer, expert), (1.0, 1.0, 1.0))
                    state[name] += weight * factor[2] * self.delta(expert, name, factor)
        return {name: tensor.to(self.dtype) for name, tensor in state.items()}

    def merged(self, factors: Factors | None = None) -> Tensors:
        return self.merge(dict.fromkeys(self.tuned, self.weight), factors or {})

    def score(self, state: Tensors, expert: str) -> np.ndarray:
        """Score each sample: mean log-probability, or 1 where the right option wins."""
        self.model.load_state_dict({n: t.float() for n, t in state.items()})
        scores = []
        with torch.no_grad():
            for options in self.texts[expert]:
                each = [float(log_probability(self.model, text)) for text in options]
                wins = all(each[0] > other for other in each[1:])
                scores.append(each[0] if len(options) == 1 else float(wins))
        return np.array(scores)

    def measure(self, expert: str, factors: Factors | None = None) -> dict[str, Any]:
        """Measure one task: whole models, and every layer's impacts, by sample."""
        factors = factors or {}
        single = {expert: self.weight if self.same_weight else 1.0}
        both = dict.fromkeys(self.tuned, self.weight)
        every = [None, *range(self.n_layers)]
        base = self.score(self.merge({}, {}), expert)
        found: dict[str, Any] = {"base": base}
        for kind, weights, under in (("single", single, {}), ("merged", both, factors)):
            whole = self.score(self.merge(weights, under), expert)
            found[kind] = whole
            removal, addition = [], []
            for layer in range(self.n_layers):
                others = [other for other in every if other != layer]
                without = self.merge(weights, under, others)
                removal.append(whole - self.score(without, expert))
                alone = self.merge(weights, under, [layer])
                addition.append(self.score(alone, expert) - base)
            found[f"removal_{kind}"] = np.array(removal)
            found[f"addition_{kind}"] = np.array(addition)
            found[f"contribution_{kind}"] = np.array(removal) + np.array(addition)
        found["conflict"] = found["contribution_single"] - found["contribution_merged"]
        return found

    def resolve(
        self,
        measured: Mapping[str, Mapping[str, Any]],
        *,
        raw: bool = False,
        interfering: bool = False,
    ) -> dict[tuple[int, str], str]:
        """The paper's rules, in as few words as they take."""
        actions = {}
        for layer in range(self.n_layers):
            units = {
                e: 1.0 if raw else (m["single"] - m["base"]).mean()
                for e, m in measured.items()
            }
            weak = [e for e, m in measured.items() if m["conflict"][layer].mean() > 0]
            strength = {
                e: m["contribution_single"][layer].mean() / units[e]
                for e, m in measured.items()
            }
            best = max(sorted(strength), key=strength.__getitem__)
            for expert in measured:
                action = "keep"
                if len(weak) == len(measured):
                    action = "keep" if expert == best else "drop"
                elif weak and (expert in weak) != interfering:
                    action = "shrink"
                actions[layer, expert] = action
        return actions


def factors_of(
    actions: Mapping[tuple[int, str], str], shrink: tuple[float, float, float] = SHRINK
) -> dict[tuple[int, str], tuple[float, float, float]]:
    known = {"shrink": shrink, "drop": DROP}
    return {pair: known[a] for pair, a in actions.items() if a != "keep"}


def actions_of(plan: Plan) -> dict[tuple[int, str], str]:
    return {(t.layer, Path(t.model).name): t.action for t in plan.treatments}


def assert_measured(plan: Plan, bench: Bench, near: float = 1e-5) -> dict[str, Any]:
    """Assert that all scores of a plan are those of brute force; return the latter."""
    measured = {}
    for report in plan.tasks:
        expert = Path(report.model).name
        found = measured[expert] = bench.measure(expert)
        for name in ("base", "single", "merged"):
            score = getattr(report, f"score_{name}")
            assert score == pytest.approx(found[name].mean(), abs=near), name
        names = ("removal_{}", "addition_{}", "contribution_{}")
        fields = [n.format(k) for n in names for k in ("single", "merged")]
        for layer, name in itertools.product(
            range(bench.n_layers), (*fields, "conflict")
        ):
            expected = pytest.approx(found[name][layer].mean(), abs=4 * near)
            assert getattr(report.layers[layer], name) == expected, (layer, name)
            error = found["conflict"][layer].std(ddof=1) / len(found["base"]) ** 0.5
            assert report.layers[layer].conflict_se == pytest.approx(error, abs=1e-4)
    assert plan.n_layers == bench.n_layers
    assert sorted(measured) == sorted(bench.tuned)
    return measured


def assert_close(merged: Tensors, expected: Tensors, atol: float = 1e-6) -> None:
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(
            tensor.float(),
            expected[name].float(),
            rtol=0,
            atol=atol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def assert_same(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert different == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plan_equals_brute_force_on_files(architecture, merge, tmp_path):
    family = Family(architecture, 2)
    names = {"expert0": "a", "expert1": "b"}
    states = {"base": family.base}
    states |= {names[m]: family.plus(d) for m, d in family.deltas.items()}
    for name, state in states.items():
        family.model.load_state_dict(state)
        save_model(family.model, tmp_path / name)
    merged = merge(
        make_analysis(tmp_path, tmp_path, "a", "b", accept_share=0.0, compare="raw")
    )
    plan = read_plan(tmp_path / "plan.json")
    assert plan.n_layers == family.n_layers
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")

    for report in plan.tasks:
        name = Path(report.model).name
        delta = family.deltas[{v: k for k, v in names.items()}[name]]
        texts = [[encode(tokenizer, *row)] for row in ROWS[name]]

        def score(state: dict[str, torch.Tensor], texts: Any = texts) -> float:
            each = [family.score(state, text).mean() for text in texts]
            return float(torch.stack(each).mean())

        def near(value: float) -> Any:
            return pytest.approx(value, abs=1e-5)

        base, whole = score(family.base), family.merge_delta
        single, both = score(family.plus(delta)), score(family.plus(whole))
        assert report.score_base == near(base)
        assert report.score_single == near(single)
        assert report.score_merged == near(both)
        for layer, found in enumerate(report.layers):
            removal = single - score(family.minus_layer(delta, layer))
            addition = score(family.plus(delta, {layer})) - base
            removal_merged = both - score(family.minus_layer(whole, layer))
            addition_merged = score(family.plus(whole, {layer})) - base
            assert found.removal_single == near(removal)
            assert found.addition_single == near(addition)
            assert found.removal_merged == near(removal_merged)
            assert found.addition_merged == near(addition_merged)
            conflict = removal + addition - removal_merged - addition_merged
            assert found.conflict == pytest.approx(conflict, abs=4e-5)
    assert merged


# Options


def assert_plan_is_brute_force(
    merged: Tensors, plan: Plan, bench: Bench, near: float = 1e-5, **rules: bool
) -> dict[tuple[int, str], str]:
    """Assert that measures, treatments, scores after them and the merge are right."""
    measured = assert_measured(plan, bench, near)
    actions = bench.resolve(measured, **rules)
    assert actions_of(plan) == actions
    expected = bench.merged(factors_of(actions))
    assert_close(merged, expected, atol=1e-6 if near == 1e-5 else 1e-2)
    for report in plan.tasks:
        after = bench.score(expected, Path(report.model).name).mean()
        assert report.score_treated == pytest.approx(after, abs=near)
    return actions


OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, bool]]] = {
    "merged with single models at their weight": (
        "ab",
        {"reference": "same_weight"},
        {"same_weight": True},
        {},
    ),
    "three experts": ("abc", {"weight": 1.0}, {"weight": 1.0}, {}),
    "pruned and scaled": (
        "abc",
        {"density": 0.4, "scale": 0.7, "reference": "same_weight"},
        {"density": 0.4, "scale": 0.7, "same_weight": True},
        {},
    ),
    "ranked by layer": (
        "abc",
        {"density": 0.3, "scope": "layer", "compare": "raw", "mixed": "interfering"},
        {"density": 0.3, "per_layer": True},
        {"raw": True, "interfering": True},
    ),
}


@pytest.mark.parametrize(
    ("experts", "parameters", "of_bench", "rules"), OPTIONS.values(), ids=OPTIONS.keys()
)
def test_options_equal_brute_force(
    school, merge, tmp_path, experts, parameters, of_bench, rules
):
    recipe = make_analysis(school, tmp_path, *experts, accept_share=0.0, **parameters)
    merged = merge(recipe)
    plan = read_plan(tmp_path / "plan.json")
    bench = Bench.of(school, *experts, **of_bench)
    actions = assert_plan_is_brute_force(merged, plan, bench, **rules)
    assert set(actions.values()) != {"keep"}


def test_accuracy_is_the_share_of_right_options_first(school, merge, tmp_path):
    recipe = make_analysis(
        school,
        tmp_path,
        *"ab",
        of_model={"metric": "accuracy"},
        accept_share=0.0,
        compare="raw",
    )
    texts = {}
    for name in "ab":
        rows, texts[name] = [], []
        for number, (prompt, right) in enumerate(ROWS[name]):
            others = [c for _, c in ROWS["c"] + ROWS["ab".replace(name, "")]][number:][
                :3
            ]
            options = [*others[: number % 3], right, *others[number % 3 :]]
            rows.append({"prompt": prompt, "choices": options, "answer": right})
            texts[name].append(
                [encode(make_tokenizer(), prompt, f" {o}") for o in (right, *others)]
            )
        write_rows(tmp_path, name, rows)
    merged = merge(recipe)
    plan = read_plan(tmp_path / "plan.json")
    bench = Bench.of(school, "a", "b", texts=texts)
    assert_plan_is_brute_force(merged, plan, bench, raw=True)
    assert {report.metric for report in plan.tasks} == {"accuracy"}
    assert any(report.score_base != report.score_single for report in plan.tasks)


def test_bfloat16_files_are_measured_as_they_are_merged(merge, tmp_path):
    folder = save_school(tmp_path / "short", torch.bfloat16)
    recipe = make_analysis(folder, tmp_path, "a", "b", accept_share=0.0)
    merged = merge({**recipe, "dtype": "bfloat16"})
    assert {t.dtype for t in merged.values()} == {torch.bfloat16}
    bench = Bench.of(folder, "a", "b", dtype=torch.bfloat16)
    plan = read_plan(tmp_path / "plan.json")
    assert_plan_is_brute_force(merged, plan, bench, near=1e-4)


def test_adapters_are_measured_as_merged_models(school, merge, tmp_path):
    states = {}
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        model = copy.deepcopy(train_experts()[0])
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        adapted = peft.get_peft_model(model, config)
        adapted.save_pretrained(tmp_path / "adapters" / name)
        states[name] = dict(adapted.merge_and_unload().state_dict())
    recipe = make_analysis(
        school, tmp_path, "a", "b", accept_share=0.0, compare="raw", density=0.5
    )
    for model, name in zip(recipe["models"], "ab", strict=True):
        model["model"] = f"{school}/base+{tmp_path}/adapters/{name}"
    merged = merge(
        recipe,
        *("--lora-merge-cache", str(tmp_path / "merged-adapters")),
        *("--lora-merge-dtype", "float32"),
    )
    bench = Bench.of(school, "a", "b", density=0.5)
    bench.tuned = states
    plan = read_plan(tmp_path / "plan.json")
    assert plan.models == tuple(m["model"] for m in recipe["models"])
    assert_plan_is_brute_force(merged, plan, bench, raw=True)


def test_layers_of_slices_are_measured_as_output_layers(school, merge, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b", accept_share=0.0, compare="raw")
    sources = [{"model": str(school / "base")}, *recipe.pop("models")]
    recipe["slices"] = [
        {"sources": [{**source, "layer_range": layers} for source in sources]}
        for layers in ([0, 2], [1, 3])
    ]
    merged = merge(recipe)

    def stack(state: Tensors) -> Tensors:
        stacked = {n: t for n, t in state.items() if layer_of(n) is None}
        for new, old in enumerate((0, 1, 1, 2)):
            of_layer = {n: t for n, t in state.items() if layer_of(n) == old}
            for name, tensor in of_layer.items():
                stacked[name.replace(f".{old}.", f".{new}.", 1)] = tensor
        return stacked

    bench = Bench.of(school, "a", "b", model=make_llama(seed=0, n_layers=4).eval())
    bench.base = stack(bench.base)
    bench.tuned = {name: stack(state) for name, state in bench.tuned.items()}
    plan = read_plan(tmp_path / "plan.json")
    assert plan.n_layers == 4
    assert_plan_is_brute_force(merged, plan, bench, raw=True)


def test_little_memory_gives_the_same_plan(school, run_recipe, merge, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b")
    merged = merge(recipe)
    plan = read_plan(tmp_path / "plan.json")
    little = make_analysis(school, tmp_path, "a", "b", analysis_memory="64KB")
    assert_same(merge(little, out=tmp_path / "again"), merged)
    again = read_plan(tmp_path / "plan.json")
    assert actions_of(again) == actions_of(plan)
    for task, other in zip(plan.tasks, again.tasks, strict=True):
        for layer, same in zip(task.layers, other.layers, strict=True):
            assert same.model_dump() == pytest.approx(layer.model_dump(), abs=1e-5)
        assert other.score_treated == pytest.approx(task.score_treated, abs=1e-5)


def test_samples_that_choose_and_accept_are_all_the_rows(school, merge, tmp_path):
    merge(make_analysis(school, tmp_path, "a", "b", accept_share=0.25))
    plan = read_plan(tmp_path / "plan.json")
    bench = Bench.of(school, "a", "b")
    for report in plan.tasks:
        expert = Path(report.model).name
        held = report.accepted_on
        assert (report.n_samples, held.n_samples) == (3, 1)
        states = {
            "base": bench.merge({}, {}),
            "single": bench.merge({expert: 1.0}, {}),
            "merged": bench.merged(),
        }
        for name, state in states.items():
            parts = [getattr(part, f"score_{name}") for part in (report, held)]
            scores = bench.score(state, expert)
            assert np.dot(parts, (0.75, 0.25)) == pytest.approx(scores.mean(), abs=1e-5)
            # What accepts is one whole row, not a mixture.
            assert np.abs(scores - parts[1]).min() < 1e-5
        gain = held.score_single - held.score_base
        assert held.recovered_merged == pytest.approx(
            (held.score_merged - held.score_base) / gain
        )


def test_paper_preset_is_the_paper(school, merge, tmp_path):
    merge(make_analysis(school, tmp_path, "a", "b", preset="paper"))
    settings = read_plan(tmp_path / "plan.json").settings
    expected = {
        **{"mixed": "degraded", "layer_density": 0.5, "layer_scale": 0.5},
        **{"max_layers": None, "confidence": 0.0, "rounds": 1, "scope": "tensor"},
        **{"reference": "full", "compare": "raw", "guard": "report"},
    }
    assert {name: settings[name] for name in expected} == expected


# The plan as a file


def run_loud(folder: Path, recipe: Mapping[str, Any], *options: str) -> Result:
    """Run `mergekit-yaml` with what it says, into `folder / "merged"`."""
    path = folder / "recipe.yml"
    path.write_text(yaml.safe_dump(dict(recipe)), encoding="utf-8")
    result = run_command(mergekit_yaml, str(path), str(folder / "merged"), *options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def read_merged(folder: Path) -> Tensors:
    return load_file(folder / "merged" / "model.safetensors")


@pytest.fixture(scope="module")
def analysed(school, tmp_path_factory) -> Path:
    """A folder of a recipe, its plan and the merge that it led to, all treated."""
    folder = tmp_path_factory.mktemp("analysed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEKIT_HIMERGING_CACHE", str(folder / "cache"))
        recipe = make_analysis(school, folder, "a", "b", guard="report", density=0.5)
        result = run_loud(folder, recipe, "--quiet")
    assert result.exit_code == 0, result.output
    return folder


def test_plan_lies_in_the_merged_folder_and_at_plan_out(analysed):
    in_folder = (analysed / "merged" / PLAN_FILE).read_bytes()
    assert in_folder == (analysed / "plan.json").read_bytes()
    plan = read_plan(analysed / "plan.json")
    assert "drop" in actions_of(plan).values()


@pytest.mark.parametrize("calibration", [False, True], ids=["alone", "with data"])
def test_written_plan_gives_the_bits_of_the_analysed_merge(
    school, analysed, tmp_path, calibration
):
    plan = analysed / "merged" / PLAN_FILE
    recipe = make_recipe(
        school, "a", "b", parameters={"plan": str(plan), "density": 0.5}
    )
    if calibration:
        recipe = make_analysis(
            school, tmp_path, "a", "b", plan=str(plan), density=0.5, guard="report"
        )
    result = run_loud(tmp_path, recipe)
    assert result.exit_code == 0, result.output
    assert_same(read_merged(tmp_path), read_merged(analysed))
    ignored = "'plan' is given, so calibration data is not used" in result.output
    assert ignored == calibration
    assert not (tmp_path / "cache").exists()
    # The folder holds the plan that it was merged with, wherever that came from.
    assert read_plan(tmp_path / "merged" / PLAN_FILE) == read_plan(plan)


def test_edited_plan_is_followed(school, analysed, merge, tmp_path):
    written = json.loads((analysed / "plan.json").read_text(encoding="utf-8"))
    edited = next(row for row in written["treatments"] if row["action"] == "keep")
    edited["action"], edited["weight_factor"] = "drop", 0.0
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(written), encoding="utf-8")
    actions = {
        (row["layer"], Path(row["model"]).name): row["action"]
        for row in written["treatments"]
    }
    parameters = {"plan": str(path), "density": 0.5}
    merged = merge(make_recipe(school, "a", "b", parameters=parameters))
    bench = Bench.of(school, "a", "b", density=0.5)
    assert_close(merged, bench.merged(factors_of(actions)))


def test_plan_is_kept_before_the_merge_begins(
    school, run_recipe, tmp_path, cache, monkeypatch
):
    class PowerCutError(Exception):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise PowerCutError

    monkeypatch.setattr("mergekit_himerging.method.merge_tensor", fail)
    result = run_recipe(make_analysis(school, tmp_path, "a", "b"))
    assert isinstance(result.exception, PowerCutError)
    assert not (tmp_path / "merged").exists()
    (kept,) = cache.iterdir()
    assert read_plan(kept) == read_plan(tmp_path / "plan.json")


def test_quiet_says_nothing_and_loud_says_all(school, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b")
    quiet = run_loud(tmp_path, recipe, "--quiet")
    assert quiet.output.strip() == ""
    (tmp_path / "plan.json").unlink()
    recipe["parameters"]["seed"] = 1  # so that nothing is reused
    loud = run_loud(tmp_path, recipe)
    for words in (
        f"'{school}/a' on '{tmp_path}/a.jsonl': 2 samples choose, 2 accept",
        "score: negative loss in nats per target token, higher is better",
        "guard               the treated merge is",
        f"hi_merging: plan kept in {tmp_path}/cache/",
        f"hi_merging: plan written to {tmp_path}/merged/{PLAN_FILE}",
        f"hi_merging: plan written to {tmp_path}/plan.json",
        "analysing",
    ):
        assert words in loud.output


# Determinism

RUN_RECIPES = """
import sys
from mergekit.scripts.run_yaml import main
for recipe, out in zip(sys.argv[1::2], sys.argv[2::2]):
    main([recipe, out, "--quiet"], standalone_mode=False)
"""


def save_with_tokens(name: str, model: Any, folder: Path, extra: str) -> None:
    """Save a model with more tokens than the base, under ids that others use too."""
    larger = make_llama(seed=9, vocab_size=len(VOCABULARY) + len(extra))
    state = larger.state_dict()
    for key, tensor in model.state_dict().items():
        state[key][: len(tensor)] = tensor
    larger.load_state_dict(state)
    save_model(larger, folder / name)
    words = {word: i for i, word in enumerate((*VOCABULARY, *extra))}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"},
    ).save_pretrained(folder / name)


def test_same_bytes_whatever_the_hash_seed_and_the_order_of_models(tmp_path):
    """Two processes, and in each a plain merge and one of differing vocabularies.

    Each model has several tokens of its own: their order comes from a tokenizer's
    `get_vocab`, which differs from process to process.
    """
    base, *experts = train_experts()
    folder = tmp_path / "models"
    save_model(copy.deepcopy(base), folder / "base")
    for name, expert, extra in zip("abc", experts, ("!$%", "-_~", "&#@"), strict=True):
        save_model(copy.deepcopy(expert), folder / name)
        save_with_tokens(f"{name}-more", expert, folder, extra)
    processes, outs = [], []
    for run, order in enumerate(("abc", "cab")):
        here = tmp_path / f"run{run}"
        here.mkdir()
        arguments = []
        for kind in ("plain", "union"):
            names = [f"{n}-more" if kind == "union" else n for n in order]
            recipe = make_analysis(
                folder,
                tmp_path,
                *order,
                guard="report",
                compare="raw",
                density=0.5,
                plan_out=str(here / f"{kind}.json"),
            )
            for model, name in zip(recipe["models"], names, strict=True):
                model["model"] = str(folder / name)
            if kind == "union":
                recipe["tokenizer"] = {"source": "union"}
            path = here / f"{kind}.yml"
            path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
            arguments += [str(path), str(here / kind)]
        changes = {
            "PYTHONHASHSEED": str(run + 1),
            "MERGEKIT_HIMERGING_CACHE": str(here / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", RUN_RECIPES, *arguments],
                env={**os.environ, **changes},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        outs.append(here)
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    for kind in ("plain", "union"):
        for file in (
            f"{kind}.json",
            f"{kind}/model.safetensors",
            f"{kind}/{PLAN_FILE}",
        ):
            one, other = ((here / file).read_bytes() for here in outs)
            assert one == other, file
        actions = actions_of(read_plan(outs[0] / f"{kind}.json"))
        assert set(actions.values()) != {"keep"}
    one, other = ((here / "union" / "tokenizer.json").read_bytes() for here in outs)
    assert one == other
    width = len(load_file(outs[0] / "union" / "model.safetensors")["lm_head.weight"])
    assert width == len(VOCABULARY) + 9


# What can be wrong

Change = Callable[[dict[str, Any], Path], object]


def of_model(recipe: dict[str, Any], number: int = 0) -> dict[str, Any]:
    parameters: dict[str, Any] = recipe["models"][number]["parameters"]
    return parameters


def with_rows(*rows: dict[str, Any], **parameters: Any) -> Change:
    """Replace the first model's data."""

    def change(recipe: dict[str, Any], folder: Path) -> None:
        write_rows(folder, "a", list(rows))
        of_model(recipe).update(parameters)

    return change


def at_top(**parameters: Any) -> Change:
    return lambda recipe, _: recipe["parameters"].update(parameters)


def under_model(**parameters: Any) -> Change:
    return lambda recipe, _: of_model(recipe).update(parameters)


def without_data(*numbers: int, **parameters: Any) -> Change:
    def change(recipe: dict[str, Any], _: Path) -> None:
        for number in numbers:
            del of_model(recipe, number)["calibration"]
        recipe["parameters"] = parameters

    return change


def under_base(recipe: dict[str, Any], folder: Path) -> None:
    base = {
        "model": recipe["base_model"],
        "parameters": {"calibration": str(folder / "a.jsonl")},
    }
    recipe["models"].insert(0, base)


def two_in_slices(recipe: dict[str, Any], folder: Path) -> None:
    """Name other data for a model in each of two slices."""
    sources = [{"model": recipe["base_model"]}, *recipe.pop("models")]
    recipe["slices"] = [
        {"sources": [{**source, "layer_range": layers} for source in sources]}
        for layers in ([0, 2], [2, 3])
    ]
    recipe["slices"][1]["sources"][1]["parameters"] = {"calibration": "other.jsonl"}


RIGHT = {"prompt": "abc", "completion": "def"}

BAD = {
    "missing file": (
        lambda recipe, _: of_model(recipe).update(calibration="zh.jsonl"),
        "zh.jsonl must be a file, got none (looked for '{here}/zh.jsonl', "
        "'{elsewhere}/zh.jsonl')",
    ),
    "empty file": (
        with_rows(),
        "{here}/a.jsonl must have at least one row, got none",
    ),
    "row of no shape": (
        with_rows(RIGHT, RIGHT, {"question": "x", "answer": "y"}),
        "{here}/a.jsonl line 3 must have 'prompt' and 'completion', or 'prompt', "
        "'choices' and 'answer', or 'messages', or 'instruction' and 'output', or "
        "'text', got keys ['answer', 'question']",
    ),
    "choices without the answer": (
        with_rows({"prompt": "x", "choices": ["y", "z"]}),
        "{here}/a.jsonl line 1 must have 'prompt' and 'completion', or 'prompt', "
        "'choices' and 'answer'",
    ),
    "answer that is no choice": (
        with_rows({"prompt": "x", "choices": ["y", "z"], "answer": "C"}),
        "{here}/a.jsonl line 1 must have the letter, the 0-based index or the text of "
        "one of 2 choices as 'answer', got 'C'",
    ),
    "accuracy without choices": (
        with_rows(RIGHT, metric="accuracy"),
        "{here}/a.jsonl line 1 must have 'choices' for metric 'accuracy', got a row of "
        "shape 'completion'; use metric 'loss'",
    ),
    "messages without a template": (
        with_rows(
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "y"},
                ]
            }
        ),
        "{here}/a.jsonl line 1 has 'messages' and must have a chat template, got a "
        "tokenizer without one; set 'chat_template' in the recipe",
    ),
    "data for some models": (
        without_data(1),
        "every model must have 'calibration' or none, got none for ['{zoo}/b']; name "
        "a file under the 'parameters' of each model",
    ),
    "data of the base": (
        under_base,
        "'calibration' has no effect on the base model (models[0] '{zoo}/base'); "
        "remove it there",
    ),
    "list of files": (
        lambda recipe, _: of_model(recipe).update(calibration=["a.jsonl", "b.jsonl"]),
        "'calibration' must be one value, got a list or filter (models[0] '{zoo}/a'); "
        "write a single value",
    ),
    "one file for all": (
        at_top(calibration="a.jsonl"),
        "'calibration' must be one file per model, got one for all (parameters); "
        "move it under the 'parameters' of each model",
    ),
    "two files of a model": (
        two_in_slices,
        "'calibration' of '{zoo}/a' must be one file, got ['{here}/a.jsonl', "
        "'other.jsonl']",
    ),
    "options without data": (
        without_data(0, 1, rounds=2, mixed="degraded"),
        "['mixed', 'rounds'] must come with calibration data, got none; name a file "
        "as 'calibration' under the 'parameters' of each model, or remove them",
    ),
    "no memory": (
        at_top(analysis_memory=0),
        "analysis_memory must be an amount above zero, got '0' (parameters); write it "
        "as 4GB or 512MB",
    ),
    "memory in words": (
        at_top(analysis_memory="lots"),
        "analysis_memory must be an amount above zero, got 'lots' (parameters)",
    ),
    "no rounds": (at_top(rounds=0), "rounds must be at least 1, got 0 (parameters)"),
    "no samples": (
        under_model(samples=0),
        "samples must be at least 1, got 0 (models[0] '{zoo}/a')",
    ),
    "all samples accept": (
        at_top(accept_share=1),
        "accept_share must be in [0, 0.9], got 1 (parameters); the rest chooses",
    ),
    "preset and another value": (
        at_top(preset="paper", guard="keep_better"),
        "'preset: paper' must keep guard at report, got keep_better; remove one",
    ),
    "unknown metric": (
        under_model(metric="bleu"),
        "metric must be one of loss, accuracy, agreement, got 'bleu' "
        "(models[0] '{zoo}/a')",
    ),
    "confidence with one sample": (
        lambda recipe, _: [
            of_model(recipe).update(samples=1),
            recipe["parameters"].update(confidence=1),
        ],
        "'{zoo}/a' must have two choosing samples or more for a standard error, "
        "got 1; raise samples, or set confidence: 0",
    ),
    "measured with one sample": (
        lambda recipe, _: [
            of_model(recipe).update(samples=1),
            recipe["parameters"].update(resolve="measured", accept_share=0),
        ],
        "'{zoo}/a' must have two samples or more for a standard error, got 1; add rows "
        "to its calibration data, or raise samples",
    ),
    "data that the expert is bad at": (
        with_rows(*completions("c")),
        "model '{zoo}/a' must beat the base on its own calibration data to compare "
        "gains, got gain -",
    ),
}


@pytest.mark.parametrize(("change", "problem"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_and_nothing_is_written(
    school, run_recipe, tmp_path, monkeypatch, change, problem
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    recipe = make_analysis(school, tmp_path, "a", "b")
    change(recipe, tmp_path)
    result = run_recipe(recipe)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    places = {"here": tmp_path, "zoo": school, "elsewhere": elsewhere}
    message = result.output.strip()
    assert message.startswith(f"Error: {problem.format(**places)}"), message
    assert "\n" not in message
    for name in ("merged", "plan.json", "cache"):
        assert not (tmp_path / name).exists(), name


def refuse(
    recipe: Mapping[str, Any], run_recipe: Callable[..., Result], folder: Path
) -> str:
    """Run a recipe that must end with one sentence and without a trace."""
    result = run_recipe(recipe)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    message = result.output.strip()
    assert message.count("Error: ") == 1, message
    assert "\n" not in message[message.index("Error: ") :]
    for name in ("merged", "plan.json", "cache"):
        assert not (folder / name).exists(), name
    return message


def test_too_little_memory_says_how_much_is_needed(school, run_recipe, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b", analysis_memory="1KB")
    message = refuse(recipe, run_recipe, tmp_path)
    assert "analysis_memory must be at least " in message
    assert f"of '{school}/a' through 3 layers, got " in message


def test_nan_in_a_model_names_model_and_tensor(school, run_recipe, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b")
    tensors = load_file(school / "b" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    broken = save_model(copy.deepcopy(train_experts()[2]), tmp_path / "broken")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    recipe["models"][1]["model"] = str(broken)
    assert refuse(recipe, run_recipe, tmp_path) == (
        f"Error: delta of '{broken}' must be finite, got NaN or infinity (tensor "
        "'model.layers.1.mlp.up_proj.weight'); get the checkpoint again, or leave the "
        "model out"
    )


SMALL = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 48}
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 4}
DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(
            lambda: transformers.DistilBertForMaskedLM(
                transformers.DistilBertConfig(vocab_size=len(VOCABULARY), **DISTIL)
            ),
            "only causal language models can be analysed, got distilbert; "
            "remove 'calibration' for the model-wise merge",
            id="masked",
        ),
        pytest.param(
            lambda: transformers.RobertaForMaskedLM(
                transformers.RobertaConfig(**SMALL, **LAYERS)
            ),
            "only causal language models can be analysed, got RobertaForMaskedLM; "
            "remove 'calibration' for the model-wise merge",
            id="masked, of a type that may be causal",
        ),
        pytest.param(
            lambda: transformers.LlamaForSequenceClassification(
                make_llama(seed=0).config
            ),
            "only causal language models can be analysed, got "
            "LlamaForSequenceClassification; "
            "remove 'calibration' for the model-wise merge",
            id="classifier",
        ),
    ],
)
def test_model_that_is_no_causal_language_model_is_refused(
    run_recipe, tmp_path, make, words
):
    for seed, name in enumerate(("base", "a", "b")):
        torch.manual_seed(seed)
        save_model(make(), tmp_path / name)
    plain = run_recipe(make_recipe(tmp_path, "a", "b"), out=tmp_path / "plain")
    assert plain.exit_code == 0, plain.output
    recipe = make_analysis(tmp_path, tmp_path, "a", "b", compare="raw")
    assert words in refuse(recipe, run_recipe, tmp_path)
