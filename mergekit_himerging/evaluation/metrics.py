"""Generated answers against references: exact match, ROUGE and BLEU.

Invariant: text is split the same way for every model, by the references alone.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from mergekit_himerging.evaluation.intervals import FloatArray

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

KANA_OR_HANGUL = re.compile("[\u3041-\u3096\u30a1-\u30fa\u30fc\uac00-\ud7af]")
HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]")
CHINESE_MARKS = re.compile("[\u3000-\u303f\uff01-\uff60]")
WORDS = re.compile(f"{HAN.pattern}|{KANA_OR_HANGUL.pattern}|[a-z0-9]+")

ORDER = 4
"""Longest n-grams of BLEU."""

TextMetric = Literal["exact_match", "rouge1", "rouge2", "rougeL", "bleu"]


def check_packages() -> None:
    """Check that generated answers can be compared.

    Raises:
        ValueError: rouge-score or sacrebleu is not installed.
    """
    try:
        import rouge_score.rouge_scorer  # type: ignore[import-untyped]  # noqa: F401
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "generated answers must have rouge-score and sacrebleu to be compared, got "
            f"no '{error.name}'; run pip install 'mergekit-himerging[evaluate]', or "
            "leave generation out"
        ) from error


class Words:
    """Splits text for ROUGE: as rouge-score does, and every CJK character alone.

    Letters of other scripts are no words to rouge-score, and none here.
    """

    def tokenize(self, text: str) -> list[str]:
        """Return the words: runs of a-z and 0-9 in lower case, and CJK characters."""
        return WORDS.findall(unicodedata.normalize("NFKC", text).lower())


def matches_exactly(answer: str, reference: str) -> bool:
    """Compare in form NFKC, without case, outer punctuation and runs of white space."""
    return _bare(answer) == _bare(reference)


def score_answers(
    answers: Sequence[str], references: Sequence[str]
) -> tuple[Mapping[TextMetric, FloatArray], FloatArray]:
    """Score every answer.

    BLEU splits by character where a reference has kana or hangul (``char``), by Chinese
    character and word where one has Chinese characters or marks (``zh``), by word
    otherwise (``13a``).

    Args:
        answers: one or more.
        references: one for each.

    Returns:
        For each metric ``[answers]``: ``exact_match`` 0 or 1, the others 0 to 100; and
        for ``corpus_bleu``, ``[10, answers]``: n-grams that match and n-grams, each for
        n from 1 to 4, then the lengths of answer and reference.

    Raises:
        ValueError: rouge-score or sacrebleu is not installed.
    """
    check_packages()
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeL")
    rouge = RougeScorer(names, tokenizer=Words())
    bleu = _make_bleu(references)
    exact, rows, bleus, counts = [], [], [], []
    for answer, reference in zip(answers, references, strict=True):
        exact.append(float(matches_exactly(answer, reference)))
        found = rouge.score(reference, answer)
        rows.append([100 * found[name].fmeasure for name in names])
        sentence = bleu.sentence_score(answer, [reference])
        bleus.append(sentence.score)
        counts.append(
            [*sentence.counts, *sentence.totals, sentence.sys_len, sentence.ref_len]
        )
    rouges = np.array(rows, dtype=np.float64).T
    return {
        "exact_match": np.array(exact),
        "rouge1": rouges[0],
        "rouge2": rouges[1],
        "rougeL": rouges[2],
        "bleu": np.array(bleus, dtype=np.float64),
    }, np.array(counts, dtype=np.float64).T


def corpus_bleu(counts: FloatArray) -> FloatArray:
    """Compute BLEU-4 with exponential smoothing, as sacrebleu does, many at a time.

    Args:
        counts: ``[10, sets]``: sums over each set's answers of what ``score_answers``
            counts.

    Returns:
        ``[sets]``, 0 to 100.
    """
    matches, totals = counts[:ORDER], counts[ORDER : 2 * ORDER]
    scores = np.zeros(counts.shape[1])
    scored = (totals > 0).all(axis=0) & (matches > 0).any(axis=0)
    matches, totals = matches[:, scored], totals[:, scored]
    length, wanted = counts[2 * ORDER :, scored]
    # The first order without a match counts half a match, the next a quarter, ...
    smoothing = np.cumprod(np.where(matches == 0, 0.5, 1.0), axis=0)
    some = np.where(matches == 0, smoothing, matches)
    precision = np.exp(np.log(some / totals).mean(axis=0))
    brevity = np.minimum(1.0, np.exp(1 - wanted / length))
    scores[scored] = 100 * precision * brevity
    return scores


def _make_bleu(references: Sequence[str]) -> "BLEU":
    from sacrebleu.metrics.bleu import BLEU

    splitting = "13a"
    if any(map(KANA_OR_HANGUL.search, references)):
        splitting = "char"
    elif any(HAN.search(text) or CHINESE_MARKS.search(text) for text in references):
        splitting = "zh"
    return BLEU(tokenize=splitting, effective_order=True)


def _bare(text: str) -> str:
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    marks = {char for char in folded if unicodedata.category(char).startswith("P")}
    return folded.strip("".join(marks) + " ") or folded
