"""Whole merges through MergeKit's own command: identities and other methods.

The oracle for what MergeKit does with filters, slices, adapters, shards and tokenizers
is MergeKit's `task_arithmetic` in the same recipe.
"""

import itertools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from conftest import (
    VOCABULARY,
    make_llama,
    make_recipe,
    make_tokenizer,
    save_model,
    tune,
)
from mergekit.merge_methods import merge_state_dicts
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]


def same_bits(left: Tensors, right: Tensors) -> bool:
    as_integers = {2: torch.int16, 4: torch.int32}

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        view = as_integers[a.element_size()]
        return a.dtype == b.dtype and torch.equal(a.view(view), b.view(view))

    return left.keys() == right.keys() and all(
        same(t, right[n]) for n, t in left.items()
    )


def load(zoo: Path, name: str) -> Tensors:
    return load_file(zoo / name / "model.safetensors")


def with_method(
    recipe: dict[str, Any], method: str, **parameters: Any
) -> dict[str, Any]:
    return {**recipe, "merge_method": method, "parameters": parameters}


def test_merged_folder_loads_and_generates(zoo, merge, tmp_path):
    merge(make_recipe(zoo, "a", "b", parameters={"density": 0.5}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, min_new_tokens=3)
    assert tokens.shape == (1, 5)


# Identities


def test_weights_of_zero_give_the_base_bit_for_bit(merge, tmp_path):
    base = make_llama(seed=0)
    with torch.no_grad():
        base.model.embed_tokens.weight[:, ::2] = -0.0
        base.model.embed_tokens.weight[:, 1::4] = 0.0
    save_model(tune(base, seed=1), tmp_path / "a")
    save_model(base, tmp_path / "base")
    merged = merge(make_recipe(tmp_path, "a", parameters={"weight": 0.0}))
    assert same_bits(merged, load(tmp_path, "base"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_whole_model_is_that_model_bit_for_bit(merge, tmp_path, dtype):
    base = make_llama(seed=0)
    tuned = tune(base, seed=1, by=1e-3)
    save_model(base, tmp_path / "base", dtype=getattr(torch, dtype))
    save_model(tuned, tmp_path / "a", dtype=getattr(torch, dtype))
    recipe = make_recipe(tmp_path, "a", dtype=dtype, parameters={"weight": 1.0})
    assert same_bits(merge(recipe), load(tmp_path, "a"))


@pytest.mark.parametrize("consensus", ["none", "sum", "count"])
def test_order_of_models_does_not_change_a_bit(zoo, merge, tmp_path, consensus):
    weights = {"a": 0.3, "b": 0.5, "c": 0.7, "base": None}
    merges = []
    for order in (("a", "b", "c"), ("c", "base", "a", "b"), ("b", "c", "a", "base")):
        recipe = make_recipe(
            zoo, parameters={"density": 0.4, "consensus": consensus, "normalize": True}
        )
        recipe["models"] = [
            {"model": str(zoo / name)}
            | ({"parameters": {"weight": weights[name]}} if weights[name] else {})
            for name in order
        ]
        merges.append(merge(recipe, out=tmp_path / "-".join(order)))
    assert all(same_bits(one, other) for one, other in itertools.pairwise(merges))


def test_order_of_models_does_not_change_a_union_of_tokenizers(zoo, merge, tmp_path):
    for word in ("x1", "y2"):
        tokenizer = make_tokenizer()
        tokenizer.add_tokens([f"<{word}>"])
        model = tune(make_llama(seed=0), seed=len(word))
        model.resize_token_embeddings(len(tokenizer))
        save_model(model, tmp_path / word)
        tokenizer.save_pretrained(tmp_path / word)
    merges = []
    for order in (("x1", "y2"), ("y2", "x1")):
        recipe = make_recipe(zoo, tokenizer={"source": "union"}, models=[])
        recipe["models"] = [{"model": str(tmp_path / name)} for name in order]
        merges.append(merge(recipe, out=tmp_path / "-".join(order)))
    assert merges[0]["model.embed_tokens.weight"].shape[0] == len(VOCABULARY) + 2
    assert same_bits(*merges)


# Other methods


@pytest.mark.parametrize("experts", [("a",), ("a", "b"), ("a", "b", "c")])
@pytest.mark.parametrize("shared", [{}, {"normalize": True}, {"lambda": 0.5}])
def test_equals_task_arithmetic_at_density_1(zoo, merge, experts, shared):
    shared = {"weight": 0.3, **shared}
    recipe = make_recipe(zoo, *experts, parameters=shared)
    ours, theirs = (
        merge(recipe),
        merge(with_method(recipe, "task_arithmetic", **shared)),
    )
    if experts == ("a",) and "normalize" in shared:  # then it is the model: we copy it
        assert same_bits(ours, load(zoo, "a"))
        assert all(torch.allclose(t, theirs[n], atol=1e-7) for n, t in ours.items())
    else:
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("density", [0.02, 0.2, 0.77])
def test_equals_breadcrumbs_without_outliers(zoo, merge, density):
    recipe = make_recipe(zoo, "a", "b", parameters={"weight": 0.4, "density": density})
    crumbs = with_method(
        *(recipe, "breadcrumbs"), weight=0.4, density=density, gamma=0, normalize=False
    )
    assert same_bits(merge(recipe), merge(crumbs))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
def test_equals_ties_with_sign_election(zoo, merge, density, normalize):
    shared = {"weight": 0.6, "density": density, "normalize": normalize}
    recipe = make_recipe(zoo, "a", "b", "c", parameters={**shared, "consensus": "sum"})
    assert same_bits(merge(recipe), merge(with_method(recipe, "ties", **shared)))


def test_scale_is_a_factor_on_the_weight(zoo, merge):
    scaled = make_recipe(zoo, "a", "b", parameters={"weight": 0.5, "scale": 0.5})
    weighted = make_recipe(zoo, "a", "b", parameters={"weight": 0.25})
    assert same_bits(merge(scaled), merge(weighted))


def test_unset_weight_is_one_over_the_number_of_models(zoo, merge):
    recipe = make_recipe(zoo, "a", "b", "c")
    assert same_bits(
        merge(recipe), merge(with_method(recipe, "task_arithmetic", weight=1 / 3))
    )


# What MergeKit does with a recipe


GRADIENT_AND_FILTERS = [
    {"filter": "self_attn", "value": [0.1, 0.9]},
    {"filter": "mlp", "value": 0.7},
    {"value": 0.2},
]


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": {"weight": GRADIENT_AND_FILTERS}},
        {"out_dtype": "bfloat16", "parameters": {"weight": 0.4}},
        {
            "models": None,
            "slices": [
                {
                    "sources": [
                        {"model": n, "layer_range": r} for n in ("base", "a", "b")
                    ]
                }
                for r in ([0, 2], [1, 3])
            ],
            "parameters": {"weight": [0.2, 0.8]},
        },
        {
            "models": None,
            "modules": {"default": {"models": [{"model": "a"}, {"model": "b"}]}},
            "parameters": {"weight": 0.3},
        },
        {"tokenizer": {"source": "union"}, "parameters": {"weight": 0.3}},
        {"tokenizer_source": "base", "parameters": {"weight": 0.3}},
    ],
    ids=["filters", "out_dtype", "slices", "modules", "union", "base"],
)
def test_recipe_means_what_it_means_to_mergekit(zoo, merge, changes):
    recipe = make_recipe(zoo, "a", "b") | changes
    recipe = {key: value for key, value in recipe.items() if value is not None}
    text = yaml.safe_dump(recipe)
    for name in ("base", "a", "b"):
        text = text.replace(f"model: {name}\n", f"model: {zoo / name}\n")
    merged = merge(text)
    assert same_bits(merged, merge(text.replace("hi_merging", "task_arithmetic")))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"tied": True}, {}),
        ({}, {"max_shard_size": "40KB"}),
        ({"tied": True, "attention_bias": False}, {"dtype": torch.bfloat16}),
    ],
    ids=["tied", "sharded", "bfloat16 files"],
)
def test_checkpoints_of_all_kinds(merge, tmp_path, config, options):
    base = make_llama(seed=0, **config)
    tuned = [tune(base, seed=seed) for seed in (1, 2)]
    for name, model in zip(("a", "b", "base"), (*tuned, base), strict=True):
        save_model(model, tmp_path / name, **options)
    recipe = make_recipe(tmp_path, "a", "b", parameters={"weight": 0.4})
    assert same_bits(
        merge(recipe), merge(with_method(recipe, "task_arithmetic", weight=0.4))
    )


@pytest.mark.parametrize("lazy", [[], ["--lazy-unpickle"]])
def test_pickled_checkpoints(zoo, merge, tmp_path, lazy):
    for name in ("base", "a"):
        folder = tmp_path / name
        folder.mkdir()
        torch.save(load(zoo, name), folder / "pytorch_model.bin")
        (folder / "config.json").write_bytes((zoo / name / "config.json").read_bytes())
        make_tokenizer().save_pretrained(folder)
    merged = merge(make_recipe(tmp_path, "a", parameters={"weight": 0.5}), *lazy)
    assert same_bits(merged, merge(make_recipe(zoo, "a", parameters={"weight": 0.5})))


def test_adapters_are_merged_into_their_base_first(zoo, merge, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(zoo / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    whole = adapted.merge_and_unload()
    save_model(whole, tmp_path / "whole")
    recipe = make_recipe(zoo, parameters={"weight": 1.0, "density": 0.5})
    recipe["models"] = [{"model": f"{zoo / 'base'}+{tmp_path / 'adapter'}"}]
    merged = merge(recipe, "--lora-merge-cache", str(tmp_path / "cache"))
    recipe["models"] = [{"model": str(tmp_path / "whole")}]
    assert same_bits(merged, merge(recipe))
    assert not same_bits(merged, load(zoo, "base"))


# Scopes


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_wide_scopes_keep_the_share_of_the_whole(zoo, merge, scope):
    density = 0.1
    recipe = make_recipe(
        zoo, "a", "b", parameters={"density": density, "weight": 0.5, "scope": scope}
    )
    merged = merge(recipe)
    base = load(zoo, "base")
    expected = {name: tensor.double() for name, tensor in base.items()}
    for expert in ("a", "b"):
        delta = {n: t - base[n] for n, t in load(zoo, expert).items()}

        def group_of(name: str) -> str:
            if scope == "model":
                return "all"
            return name.split(".")[2] if ".layers." in name else name

        for group in set(map(group_of, delta)):
            members = [name for name in delta if group_of(name) == group]
            everything = torch.cat([delta[name].flatten() for name in members])
            order = everything.abs().argsort(descending=True, stable=True)
            mask = torch.zeros(len(everything), dtype=torch.bool)
            mask[order[: int(density * len(everything))]] = True
            sizes = [delta[name].numel() for name in members]
            for name, keep in zip(members, mask.split(sizes), strict=True):
                kept = delta[name].flatten() * keep
                expected[name] += 0.5 * kept.reshape(delta[name].shape)
    for name, tensor in merged.items():
        assert torch.allclose(tensor.double(), expected[name], atol=1e-7), name


def test_scope_changes_nothing_at_density_1(zoo, merge):
    recipe = make_recipe(zoo, "a", "b", parameters={"weight": 0.5})
    wide = make_recipe(zoo, "a", "b", parameters={"weight": 0.5, "scope": "model"})
    assert same_bits(merge(recipe), merge(wide))


# In memory


def test_state_dicts_merge_to_the_same_bits(zoo, merge):
    per_model = {"weight": {"a": 0.3, "b": 0.6}, "density": {"a": 0.2, "b": 0.5}}
    merged = merge_state_dicts(
        {name: load(zoo, name) for name in ("b", "base", "a")},
        "hi_merging",
        base="base",
        parameters={**per_model, "consensus": "count"},
    )
    recipe = make_recipe(zoo, parameters={"consensus": "count"})
    recipe["models"] = [
        {
            "model": str(zoo / name),
            "parameters": {key: values[name] for key, values in per_model.items()},
        }
        for name in ("a", "b")
    ]
    assert same_bits(merged, merge(recipe))
