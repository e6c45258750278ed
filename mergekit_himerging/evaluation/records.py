"""What an evaluation found, as it stands in its JSON file.

Invariant: a value carries its unit and whether more is better; values of one row stand
at the row's index, so that anyone can pair models sample by sample.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from mergekit_himerging.scores import Record

Metric = Literal[
    "loss",
    "accuracy",
    "exact_match",
    "rouge1",
    "rouge2",
    "rougeL",
    "bleu",
    "corpus_bleu",
]
"""Higher is better for all but ``loss``.

- ``loss``: nats per target token, the mean over samples of each sample's mean; lower
  is better.
- ``accuracy``: share of rows with choices whose right option alone is the likeliest
  per token.
- ``exact_match``: share of generated answers that equal the reference.
- ``rouge1``, ``rouge2``, ``rougeL``: mean F1 of generated answers, 0 to 100.
- ``bleu``: mean BLEU-4 of single answers, 0 to 100.
- ``corpus_bleu``: BLEU-4 of all answers together, 0 to 100; no value of one row.
"""

Role = Literal["base", "expert", "merge"]

UNITS: Mapping[Metric, str] = {
    "loss": "nats per token",
    "accuracy": "share",
    "exact_match": "share",
    **dict.fromkeys(("rouge1", "rouge2", "rougeL", "bleu", "corpus_bleu"), "points"),
}


def orientation(metric: Metric) -> float:
    """Return the factor that makes a metric's values higher-is-better: 1 or -1."""
    return -1.0 if metric == "loss" else 1.0


class Settings(Record):
    """How models are evaluated.

    Attributes:
        generates: answers to free questions are generated and compared.
        max_new_tokens: of a generated answer.
        max_length: most tokens of a sequence, beside each model's own bound.
        max_tokens: most cells of a batch, padding included.
        n_resamples: of every bootstrap.
        seed: of every bootstrap.
    """

    generates: bool = True
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    max_length: Annotated[int, Field(ge=2)] = 1 << 15
    max_tokens: Annotated[int, Field(ge=1)] = 8192
    n_resamples: Annotated[int, Field(ge=1)] = 2000
    seed: Annotated[int, Field(ge=0)] = 0


class Estimate(Record):
    """A value with its 95 % interval over samples.

    Attributes:
        value: over all samples.
        low, high: the interval's ends; None where the samples do not bound it, as with
            one sample.
        n: samples.
        unit: of all three values.
    """

    value: FiniteFloat
    low: FiniteFloat | None
    high: FiniteFloat | None
    n: int
    unit: str


class Measured(Record):
    """What one model did on one task; a value for each row, in the task's order.

    Attributes:
        loss: nats per target token; lower is better.
        accuracy: 1 or 0; None for rows without choices.
        answers: generated text; None for rows without a free answer.
        n_tokens, n_targets: tokens that were scored on, and scored ones, of all rows.
        n_truncated: rows that lost the beginning of their prompt, or a text its end.
        n_prompts_cut: prompts that were shortened to leave room for an answer.
        tokens_sha256: of the token ids that were scored on; models with another one saw
            another text, by their tokenizer, their chat template or their length.
    """

    loss: tuple[FiniteFloat, ...]
    accuracy: tuple[FiniteFloat | None, ...]
    answers: tuple[str | None, ...]
    n_tokens: int
    n_targets: int
    n_truncated: int
    n_prompts_cut: int
    tokens_sha256: str = ""


class Result(Record):
    """One model's scores on one task.

    Attributes:
        model, task: their names.
        estimates: by metric.
        samples: by metric, a value for each row; None where the metric does not apply.
        measured: tokens, truncations and answers.
    """

    model: str
    task: str
    estimates: dict[Metric, Estimate]
    samples: dict[Metric, tuple[FiniteFloat | None, ...]]
    measured: Measured


class Difference(Record):
    """Two models on the same samples.

    Attributes:
        model, other, task: their names.
        metric: what is compared.
        gain: above 0 where ``model`` is better, for every metric: ``model`` minus
            ``other``, for ``loss`` ``other`` minus ``model``.
        p_value: two-sided, of the paired bootstrap; None with one sample.
    """

    model: str
    other: str
    task: str
    metric: Metric
    gain: Estimate
    p_value: FiniteFloat | None


class Recovered(Record):
    """The share of an expert's gain over the base that a merge has.

    Attributes:
        model: the merge.
        expert: of the task.
        task: the task.
        metric: what is compared.
        share: 1 as good as the expert, 0 no better than the base; None where the expert
            does not beat the base.
    """

    model: str
    expert: str
    task: str
    metric: Metric
    share: Estimate | None


class ModelInfo(Record):
    """A model: its name, what it is, the task it was tuned for, its fingerprint."""

    name: str
    role: Role
    task: str | None
    fingerprint: str | None


class TaskInfo(Record):
    """A task: its name, its data, the hash of its rows in order, and their number."""

    name: str
    source: str
    sha256: str
    n_rows: int


class Evaluation(Record):
    """Models side by side on held-out data.

    Attributes:
        version: of this format; ``schema`` in the file.
        settings: how it was done.
        models: base, experts, merges, each by name.
        tasks: in the order given.
        results: one for each (model, task).
        differences: of every merge to the base, to the experts and to other merges.
        recovered: of every merge, for tasks with an expert and a base.
        forgetting: of every expert and merge to the base, on tasks that are not its
            own; a merge's own tasks are those of all experts.
        versions: of the packages that measured.
    """

    version: Literal[1] = Field(1, alias="schema")
    settings: Settings
    models: tuple[ModelInfo, ...]
    tasks: tuple[TaskInfo, ...]
    results: tuple[Result, ...]
    differences: tuple[Difference, ...]
    recovered: tuple[Recovered, ...]
    forgetting: tuple[Difference, ...]
    versions: dict[str, str]

    def to_json(self) -> str:
        """Write the evaluation as JSON text with a newline."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"
