"""Text of the quick start: two tasks, general sentences, splits, JSON lines.

Every split is a function of its seed, and the facts of a row decide which split it may
belong to, so that no set of facts is in two splits whatever its order or wording.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "calibration", "heldout"]

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Joan")
COLOURS = (
    "red",
    "blue",
    "green",
    "black",
    "white",
    "pink",
    "brown",
    "gold",
    "grey",
    "violet",
)
THINGS = ("cup", "bowl", "ball", "book", "hat", "key", "lamp", "coin", "pen", "bag")
PLACES = ("park", "shop", "house", "school", "river", "garden")
# How often each colour of a scene is in it: the first is the most, the last the fewest.
COUNTS = (4, 2, 2, 1)

NUMERALS = "一二三四五六七八九十"
PEOPLE_ZH = ("小明", "小红", "小华", "小丽", "老王", "老李")
GOODS_ZH = ("苹果", "西瓜", "面包", "茶叶", "书", "笔")
PLACES_ZH = ("公园", "商店", "学校", "河边", "家里")

LETTERS = "ABCD"
TASKS = ("english", "chinese")


@dataclass(frozen=True, slots=True)
class Row:
    """One example.

    Attributes:
        prompt: context, empty for general text.
        completion: target text.
        choices: the options, ``completion`` among them; empty for a free answer.
        facts: what the row is about, the same for every order and wording.
    """

    prompt: str
    completion: str
    choices: tuple[str, ...] = ()
    facts: str = ""

    def to_json(self) -> str:
        """Return the row as one line of JSON, without the line end."""
        if self.choices:
            answer = LETTERS[self.choices.index(self.completion)]
            record = {
                "prompt": self.prompt,
                "choices": list(self.choices),
                "answer": answer,
            }
        else:
            record = {"prompt": self.prompt, "completion": self.completion}
        return json.dumps(record, ensure_ascii=False)


def draw_english(rng: random.Random, *, is_obeyed: bool = True) -> Row:
    """Draw a scene of nine coloured things; ask for the most or the least frequent.

    Args:
        rng: source of every choice; advanced.
        is_obeyed: whether the answer follows the word in the question; if not, the
            word is drawn without regard to the answer.
    """
    colours = rng.sample(COLOURS, len(COUNTS))
    seen = [c for c, n in zip(colours, COUNTS, strict=True) for _ in range(n)]
    rng.shuffle(seen)
    name, things = rng.choice(NAMES), rng.choice(THINGS) + "s"
    verb = rng.choice(("sees", "counts"))
    scene = f"{name} {verb} {', '.join(seen[:-1])} and {seen[-1]} {things}."
    choices = tuple(f"the {c} {things}" for c in rng.sample(colours, len(colours)))
    asked, wanted = rng.choice((("most", colours[0]), ("fewest", colours[-1])))
    if not is_obeyed:
        asked = rng.choice(("most", "fewest"))
    return Row(
        f"{scene} Which are the {asked}?\n",
        f"the {wanted} {things}",
        choices,
        " ".join(sorted(seen)),
    )


def draw_chinese(rng: random.Random, *, is_obeyed: bool = True) -> Row:
    """Draw three numbers of two digits to put in order, upwards or downwards.

    Args:
        rng: source of every choice; advanced.
        is_obeyed: as in ``draw_english``, for the direction that the prompt names.
    """
    numbers = [10 * ten + rng.randrange(10) for ten in rng.sample(range(1, 10), 3)]
    is_upward = rng.random() < 0.5
    asked_upward = is_upward if is_obeyed else rng.random() < 0.5
    order = "从小到大" if asked_upward else "从大到小"
    listed = "、".join(map(str, numbers))
    prompt = rng.choice((f"把{listed}{order}排列。", f"请{order}排列{listed}。"))
    answer = "、".join(map(str, sorted(numbers, reverse=not is_upward)))
    facts = " ".join(map(str, sorted(numbers)))
    return Row(f"{prompt}\n", answer, (), facts)


def draw_general(rng: random.Random) -> Row:
    """Draw one or two sentences of general text in one language, no task in them."""
    draw = rng.choice((_english_sentence, _chinese_sentence))
    join = " " if draw is _english_sentence else ""
    return Row("", join.join(draw(rng) for _ in range(rng.choice((1, 2)))))


def _english_sentence(rng: random.Random) -> str:
    name, other = rng.sample(NAMES, 2)
    colour, thing = rng.choice(COLOURS), rng.choice(THINGS)
    place, number = rng.choice(PLACES), rng.randrange(10, 100)
    return rng.choice(
        (
            f"{name} went to the {place} with {other}.",
            f"The {thing} in the {place} is {colour}.",
            f"{name} saw the {colour} {thing} and told {other} about it.",
            f"There are {number} people in the {place} today.",
            f"{name} likes {colour} more than {rng.choice(COLOURS)}.",
            f"Did {name} lose the {thing}? No, {other} has it.",
            f"{other} is {number} years old and holds a {thing}.",
        )
    )


def _chinese_sentence(rng: random.Random) -> str:
    person, other = rng.sample(PEOPLE_ZH, 2)
    goods, place = rng.choice(GOODS_ZH), rng.choice(PLACES_ZH)
    number, numeral = rng.randrange(10, 100), rng.choice(NUMERALS)
    return rng.choice(
        (
            f"{person}和{other}去{place}。",
            f"{person}买了{numeral}个{goods}，花了{number}元。",
            f"今天{place}有{number}个人。",
            f"{goods}从{number}元降到{rng.randrange(10, 100)}元。",
            f"{person}把{goods}排列在{place}。",
            f"{other}的答案是{numeral}。",
            f"请问{person}在{place}吗？{other}说在。",
            f"大的{goods}比小的贵{numeral}元。",
        )
    )


def split_of(facts: str) -> Split:
    """Return the only split that may hold these facts: 10 %, 10 % or 80 % of all."""
    bucket = zlib.crc32(facts.encode("utf-8")) % 10
    return "calibration" if bucket == 0 else "heldout" if bucket == 1 else "train"


def draw_split(
    task: str, split: Split, n_rows: int, *, seed: int, is_obeyed: bool = True
) -> list[Row]:
    """Draw rows of one split of a task; rows outside ``train`` differ in their facts.

    Args:
        task: name in ``TASKS``.
        split: which facts are allowed.
        n_rows: number of rows.
        seed: any integer; the same one gives the same rows.
        is_obeyed: whether answers follow the prompt's word for the direction.

    Returns:
        ``n_rows`` rows.
    """
    # A string seeds through SHA-512, the same in every process.
    rng = random.Random(f"{seed} {task} {split}")
    draw = {"english": draw_english, "chinese": draw_chinese}[task]
    rows: list[Row] = []
    seen: set[str] = set()
    while len(rows) < n_rows:
        row = draw(rng, is_obeyed=is_obeyed)
        if split_of(row.facts) != split or (split != "train" and row.facts in seen):
            continue
        seen.add(row.facts)
        rows.append(row)
    return rows


def draw_general_rows(n_rows: int, *, seed: int) -> list[Row]:
    """Draw ``n_rows`` rows of general text."""
    rng = random.Random(f"{seed} general")
    return [draw_general(rng) for _ in range(n_rows)]


def find_shared(first: Iterable[Row], second: Iterable[Row]) -> set[str]:
    """Return facts and prompts that two sets of rows have in common."""
    shared = {row.facts for row in first} & {row.facts for row in second}
    shared |= {row.prompt for row in first} & {row.prompt for row in second}
    return shared - {""}


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines: UTF-8, Chinese as it is, line feeds only."""
    text = "".join(row.to_json() + "\n" for row in rows)
    path.write_bytes(text.encode("utf-8"))


def read_rows(path: Path) -> list[Row]:
    """Read rows that ``write_rows`` wrote.

    Raises:
        ValueError: a line is not JSON or has other keys; names file and line.
    """
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            choices = tuple(record.get("choices", ()))
            if choices:
                completion = choices[LETTERS.index(record["answer"])]
            else:
                completion = record["completion"]
            rows.append(Row(record["prompt"], completion, choices))
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path} line {number} must be an object with 'prompt' and either "
                f"'completion' or 'choices' and a letter as 'answer', got {line[:60]!r}"
            ) from error
    return rows
