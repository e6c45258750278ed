"""Models that do not belong together: heads, vocabularies, parents, shapes, numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import VOCABULARY, make_llama, make_recipe, save_model, tune
from preflight_cases import (
    Case,
    copy_model,
    edit_json,
    edit_tensors,
    inspect,
    recipe_of,
    with_base,
    with_expert,
)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def drop(name: str):
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def put(name: str, *shape: int):
    def change(tensors):
        tensors[name] = torch.full(shape, 0.01)

    return lambda folder: edit_tensors(folder, change)


def set_config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def tie(folder: Path) -> None:
    drop(HEAD)(folder)
    set_config(tie_word_embeddings=True)(folder)


def tie_in_config(folder: Path) -> None:
    set_config(tie_word_embeddings=True)(folder)


def store_equal_head(folder: Path) -> None:
    def change(tensors):
        tensors[HEAD] = tensors[EMBEDDING].clone()

    edit_tensors(folder, change)
    set_config(tie_word_embeddings=True)(folder)


ONE_KIND = "models must all have a head of their own or none, got"
HEADS = {
    "absent from an expert": Case(
        with_expert(drop(HEAD)),
        "error",
        ("model '{here}/a' must store its head", "tie_word_embeddings false"),
    ),
    "absent from the base": Case(
        with_base(drop(HEAD)),
        "error",
        ("base model '{here}/base' must store its head",),
    ),
    "tied expert": Case(
        with_expert(tie),
        "error",
        (f"{ONE_KIND} none in '{{here}}/a' and one in the base '{{zoo}}/base'",),
    ),
    "tied base": Case(
        with_base(tie),
        "error",
        (f"{ONE_KIND} one in '{{zoo}}/a' and none in the base '{{here}}/base'",),
    ),
    "stored though tied": Case(
        with_expert(tie_in_config),
        "warning",
        ("model '{here}/a' must store no other head", f"'{HEAD}' with other values"),
    ),
}


@pytest.mark.parametrize("case", HEADS.values(), ids=HEADS.keys())
def test_head_that_would_be_lost_or_made_up_is_named(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


def test_tied_models_are_no_finding_even_with_the_embedding_stored_twice(zoo, tmp_path):
    base = make_llama(seed=0, tied=True)
    save_model(tune(base, seed=1), tmp_path / "a")
    save_model(base, tmp_path / "base")
    store_equal_head(tmp_path / "a")
    assert inspect(make_recipe(tmp_path, "a")) == []


def edit_tokens(change):
    """Make an edit of the vocabulary, token -> id."""

    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        change(vocabulary)
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    return edit


def shuffle(vocabulary: dict[str, int]) -> None:
    letters = "abcdefghij"
    ids = [vocabulary[letter] for letter in letters]
    vocabulary.update(zip(letters, reversed(ids), strict=True))


def rename(vocabulary: dict[str, int]) -> None:
    vocabulary["<医>"] = vocabulary.pop("9")


def with_larger_expert(**changes):
    """Make an expert with two more tokens and rows for them."""

    def make(zoo, here):
        model = make_llama(seed=1, vocab_size=len(VOCABULARY) + 2)
        folder = save_model(model, here / "a")

        def add(vocabulary):
            for token in ("<|用户|>", "<|end|>"):
                vocabulary[token] = len(vocabulary)

        edit_tokens(add)(folder)
        return recipe_of(zoo, folder, **changes)

    return make


UNION = {"tokenizer": {"source": "union"}}
TEMPLATE = {"chat_template": "{{ messages }}"}


def set_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")


def set_other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 医 }}", encoding="utf-8")


def set_old_template(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", **TEMPLATE)


def with_adapter_template(zoo, here):
    lora = here / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text("{}", encoding="utf-8")
    set_template(lora)
    return make_recipe(zoo, models=[{"model": f"{zoo}/base+{lora}"}])


VOCABULARIES = {
    "other ids": Case(
        with_expert(edit_tokens(shuffle)),
        "error",
        ("'{here}/a' must give tokens the base's ids, got other ids for 10 of 42",),
    ),
    "a renamed token": Case(
        with_expert(edit_tokens(rename)),
        "warning",
        ("'{here}/a' must have the base's tokens, got 1 others ('<医>')",),
    ),
    "more rows": Case(
        with_larger_expert(),
        "error",
        ("'{here}/a' must have the shapes", "[44, 32] and [42, 32]", "source: union"),
    ),
    "tokens dropped by the base's tokenizer": Case(
        with_larger_expert(tokenizer={"source": "base"}),
        "warning",
        ("'{here}/a' must have no tokens that the base lacks", "<|用户|>"),
    ),
    "tokens beyond the rows": Case(
        with_base(edit_tokens(lambda vocabulary: vocabulary.update({"<x>": 99}))),
        "warning",
        ("base model '{here}/base' must have a row", "vocab_size 42", "'<x>'"),
    ),
    "no tokenizer in the base": Case(
        with_base(lambda folder: (folder / "tokenizer.json").unlink()),
        "warning",
        ("base model '{here}/base' must have a tokenizer for the merge",),
    ),
    "a template in the expert alone": Case(
        with_expert(set_template),
        "warning",
        ("must have the chat template of '{here}/a', got none", "chat_template: auto"),
    ),
    "a template in an expert's settings": Case(
        with_expert(set_old_template),
        "warning",
        ("must have the chat template of '{here}/a', got none",),
    ),
    "another template": Case(
        lambda zoo, here: (
            set_other_template(copy_model(zoo, here, "base"))
            or with_expert(set_template, base_model=str(here / "base"))(zoo, here)
        ),
        "warning",
        ("models must share a chat template, got another in '{here}/a'",),
    ),
    "another end of text": Case(
        with_expert(lambda f: edit_json(f / "generation_config.json", eos_token_id=2)),
        "warning",
        ("'{here}/a' must end its texts as the base does", "[2] and [1] in the base"),
    ),
}


@pytest.mark.parametrize("case", VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_vocabulary_that_does_not_fit_is_named(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


def test_template_beside_an_adapter_is_not_forgotten(zoo, tmp_path):
    recipe = with_adapter_template(zoo, tmp_path)
    found = inspect(recipe, lora_merge_cache=str(tmp_path / "cache"))
    assert any("must have the chat template of" in f.text for f in found)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (with_larger_expert(**UNION), {}),
        (with_expert(edit_tokens(shuffle), **UNION), {}),
        (with_expert(set_template, chat_template="auto"), {}),
    ],
    ids=["union of sizes", "union of ids", "chosen template"],
)
def test_vocabularies_that_the_recipe_aligns_are_no_error(zoo, tmp_path, make, changes):
    found = inspect(make(zoo, tmp_path), **changes)
    assert [f for f in found if "deltas" not in f.text] == []


def save_other(zoo: Path, here: Path) -> Path:
    """Save a model of the base's shape that has nothing to do with it."""
    return save_model(make_llama(seed=77), here / "other")


def set_values(name: str, value: float):
    def change(tensors):
        tensors[name][:] = value

    return lambda folder: edit_tensors(folder, change)


def with_link(zoo, here):
    (here / "folder").mkdir()
    for path in (zoo / "a").iterdir():
        (here / "folder" / path.name).symlink_to(path)
    return make_recipe(
        zoo, models=[{"model": str(zoo / "a")}, {"model": str(here / "folder")}]
    )


UP = "model.layers.1.mlp.up_proj.weight"
PARENTS = {
    "another parent": Case(
        lambda zoo, here: recipe_of(zoo, save_other(zoo, here)),
        "warning",
        ("'{here}/other' must be tuned from the base, got deltas 1.4", "base_model:"),
    ),
    "a copy of the base": Case(
        lambda zoo, here: recipe_of(zoo, zoo / "a", copy_model(zoo, here, "base")),
        "warning",
        ("'{here}/base' must differ from the base, got equal values in all",),
    ),
    "a model twice, as a copy": Case(
        lambda zoo, here: recipe_of(zoo, zoo / "a", copy_model(zoo, here, "a")),
        "warning",
        ("models must differ", "'{here}/a' and '{zoo}/a'"),
    ),
    "a model twice, as links": Case(
        with_link,
        "error",
        ("models must be distinct, got the same files", "'{here}/folder'"),
    ),
    "NaN": Case(
        with_expert(set_values(UP, float("nan"))),
        "error",
        ("'{here}/a' must have finite values, got NaN or infinity in 1 of", UP),
    ),
    "infinity in the base": Case(
        with_base(set_values(UP, float("inf"))),
        "error",
        ("'{here}/base' must have finite values", UP),
    ),
    "zeros alone": Case(
        with_expert(set_values(UP, 0.0)),
        "warning",
        ("'{here}/a' must hold values, got zeros alone in 1 of", UP),
    ),
}


@pytest.mark.parametrize("case", PARENTS.values(), ids=PARENTS.keys())
def test_sampled_values_tell_models_that_do_not_belong(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


def with_attention_biases(zoo, here):
    base = make_llama(seed=0, attention_bias=True)
    save_model(tune(base, seed=1), here / "a")
    save_model(base, here / "base")
    return make_recipe(here, "a")


def with_modules(*names: str, **settings: Any):
    """Make a recipe of these modules for an encoder with a decoder."""

    def make(zoo, here):
        config = transformers.T5Config(
            **{"vocab_size": 42, "d_model": 32, "d_kv": 8, "d_ff": 48},
            **{"num_layers": 2, "num_heads": 4, "eos_token_id": 1},
            **{"pad_token_id": 0, "decoder_start_token_id": 0},
            **{"feed_forward_proj": "gated-gelu", **settings},
        )
        torch.manual_seed(0)
        base = transformers.T5ForConditionalGeneration(config)
        save_model(tune(base, seed=1), here / "a")
        save_model(base, here / "base")
        recipe = make_recipe(here)
        del recipe["models"]
        models = [{"model": str(here / "a")}]
        return recipe | {"modules": {name: {"models": models} for name in names}}

    return make


COVERAGE = {
    "attention biases of a Llama": Case(
        with_attention_biases,
        "error",
        ("base model '{here}/base' must have tensors that MergeKit merges, got 12",),
    ),
    "a module that the recipe leaves out": Case(
        with_modules("encoder"),
        "error",
        ("base model '{here}/base' must have tensors that", "under 'modules:'"),
    ),
    "a value head on an expert": Case(
        with_expert(put("v_head.weight", 1, 32)),
        "warning",
        ("model '{here}/a' must have no tensors beside", "got 1", "'v_head.weight'"),
    ),
    "a variant that MergeKit does not know": Case(
        with_modules("encoder", "decoder", feed_forward_proj="relu"),
        "error",
        ("base model '{here}/base' must hold every tensor", "know this variant"),
    ),
    "a tensor that nothing needs": Case(
        with_base(put("training.step", 1)),
        "warning",
        ("base model '{here}/base' must have no tensors beside", "'training.step'"),
    ),
    "a tensor that is not there": Case(
        with_expert(drop(UP)),
        "error",
        ("model '{here}/a' must hold every tensor of its architecture, got no", UP),
    ),
    "more layers in the files": Case(
        lambda zoo, here: (
            with_base(set_config(num_hidden_layers=2))(zoo, here)
            | {
                "models": [
                    {"model": str(trim(copy_model(zoo, here, "a")))},
                ]
            }
        ),
        "warning",
        ("base model '{here}/base' must have as many layers", "got 2 there and 3"),
    ),
}


def trim(folder: Path) -> Path:
    """Take the last of three layers away."""

    def change(tensors):
        for name in [n for n in tensors if ".layers.2." in n]:
            del tensors[name]

    edit_tensors(folder, change)
    set_config(num_hidden_layers=2)(folder)
    return folder


@pytest.mark.parametrize("case", COVERAGE.values(), ids=COVERAGE.keys())
def test_tensor_that_is_not_merged_is_named(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


def test_known_buffers_are_no_finding(zoo, tmp_path):
    folder = copy_model(zoo, tmp_path, "base")
    put("model.layers.0.self_attn.rotary_emb.inv_freq", 4)(folder)
    assert inspect(make_recipe(zoo, "a", base_model=str(folder))) == []


def as_mistral(folder: Path) -> None:
    set_config(architectures=["MistralForCausalLM"], model_type="mistral")(folder)


CONFIGS = {
    "another architecture": Case(
        with_expert(as_mistral),
        "error",
        (
            "'{here}/a' must have the architecture of the base, got "
            "['MistralForCausalLM'] (mistral) and ['LlamaForCausalLM'] (llama)",
        ),
        options={"allow_crimes": True},
    ),
    "another number of heads": Case(
        with_expert(set_config(num_attention_heads=8, head_dim=4)),
        "error",
        ("'{here}/a' must have the configuration", "num_attention_heads 8 and 4"),
    ),
    "another rope": Case(
        with_expert(
            set_config(rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
        ),
        "warning",
        ("'{here}/a'", "rope_parameters", "1000000", "the merge has the base's"),
    ),
    "another epsilon": Case(
        with_expert(set_config(rms_norm_eps=1e-5)),
        "warning",
        ("'{here}/a'", "rms_norm_eps 1e-05 and 1e-06"),
    ),
    "another activation": Case(
        with_expert(set_config(hidden_act="gelu")),
        "warning",
        ("'{here}/a'", "hidden_act 'gelu' and 'silu'"),
    ),
    "another width": Case(
        lambda zoo, here: recipe_of(
            zoo, save_model(make_llama(seed=1, intermediate_size=64), here / "a")
        ),
        "error",
        ("'{here}/a' must have the configuration", "intermediate_size 64 and 48"),
    ),
    "shapes that the configurations do not tell": Case(
        with_expert(put(UP, 40, 32)),
        "error",
        (f"'{{here}}/a' must have the shapes of the base '{{zoo}}/base', got '{UP}'",),
    ),
}


@pytest.mark.parametrize("case", CONFIGS.values(), ids=CONFIGS.keys())
def test_configuration_that_differs_from_the_base_is_named(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


def test_number_that_one_configuration_leaves_open_is_no_finding(tmp_path):
    config = transformers.GPT2Config(
        **{"vocab_size": 42, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_inner": 128},
        **{"n_positions": 16, "eos_token_id": 1, "bos_token_id": 1},
    )
    base = transformers.GPT2LMHeadModel(config)
    save_model(tune(base, seed=1), tmp_path / "a")
    save_model(base, tmp_path / "base")
    edit_json(tmp_path / "a" / "config.json", n_inner=None)
    assert inspect(make_recipe(tmp_path, "a")) == []


def test_recipe_of_all_modules_is_no_error(zoo, tmp_path):
    found = inspect(with_modules("encoder", "decoder", "shared")(zoo, tmp_path))
    assert [f for f in found if f.level == "error"] == []
