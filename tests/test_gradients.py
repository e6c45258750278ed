"""Gradients of every weight matrix against autograd of whole transformers models."""

import numpy as np
import pytest
import torch
from conftest import save_model
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from test_analysis import (
    ROWS,
    Bench,
    encode,
    log_probability,
    make_analysis,
    save_school,
    write_rows,
)
from test_analysis import make_tokenizer as make_letters
from test_recipe import WITH_DATA, problems_of
from test_streams import Family
from transformers import AutoTokenizer

from mergekit_himerging.analysis import session
from mergekit_himerging.analysis.gradients import (
    GRADIENT_FORWARDS,
    measure_gradients,
    name_matrices,
    take_norms,
)
from mergekit_himerging.analysis.session import make_plan, make_replay, read_data
from mergekit_himerging.estimate import estimate_cost
from mergekit_himerging.plan import Plan
from mergekit_himerging.planning import plan_recipe
from mergekit_himerging.scores import MatrixGradients

SHORT = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj"}
    | {"gate_proj", "up_proj", "down_proj"},
    "gpt2": {"c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"},
    "qwen3_moe": {"q_proj", "k_proj", "v_proj", "o_proj"}
    | {"gate", "gate_up_proj", "down_proj"},
}


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    return save_school(tmp_path_factory.mktemp("school"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def small_batches(monkeypatch):
    """More than one batch for a task, so that gradients must be added up."""
    monkeypatch.setitem(session.BATCH_CELLS, "cpu", 12)


def plan_of(recipe):
    config = MergeConfiguration.model_validate(recipe)
    return plan_recipe(config, MergeOptions(quiet=True))


def gradients_of(recipe, memory=2**30):
    """Measure a recipe's gradients, by task and matrix."""
    merge = plan_of(recipe)
    cpu = torch.device("cpu")
    tasks = read_data(merge, cpu, accept_share=0.0)
    assert all(len(task.choosing.batches) > 1 for task in tasks)
    found = measure_gradients(
        merge.resolve(None),
        tasks,
        make_replay(merge, cpu),
        device=cpu,
        memory=memory,
        cuts={},
    )
    return [{record.matrix: record for record in records} for records in found]


def whole_gradients(model, state, score):
    """Gradients by the model's own backward pass, by name."""
    model.load_state_dict(state)
    model.zero_grad()
    score(model).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def assert_norms(records, place, gradients, blocks):
    """Hold one task's records against whole gradients, every entry of them."""
    expected = {
        name: gradient
        for name, gradient in gradients.items()
        if f".{blocks}." in name and gradient.dim() > 1
    }
    seen = set()
    for matrix, record in records.items():
        for index, layer in enumerate(record.layers):
            (name,) = (
                name
                for name in expected
                if name.removesuffix(".weight").endswith(f".{matrix}")
                and f".{layer}." in name.split(f".{blocks}")[1]
            )
            seen.add(name)
            gradient = expected[name]
            if gradient.dim() == 3:
                gradient = torch.block_diag(*gradient)
            nuclear = float(torch.linalg.matrix_norm(gradient.double(), ord="nuc"))
            frobenius = float(gradient.double().square().sum().sqrt())
            found = (
                getattr(record, f"nuclear_{place}")[index],
                getattr(record, f"frobenius_{place}")[index],
            )
            assert found == pytest.approx((nuclear, frobenius), rel=2e-4), name
            assert nuclear > 1e-4
    assert seen == set(expected)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("architecture", ["llama", "llama, tied", "gpt2", "qwen3_moe"])
def test_norms_are_those_of_whole_gradients(architecture, tmp_path):
    family = Family(architecture, 2)
    tuned = {
        n: family.plus(d) for n, d in zip("ab", family.deltas.values(), strict=True)
    }
    for name, state in {"base": family.base, **tuned}.items():
        family.model.load_state_dict(state)
        save_model(family.model, tmp_path / name)
    found = gradients_of(make_analysis(tmp_path, tmp_path, "a", "b"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    blocks = "h" if architecture == "gpt2" else "layers"
    for records, name in zip(found, "ab", strict=True):
        assert set(records) == SHORT[architecture.split(",")[0]]
        assert all(record.layers == (0, 1, 2) for record in records.values())
        texts = [encode(tokenizer, *row) for row in ROWS[name]]

        def score(model, texts=texts):
            return torch.stack([log_probability(model, text) for text in texts]).mean()

        for place, state in (("base", family.base), ("single", tuned[name])):
            gradients = whole_gradients(family.model, state, score)
            assert_norms(records, place, gradients, blocks)


@pytest.mark.usefixtures("small_batches")
def test_norms_of_accuracy_are_of_the_right_option_and_the_pruned_model(
    school, tmp_path
):
    recipe = make_analysis(
        school, tmp_path, "a", "b", of_model={"metric": "accuracy", "density": 0.5}
    )
    options = {}
    for item, name in zip(recipe["models"], "ab", strict=True):
        rows = [
            {"prompt": p + "?", "choices": [c, *(o for _, o in ROWS["c"][:2])]}
            for p, c in ROWS[name]
        ]
        item["parameters"]["calibration"] = write_rows(
            tmp_path, name, [{**row, "answer": 0} for row in rows]
        )
        options[name] = [
            [encode(make_letters(), row["prompt"], " " + o) for o in row["choices"]]
            for row in rows
        ]
    bench = Bench.of(school, "a", "b", density=0.5)
    found = gradients_of(recipe)
    for records, name in zip(found, "ab", strict=True):

        def score(model, samples=options[name]):
            means = [
                torch.stack([log_probability(model, text) for text in texts])
                for texts in samples
            ]
            return torch.stack([m[0] - m.logsumexp(0) for m in means]).mean()

        for place, weights in (("base", {}), ("single", {name: 1.0})):
            state = bench.merge(weights, {})
            gradients = whole_gradients(bench.model, state, score)
            assert_norms(records, place, gradients, "layers")


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (3, 5, 2)])
def test_nuclear_norm_is_the_sum_of_singular_values(shape):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator)
    matrix[..., 0, :] = matrix[..., 1, :]  # one value is zero, or a rank is lost
    before = matrix.clone()
    whole = matrix if matrix.dim() == 2 else torch.block_diag(*matrix)
    nuclear = torch.linalg.matrix_norm(whole.double(), ord="nuc")
    frobenius = np.sqrt(sum(entry**2 for entry in matrix.flatten().tolist()))
    expected = pytest.approx((frobenius, float(nuclear)), rel=1e-6)
    assert take_norms(matrix) == expected
    assert torch.equal(matrix, before)


@pytest.mark.usefixtures("small_batches")
def test_samples_that_do_not_fit_together_are_refused(school, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b")
    recipe["parameters"] = {}
    merge = plan_of(recipe)
    cpu = torch.device("cpu")
    batches = [
        batch
        for task in read_data(merge, cpu, accept_share=0.0)
        for batch in task.choosing.batches
    ]
    cells = sum(batch.input_ids.numel() for batch in batches)
    needed = (3 + 2) * cells * 4 * make_replay(merge, cpu).width  # 3 layers
    gradients_of(recipe, memory=needed)
    with pytest.raises(
        ValueError, match=r"must hold all samples at once .* in 2 turns"
    ):
        gradients_of(recipe, memory=needed - 1)


def test_gradient_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="must be finite, got norm inf; remove 'grad"):
        take_norms(torch.tensor([[1.0, float("inf")]]))


def test_matrices_are_named_by_the_last_parts_that_tell_them_apart():
    names = ["attn.q.weight", "attn.out.weight", "mlp.out.weight", "experts.w", "w"]
    assert list(name_matrices(names).values()) == [
        *("q", "attn.out", "mlp.out", "experts.w", "w"),
    ]


def norms(nuclear, layers=None):
    layers = tuple(range(len(nuclear))) if layers is None else layers
    names = ("frobenius_base", "frobenius_single", "nuclear_single")
    return MatrixGradients(
        matrix="q_proj",
        layers=layers,
        nuclear_base=nuclear,
        **dict.fromkeys(names, (1.0,) * len(layers)),
    )


def test_difference_is_the_mean_over_neighbouring_layers():
    record = norms((1.0, 4.0, 2.0, 2.0))
    assert record.difference_base == pytest.approx((3 + 2 + 0) / 3)
    assert record.difference_single == 0
    assert norms((1.0,)).difference_base is None


def test_record_without_a_norm_for_each_layer_is_refused():
    problem = "nuclear_base must have a number for each of 2 layers, got 3"
    with pytest.raises(ValueError, match=problem):
        norms((1.0, 2.0, 3.0), layers=(0, 1))


def test_plan_carries_gradients_and_their_cost_apart_from_the_steps(school, tmp_path):
    options = {"resolve": "measured", "accept_share": 0}
    recipe = make_analysis(school, tmp_path, "a", "b", gradients=True, **options)
    del recipe["parameters"]["plan_out"]
    plan = make_plan(plan_of(recipe))
    without = {**recipe["parameters"], "gradients": False}
    bare = make_plan(plan_of({**recipe, "parameters": without}))
    assert plan.gradient_forwards == GRADIENT_FORWARDS == 8
    assert (bare.gradient_forwards, bare.steps) == (0, plan.steps)
    assert plan.treatments == bare.treatments
    assert all(len(task.gradients) == 7 for task in plan.tasks)
    assert all(task.gradients == () for task in bare.tasks)
    assert Plan.model_validate_json(plan.to_json()) == plan
    # One line for a matrix's layers: the file grows by numbers, not by lines.
    assert plan.to_json().count("\n") - bare.to_json().count("\n") < 150
    cost = estimate_cost(plan_of(recipe)).n_block_calls
    batches = sum(
        len(task.choosing.batches)
        for task in read_data(plan_of(recipe), torch.device("cpu"), accept_share=0)
    )
    before = estimate_cost(plan_of({**recipe, "parameters": without})).n_block_calls
    assert cost - before == GRADIENT_FORWARDS * plan.n_layers * batches


@pytest.mark.parametrize(
    "setting", ["resolve: rules, gradients: true", "preset: paper, gradients: 1"]
)
def test_gradients_without_measurement_are_refused(setting):
    assert problems_of(WITH_DATA % setting) == [
        "['gradients'] must come with 'resolve: measured', got 'resolve: rules', which "
        "has no use for it; remove one of the two"
    ]
