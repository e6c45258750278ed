"""Intervals, paired differences and text metrics against other implementations."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import sacrebleu
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from mergekit_himerging.evaluation.intervals import (
    bootstrap_mean,
    bootstrap_recovered,
    paired_difference,
    resample_means,
    wilson_interval,
)
from mergekit_himerging.evaluation.metrics import (
    corpus_bleu,
    matches_exactly,
    score_answers,
)

VALUES = np.random.default_rng(7).gamma(2.0, size=60)


def test_interval_of_a_mean_is_scipys_percentile_bootstrap():
    low, high = bootstrap_mean(VALUES, n_resamples=20_000, seed=0)
    theirs = scipy.stats.bootstrap(
        (VALUES,), np.mean, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.02)
    assert bootstrap_mean(VALUES, n_resamples=500, seed=3) == bootstrap_mean(
        VALUES, n_resamples=500, seed=3
    )


def test_one_sample_has_no_interval():
    one = np.array([1.0])
    assert bootstrap_mean(one, n_resamples=10, seed=0) is None
    assert paired_difference(2 * one, one, n_resamples=10, seed=0) == (1, None, None)
    found = bootstrap_recovered(2 * one, one, 3 * one, n_resamples=10, seed=0)
    assert found == (0.5, None)


def test_series_are_resampled_together_whatever_the_block(
    monkeypatch: pytest.MonkeyPatch,
):
    values = np.stack([VALUES, 2 * VALUES + 1])
    means = resample_means(values, n_resamples=50, seed=0)
    assert means.shape == (2, 50)
    assert means[1] == pytest.approx(2 * means[0] + 1)
    monkeypatch.setattr("mergekit_himerging.evaluation.intervals.CELLS", 130)
    assert np.array_equal(resample_means(values, n_resamples=50, seed=0), means)


@given(st.integers(1, 300), st.data())
@settings(max_examples=40, deadline=None)
def test_interval_of_a_share_is_wilsons(n_samples: int, data: st.DataObject):
    n_right = data.draw(st.integers(0, n_samples))
    theirs = scipy.stats.binomtest(n_right, n_samples).proportion_ci(method="wilson")
    ours = wilson_interval(n_right, n_samples)
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_paired_difference_is_that_of_the_samples():
    noise = np.random.default_rng(1).normal(size=60)
    ours = VALUES + 0.05 + 0.2 * noise
    mean, interval, p_value = paired_difference(
        ours, VALUES, n_resamples=20_000, seed=0
    )
    # Normal theory on the differences, which the samples' own spread would drown.
    differences = 0.05 + 0.2 * noise
    error = differences.std(ddof=1) / math.sqrt(60)
    assert mean == pytest.approx(differences.mean())
    assert interval == pytest.approx(
        (mean - 1.96 * error, mean + 1.96 * error), abs=0.2 * error
    )
    assert p_value == pytest.approx(2 * scipy.stats.norm.sf(mean / error), rel=0.3)
    swapped = paired_difference(VALUES, ours, n_resamples=20_000, seed=0)
    assert swapped[0] == -mean
    assert swapped[1] == pytest.approx((-interval[1], -interval[0]))
    assert swapped[2] == p_value


def test_equal_models_do_not_differ():
    found = paired_difference(VALUES, VALUES, n_resamples=99, seed=0)
    assert found == (0.0, (0.0, 0.0), 1.0)


def test_recovered_gain_is_bounded_by_draws_where_the_expert_wins():
    base, single = VALUES, VALUES + 1.0
    # A half of every sample's gain: every draw says the same.
    share, interval = bootstrap_recovered(
        base + 0.5, base, single, n_resamples=200, seed=0
    )
    assert share == pytest.approx(0.5)
    assert interval == pytest.approx((0.5, 0.5))
    # No gain at all, and one that half of the draws do not have.
    assert bootstrap_recovered(base, base, base, n_resamples=200, seed=0) is None
    doubtful = base + np.where(np.arange(60) % 2 == 0, 1.0, -0.999)
    share, interval = bootstrap_recovered(base, base, doubtful, n_resamples=200, seed=0)
    assert (share, interval) == (0.0, None)


@pytest.mark.parametrize(
    ("answer", "reference", "is_match"),
    [
        (" The Sky. ", "the sky", True),
        ("Ｂ", "b", True),
        ("“天空”。", "天空", True),
        ("a  b", "a b", True),
        ("a-b", "ab", False),
        ("?", "?", True),
        ("?", "!", False),
        ("", "?", False),
        ("-5", "5", True),  # a sign is punctuation
    ],
)
def test_exact_match_ignores_case_width_and_outer_marks(
    answer: str, reference: str, is_match: bool
):
    assert matches_exactly(answer, reference) is is_match


ANSWERS = ("the cat sat", "the cat sat on a mat", "", "Dogs, run far away today!")
REFERENCES = (
    "the cat ran",
    "the cat sat on the mat",
    "a b",
    "dogs run far away today",
)


def test_rouge_of_words_is_rouge_scores():
    scores, _ = score_answers(ANSWERS, REFERENCES)
    theirs = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for name in ("rouge1", "rouge2", "rougeL"):
        expected = [
            100 * theirs.score(reference, answer)[name].fmeasure
            for answer, reference in zip(ANSWERS, REFERENCES, strict=True)
        ]
        assert scores[name].tolist() == pytest.approx(expected)


def test_rouge_of_chinese_counts_characters():
    scores, _ = score_answers(["我爱GPU北京", "五"], ["我爱北京", "六"])
    # 我 爱 gpu 北 京 and 我 爱 北 京 share 4 of 5 and 4 words, 2 of 4 and 3 pairs.
    assert scores["rouge1"].tolist() == pytest.approx([100 * 8 / 9, 0])
    assert scores["rouge2"].tolist() == pytest.approx([100 * 4 / 7, 0])
    assert scores["rougeL"].tolist() == pytest.approx([100 * 8 / 9, 0])


@pytest.mark.parametrize(
    ("answers", "references", "splitting"),
    [
        (ANSWERS, REFERENCES, "13a"),
        (["a b", ""], ["c d e f", "g"], "13a"),
        (["the cat", "a dog"], ["the cat sat here", "a dog ran there"], "13a"),
        (["我爱北京GPU", "你好"], ["我爱北京的GPU", "你们好"], "zh"),
        (["11、65、72", "9、8"], ["11、65、72", "9、7"], "zh"),
        (["わたしは猫", "犬"], ["わたしは犬", "猫です"], "char"),
    ],
)
def test_bleu_is_sacrebleus(
    answers: Sequence[str], references: Sequence[str], splitting: str
):
    scores, counts = score_answers(answers, references)
    whole = sacrebleu.corpus_bleu(answers, [references], tokenize=splitting, force=True)
    assert corpus_bleu(counts.sum(axis=1, keepdims=True)).tolist() == pytest.approx(
        [whole.score]
    )
    each = [
        sacrebleu.sentence_bleu(answer, [reference], tokenize=splitting).score
        for answer, reference in zip(answers, references, strict=True)
    ]
    assert scores["bleu"].tolist() == pytest.approx(each)
