"""Recipes, plans and data of chance until the time is over; faults end it with 1.

    python tests/benchmarks/fuzz.py --seconds 240 --seed 1

Every case must work or give one sentence, within 10 s and 1 GiB, and run nothing. A
fault is printed with its seed, by which `--case SEED` repeats it.
"""

import argparse
import collections
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from conftest import make_llama, save_model, tune
from hostile import (
    make_plan_text,
    make_recipe_text,
    make_rows,
    try_plan,
    try_recipe,
    try_rows,
)

SECONDS, KIBIBYTES = 10, 1 << 20
KINDS = ("recipe", "plan", "rows")


def make_zoo(folder: Path) -> Path:
    base = make_llama(seed=0)
    for seed, name in enumerate("ab", start=1):
        save_model(tune(base, seed=seed), folder / name)
    save_model(base, folder / "base")
    return folder


def run_case(seed: str, zoo: Path, folder: Path) -> bool:
    """Run one case; the seed begins with its kind."""
    chance, kind = random.Random(seed), seed.split("-")[0]
    if kind == "rows":
        suffix, data = make_rows(chance)
        path = folder / f"rows{suffix}"
        path.write_bytes(data)
        return try_rows(path)
    if kind == "plan":
        text, name, attempt = make_plan_text(chance), "plan.json", try_plan
    else:
        text, name, attempt = make_recipe_text(chance, zoo), "recipe.yml", try_recipe
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return attempt(path)


def overrun(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--case", help="repeat the case of this seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGALRM, overrun)
    counts: collections.Counter[tuple[str, bool]] = collections.Counter()
    faults: dict[str, str] = {}
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        zoo = make_zoo(folder / "zoo")
        (folder / "here").mkdir()
        os.chdir(folder / "here")
        if options.case:
            print(run_case(options.case, zoo, folder / "here"))
            return 0
        kinds = options.kind or KINDS
        for number in range(1 << 60):
            if time.monotonic() > end:
                break
            kind = kinds[number % len(kinds)]
            seed = f"{kind}-{options.seed}-{number}"
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            signal.alarm(SECONDS)
            try:
                counts[kind, run_case(seed, zoo, folder / "here")] += 1
                signal.alarm(0)
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
                if grown > KIBIBYTES:
                    raise MemoryError(f"{grown >> 10} MiB")
                strangers = {p.name for p in Path().iterdir()} - {
                    *("recipe.yml", "plan.json", "again.json"),
                    *(f"rows{s}" for s in (".jsonl", ".json", ".csv", ".parquet")),
                }
                if strangers:
                    raise PermissionError(f"wrote {sorted(strangers)}")
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{type(error).__name__} {last.filename}:{last.lineno}"
                if where not in faults:
                    faults[where] = seed
                    print(f"{seed}: {where}: {str(error)[:300]}", flush=True)
            finally:
                signal.alarm(0)
    for kind in kinds:
        good, bad = counts[kind, True], counts[kind, False]
        print(f"{kind:8} {good:8} worked {bad:8} refused")
    print(f"{len(faults)} kinds of faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
