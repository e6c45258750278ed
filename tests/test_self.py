"""Rows that experts draw from themselves: what is drawn, kept, hashed and refused."""

import copy
import itertools

import numpy as np
import peft
import pytest
import torch
from conftest import VOCABULARY, make_llama, save_model
from conftest import make_tokenizer as make_letters
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from test_analysis import make_analysis, save_school, train_experts
from test_recipe import WITH_DATA, problems_of
from tokenizers import decoders

from mergekit_himerging.analysis import drawing, self_rows
from mergekit_himerging.analysis.drawing import Turn, draw_rows, open_turn
from mergekit_himerging.analysis.row_files import read_rows
from mergekit_himerging.analysis.rows import hash_rows, parse_row
from mergekit_himerging.analysis.samples import tokenize_rows
from mergekit_himerging.analysis.session import make_plan, read_data
from mergekit_himerging.api import check
from mergekit_himerging.planning import plan_recipe
from mergekit_himerging.search import _move_data

CPU = torch.device("cpu")
CHAT = (
    "{% for m in messages %}{{ '<unk>' + m.role[0] + '.' + m.content + '<eos>' }}"
    "{% endfor %}{% if add_generation_prompt %}<unk>a.{% endif %}"
)


N_NEW = 8
"""Tokens of a prompt and of an answer in these tests."""


def make_tokenizer():
    """Make a tokenizer of single characters that decodes to what it was given."""
    tokenizer = make_letters()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    folder = save_school(tmp_path_factory.mktemp("school"))
    for name in ("base", "a", "b"):
        make_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch):
    monkeypatch.setattr(drawing, "MAX_TOKENS", N_NEW)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(folder))
    return folder


def make_self(school, folder, *, of_model=None, **parameters):
    recipe = make_analysis(
        school, folder, "a", "b", of_model={"samples": 6, **(of_model or {})}
    )
    recipe["parameters"] = parameters
    for model in recipe["models"]:
        model["parameters"]["calibration"] = "self"
    return recipe


def plan_of(recipe):
    config = MergeConfiguration.model_validate(recipe)
    return plan_recipe(config, MergeOptions(quiet=True))


def make_chatty():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def greedy(model, ids, n_new):
    """The likeliest tokens, one full forward each."""
    for _ in range(n_new):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids


def spell(text):
    return [VOCABULARY.index(character) for character in text]


def read(ids):
    """Text up to the end mark, without special tokens."""
    kept = itertools.takewhile(lambda token: token != 1, ids)
    return "".join(VOCABULARY[token] for token in kept if token > 2)


def test_answers_are_the_likeliest_tokens_after_a_drawn_prompt():
    model, tokenizer = make_llama(seed=3).eval(), make_tokenizer()
    rows = draw_rows((model, tokenizer), None, name="x", n_rows=5, seed=1)
    assert len({row.prompt for row in rows}) == 5
    for row in rows:
        asked = spell(row.prompt)
        written = greedy(model, asked, N_NEW)[len(asked) :]
        assert (row.completion, row.shape) == (read(written), "completion")


def test_chat_prompts_are_drawn_where_the_template_opens_a_turn(monkeypatch):
    model, tokenizer = make_llama(seed=3).eval(), make_chatty()
    turn = open_turn(tokenizer)
    assert turn == Turn("<unk>u.", "<eos><unk>a.")
    asked = []
    generate = model.generate

    def note(**options):
        asked.append(options["input_ids"].tolist())
        return generate(**options)

    monkeypatch.setattr(model, "generate", note)
    rows = draw_rows((model, tokenizer), turn, name="x", n_rows=4, seed=1)
    assert asked[0] == [[2, *spell("u.")]] * 4
    for row in rows:
        (role, words), *rest = row.turns
        assert (role, rest, row.shape) == ("user", [], "messages")
        prompt = [2, *spell(f"u.{words}"), 1, 2, *spell("a.")]
        written = greedy(model, prompt, N_NEW)[len(prompt) :]
        assert (row.completion, row.is_cut) == (read(written), 1 not in written)


def test_prompts_follow_the_distribution_of_the_model():
    model, tokenizer = make_llama(seed=3).eval(), make_tokenizer()
    with torch.no_grad():
        model.lm_head.weight *= 3  # far from even
        first = model(torch.tensor([[1]])).logits[0, -1].softmax(-1)
    n = 4000
    drawer = drawing._Drawer((model, tokenizer), None, "x", seed=0)
    drawer._n_new = 1
    texts = drawer.draw_prompts(n)
    for token in (first[3:].topk(3).indices + 3).tolist():
        share = texts.count(VOCABULARY[token]) / n
        expected = float(first[token])
        assert expected > 0.02
        error = np.sqrt(expected * (1 - expected) / n)
        assert abs(share - expected) < 4 * error


def test_rows_depend_on_seed_and_model_and_not_on_torch_or_its_state():
    model, tokenizer = make_llama(seed=3).eval(), make_tokenizer()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    options = {"name": "x", "n_rows": 3}
    one = draw_rows((model, tokenizer), None, **options, seed=5)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert draw_rows((model, tokenizer), None, **options, seed=5) == one
    assert draw_rows((model, tokenizer), None, **options, seed=6) != one


def make_parrot(token):
    """A model that says one token whatever it reads."""
    model = make_llama(seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.fill_(1)
        model.lm_head.weight[token] = 30
    return model


@pytest.mark.parametrize(("token", "got"), [(5, 1), (1, 0)], ids=["one", "none"])
def test_repeated_and_empty_rows_are_drawn_again_so_often(token, got):
    expert = (make_parrot(token), make_tokenizer())
    with pytest.raises(
        ValueError,
        match=rf"'x' must draw 3 different rows from itself, got {got} in "
        rf"{3 + 8 * (3 - got)} draws; lower 'samples', change 'seed' or name a file",
    ):
        draw_rows(expert, None, name="x", n_rows=3, seed=0)


def test_model_without_a_first_token_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(
        ValueError,
        match="'x' must have a beginning-of-sequence token or a chat template for "
        "calibration 'self', got none; name a file",
    ):
        draw_rows((make_parrot(5), tokenizer), None, name="x", n_rows=1, seed=0)


def test_bounds_leave_half_of_a_short_model_to_the_answer():
    model = make_llama(seed=3, max_position_embeddings=9).eval()
    rows = draw_rows((model, make_tokenizer()), None, name="x", n_rows=4, seed=0)
    assert max(len(row.prompt) for row in rows) == 4
    assert max(len(row.completion) for row in rows) <= 4
    short = make_llama(seed=3, max_position_embeddings=2).eval()
    with pytest.raises(ValueError, match=r"'x' must take 3 tokens or more, .* got 2"):
        draw_rows((short, make_tokenizer()), None, name="x", n_rows=4, seed=0)


@pytest.mark.parametrize("template", ["{{ messages[0].content * 2 }}", "hello"])
def test_template_without_the_words_of_the_user_is_refused(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"must show a user's words once .*got [02] t"):
        open_turn(tokenizer)


def test_end_of_a_turn_is_no_target_of_a_cut_answer():
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cde"},
    ]
    rows = [
        parse_row({"messages": messages, **more}, "x line 1")
        for more in ({}, {"cut": False}, {"cut": True})
    ]
    found = tokenize_rows(
        rows, make_chatty(), metric="loss", max_length=99, vocab_size=99
    )
    ended, same, cut = (sample.options[0] for sample in found.samples)
    assert ended == same
    assert ended.ids == (*cut.ids, 1)
    assert (ended.n_targets, cut.n_targets) == (4, 3)
    assert hash_rows(rows[:1]) == hash_rows(rows[1:2]) != hash_rows(rows[2:])


@pytest.mark.parametrize("metric", ["loss", "agreement"])
def test_merge_needs_no_data_at_all_and_its_rows_can_be_read(
    school, tmp_path, cache, monkeypatch, metric
):
    plan = make_plan(plan_of(make_self(school, tmp_path, of_model={"metric": metric})))
    files = sorted(cache.glob("self-*.jsonl"))
    kept = {hash_rows(read_rows(str(file), [])) for file in files}
    assert kept == {task.calibration_sha256 for task in plan.tasks}
    assert len(kept) == 2
    for task in plan.tasks:
        assert task.calibration == "self"
        assert len(task.calibration_rows) == 6
        assert task.score_single > task.score_base
    # As a file the rows are the same data.
    recipe = make_self(school, tmp_path, of_model={"metric": metric})
    by_hash = {hash_rows(read_rows(str(file), [])): str(file) for file in files}
    for model, task in zip(recipe["models"], plan.tasks, strict=True):
        model["parameters"]["calibration"] = by_hash[task.calibration_sha256]
    again = make_plan(plan_of(recipe))
    for task, other in zip(plan.tasks, again.tasks, strict=True):
        assert other.layers == task.layers


def test_rows_are_drawn_once(school, tmp_path, monkeypatch, cache):
    drawn = []

    def count(expert, turn, **options):
        drawn.append(options)
        return draw_rows(expert, turn, **options)

    monkeypatch.setattr(self_rows, "draw_rows", count)

    def hashes(**changes):
        recipe = make_self(school, tmp_path, **changes)
        tasks = read_data(plan_of(recipe), CPU, accept_share=0.5)
        return [task.rows_sha256 for task in tasks]

    first = hashes()
    assert hashes() == first
    assert hashes(of_model={"metric": "agreement", "density": 0.5}) == first
    assert len(drawn) == 2
    other = hashes(seed=1)
    assert not set(other) & set(first)
    assert len(drawn) == 4
    for file in cache.glob("self-*.jsonl"):
        file.write_text("damaged", encoding="utf-8")
    assert hashes() == first
    assert len(drawn) == 6
    monkeypatch.setattr(self_rows, "hash_code", lambda: "another state of the code")
    hashes()
    assert len(drawn) == 8


def test_adapter_draws_what_its_merged_model_draws(school, tmp_path):
    torch.manual_seed(0)
    model = copy.deepcopy(train_experts()[0])
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload().eval()
    expected = draw_rows((merged, make_tokenizer()), None, name="x", n_rows=6, seed=0)
    recipe = make_self(school, tmp_path)
    recipe["models"][0]["model"] = f"{school}/base+{tmp_path}/adapter"
    options = MergeOptions(
        quiet=True,
        lora_merge_cache=str(tmp_path / "merged"),
        lora_merge_dtype="float32",
    )
    merge = plan_recipe(MergeConfiguration.model_validate(recipe), options)
    tasks = {t.settings.model: t for t in read_data(merge, CPU, accept_share=0.5)}
    task = tasks[recipe["models"][0]["model"]]
    assert task.rows_sha256 == hash_rows(expected)


def test_tuned_recipe_still_draws_beside_a_file_of_that_name(tmp_path):
    (tmp_path / "self").write_text("not data", encoding="utf-8")
    document = {"models": [{"parameters": {"calibration": "self"}}]}
    _move_data(document, [tmp_path], tmp_path / "elsewhere")
    assert document == {"models": [{"parameters": {"calibration": "self"}}]}


def test_expert_that_changed_draws_anew(school, tmp_path):
    folder = tmp_path / "models"
    for name in ("base", "a", "b"):
        model = make_llama(seed=ord(name[0]))
        save_model(model, folder / name)

    def hashes():
        tasks = read_data(plan_of(make_self(folder, tmp_path)), CPU, accept_share=0.5)
        return [task.rows_sha256 for task in tasks]

    before = hashes()
    save_model(make_llama(seed=9), folder / "a")
    after = hashes()
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_check_neither_draws_nor_reads_a_file_and_says_what_it_costs(
    school, tmp_path, cache, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "self").write_text("not data", encoding="utf-8")
    report = check(make_self(school, tmp_path))
    assert report.problems == ()
    assert report.cost is not None
    assert report.cost.n_to_draw == 12
    assert report.cost.n_tokens == 12 * 2 * 64
    assert "rows to be drawn      12, by experts that are" in report.cost.describe()
    assert not list(cache.glob("self-*"))
    assert [w for w in report.warnings if "calibration" in w] == [
        "'calibration: self' lets each expert draw rows from itself, and "
        f"'{tmp_path / 'self'}' is not read; a file of that name is './self'"
    ]
    make_plan(plan_of(make_self(school, tmp_path)))
    later = check(make_self(school, tmp_path))
    assert later.cost is not None
    assert later.cost.n_to_draw == 0
    assert "drawn" not in later.cost.describe()


def test_path_of_a_file_named_self_is_a_path(school, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "self").write_text("not data", encoding="utf-8")
    recipe = make_self(school, tmp_path)
    for model in recipe["models"]:
        model["parameters"]["calibration"] = "./self"
    report = check(recipe)
    assert any(p.startswith("./self must end in one of") for p in report.problems)
    assert not [w for w in report.warnings if "calibration" in w]


def test_choices_cannot_be_drawn():
    recipe = (WITH_DATA % "metric: accuracy").replace("zh.jsonl", "self")
    assert problems_of(recipe) == [
        "'calibration' of 'org/zh' must have choices for metric 'accuracy', got "
        "'self', whose rows have none; use metric 'loss' or 'agreement'"
    ]
