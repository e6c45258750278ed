"""Numerics of one tensor against plain Python and numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mergekit_himerging import kernel
from mergekit_himerging.kernel import Part, find_cut, merge_tensor

DELTA = torch.tensor([[0.5, -3.0, 1.0], [-0.25, 2.0, -4.0]])


def prune_and_scale(delta: torch.Tensor, *, density: float, scale: float):
    """What a lone model of this delta adds to a base of zeros."""
    part = Part("m", delta, weight=1.0, density=density, scale=scale)
    return merge_tensor(torch.zeros_like(delta), [part])


def kept_by_sorting(values: list[float], density: float) -> set[int]:
    """Which entries stay, by Python's sort and the rule for ties, one by one."""
    wanted = int(density * len(values))
    if density == 1:
        return set(range(len(values)))
    if wanted == 0:
        return set()
    at_cut = sorted(map(abs, values), reverse=True)[wanted - 1]
    above = {i for i, v in enumerate(values) if abs(v) > at_cut}
    with_ties = {i for i, v in enumerate(values) if abs(v) >= at_cut and v != 0}
    return with_ties if len(with_ties) - wanted <= wanted - len(above) else above


@pytest.mark.parametrize(("density", "kept"), [(1.0, 6), (0.5, 3), (0.34, 2), (0.1, 0)])
def test_keeps_the_largest_entries_scaled(density, kept):
    before = DELTA.clone()
    result = prune_and_scale(DELTA, density=density, scale=0.5)
    largest = sorted(DELTA.flatten().tolist(), key=abs)[6 - kept :]
    assert sorted(result[result != 0].tolist()) == sorted(0.5 * v for v in largest)
    assert torch.equal(DELTA, before)


@pytest.mark.parametrize(
    ("values", "density", "kept"),
    [
        ([3, 2, 2, 2, 1], 0.4, 1),  # 1 or 4 of the wanted 2: 1 is nearer
        ([3, 2, 2, 2, 1], 0.6, 4),  # 1 or 4 of the wanted 3: 4 is nearer
        ([3, 2, 2, 1], 0.5, 3),  # 1 or 3 of the wanted 2: both as near, kept
        ([3, -2, 2, 1], 0.5, 3),  # tied by magnitude, whatever the sign
        ([1, 1, 1, 1], 0.25, 0),
        ([1, 1, 1, 1], 0.75, 4),
        ([3, 0, 0, 0], 0.5, 1),  # zeros are nothing to keep
        ([0, 0], 0.5, 0),
    ],
)
def test_entries_tied_at_the_cut_go_together(values, density, kept):
    result = prune_and_scale(torch.tensor(values).float(), density=density, scale=1)
    assert int((result != 0).sum()) == kept


@given(
    values=hnp.arrays(
        np.float32,
        st.integers(1, 60),
        elements=st.floats(-4, 4, width=16, allow_subnormal=True),
    ),
    density=st.floats(0, 1),
)
def test_selection_equals_sorting_on_any_values(values, density):
    pruned = prune_and_scale(torch.from_numpy(values), density=density, scale=1)
    expected = np.zeros_like(values)
    for index in kept_by_sorting(values.tolist(), density):
        expected[index] = values[index]
    assert np.array_equal(pruned.numpy(), expected)


@given(
    values=hnp.arrays(
        np.float32,
        st.integers(1, 60),
        elements=st.floats(-4, 4, width=16, allow_subnormal=True),
    ),
    share=st.floats(0, 1),
)
def test_counted_selection_equals_direct_selection(values, share):
    wanted = 1 + int(share * (len(values) - 1))
    delta = torch.from_numpy(values)
    high = kernel.count_high_bits(delta)
    low = kernel.count_low_bits(delta, kernel.find_bin(high, wanted)[0])
    counted = kernel.find_cut_in_counts(high, low, wanted)
    at_cut = sorted(map(abs, values.tolist()), reverse=True)[wanted - 1]
    above = sum(abs(v) > at_cut for v in values.tolist())
    at_least = sum(abs(v) >= at_cut for v in values.tolist())
    kept = int((delta.abs() > counted).sum())
    if at_cut == 0:
        assert kept == above
    else:
        assert kept == (at_least if at_least - wanted <= wanted - above else above)


def test_counts_of_parts_add_up_to_the_counts_of_the_whole():
    delta = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    parts = kernel.count_high_bits(delta[:300]) + kernel.count_high_bits(delta[300:])
    assert torch.equal(parts, kernel.count_high_bits(delta))


@pytest.mark.parametrize("density", [-0.1, 1.5, 50, math.nan])
def test_density_outside_its_range_is_named(density):
    with pytest.raises(ValueError, match=rf"in \[0, 1\], got {density:g}"):
        find_cut(DELTA, density)
    with pytest.raises(ValueError, match=rf"in \[0, 1\], got {density:g}"):
        merge_tensor(DELTA, [Part("m", DELTA, 1.0, density=density)])


@pytest.mark.parametrize("weight", [0.5, 1.0])  # at 1 the tensor would be copied
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_name_the_model(bad, weight):
    tuned = DELTA.clone()
    tuned[0, 0] = bad
    with pytest.raises(ValueError, match="delta of 'm' must be finite"):
        merge_tensor(DELTA, [Part("m", tuned, weight)])


@pytest.mark.parametrize("consensus", ["none", "sum"])
def test_tensor_that_no_model_changed_keeps_the_signs_of_its_zeros(consensus):
    base = torch.tensor([0.0, -0.0, 1.0])
    parts = [Part("a", base.clone(), 0.5, density=0.5), Part("b", base.clone(), 0.5)]
    merged = merge_tensor(base, parts, consensus=consensus, normalize=True)
    assert torch.equal(merged.view(torch.int32), base.view(torch.int32))


def test_weighted_sum_of_scaled_parts():
    base = torch.tensor([1.0, 2.0, 3.0, 4.0])
    parts = [
        Part("a", base + torch.tensor([1.0, -2.0, 0.5, 0.25]), 0.5, density=0.5),
        Part("b", base + torch.tensor([0.5, 4.0, -8.0, 0.0]), 0.25, 0.25, scale=0.5),
    ]
    merged = merge_tensor(base, parts, strength=2.0)
    # a keeps 1 and -2, b keeps -8: base + 2 * (0.5 * a + 0.25 * 0.5 * b)
    assert merged.tolist() == [2.0, 0.0, 1.0, 4.0]


def test_normalize_divides_by_the_weights_and_not_by_the_scale():
    base = torch.zeros(2)
    parts = [
        Part("a", torch.tensor([4.0, 8.0]), 3.0, scale=0.5),
        Part("b", torch.tensor([8.0, 4.0]), 1.0),
    ]
    merged = merge_tensor(base, parts, normalize=True)
    assert merged.tolist() == [(6 + 8) / 4, (12 + 4) / 4]


def test_sign_election_by_sum_and_by_count():
    base = torch.zeros(1)
    parts = [Part(str(v), torch.tensor([v]), 1.0) for v in (1.0, 2.0, -9.0)]
    assert merge_tensor(base, parts, consensus="sum").tolist() == [-9]
    assert merge_tensor(base, parts, consensus="count").tolist() == [3]
    averaged = merge_tensor(base, parts, consensus="count", normalize=True)
    assert averaged.tolist() == [1.5]


def test_weights_that_cancel_are_refused_with_normalize():
    parts = [Part("a", DELTA + 1, 0.5), Part("b", DELTA + 2, -0.5)]
    with pytest.raises(ValueError, match=r"sum to zero.*\[0.5, -0.5\]"):
        merge_tensor(DELTA, parts, normalize=True)


@pytest.mark.parametrize(
    "part",
    [
        Part("m", DELTA, 0.0),
        Part("m", DELTA, 1.0, density=0.1),  # less than one entry of six
        Part("m", DELTA, 1.0, scale=0.0),
        Part("m", DELTA, 1.0, cut=kernel.KEEP_NONE),
    ],
)
def test_what_adds_nothing_leaves_the_signs_of_zeros(part):
    base = torch.tensor([[0.0, -0.0, 1.0], [-0.0, 2.0, 3.0]])
    merged = merge_tensor(base, [part])
    assert torch.equal(merged.view(torch.int32), base.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight", [0.2, 1.0])
def test_lone_undiluted_model_is_copied_bit_for_bit(dtype, weight):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(999, generator=generator).to(dtype)
    tuned = torch.randn(999, generator=generator).mul(1e-3).to(dtype)
    parts = [Part("m", tuned, weight), Part("n", base * 2, 0.0)]
    merged = merge_tensor(base, parts, normalize=weight != 1)
    assert merged.dtype == dtype
    assert torch.equal(merged, tuned)


def test_low_precision_inputs_are_merged_in_float32():
    base = torch.full((8,), 256.0, dtype=torch.bfloat16)
    tuned = torch.full((8,), 258.0, dtype=torch.bfloat16)
    parts = [Part(name, tuned, 0.25) for name in "abcd"]
    # Each share of 0.5 alone is lost in bfloat16 next to 256.
    assert merge_tensor(base, parts).tolist() == [258.0] * 8


def test_inputs_are_left_as_they_were():
    base, tuned = DELTA.clone(), DELTA * 2
    before = tuned.clone()
    parts = [Part("a", tuned, 0.5, density=0.5), Part("b", tuned, 0.3)]
    merge_tensor(base, parts, consensus="sum", normalize=True, strength=0.5)
    assert torch.equal(base, DELTA)
    assert torch.equal(tuned, before)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3, 4)])
def test_any_shape_is_merged(shape):
    base = torch.ones(shape)
    merged = merge_tensor(base, [Part("m", base + 1, 0.5, density=0.99)])
    assert merged.shape == shape


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.01, 0.2, 0.9])
def test_accelerator_finds_the_same_cut(density):
    delta = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    on_device = delta.to(torch.accelerator.current_accelerator())
    assert find_cut(on_device, density) == find_cut(delta, density)
