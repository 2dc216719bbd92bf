"""Make the embedded demo model from nothing: rows, tokenizer, training, calibration, judgement, model card.

python -m scripts.train_demo OUT                 # for one H200; training.jsonl tells the speed
python -m scripts.train_demo OUT --smoke         # every step at a tiny size, about a minute on a CPU

OUT gets model/ (what is shipped, saved every 500 steps), val.jsonl and test.jsonl (labelled rows for flide calibrate
and flide eval), results.json, reliability.png and training.jsonl. Rows are made and encoded by other processes while
the model is trained; those import this module, which is why it loads torch late.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from scripts.demo.config import DemoConfig
from scripts.demo.data import make_rows, write_rows
from scripts.demo.parallel import Workers
from scripts.demo.samples import make_samples
from scripts.demo.tokenizer import prompt_texts, write_demo_tokenizer

MOST_JUDGED = 500  # validation rows, while the model is trained
SMOKE: dict[str, Any] = {
    "tokenizer_rows": 1500,
    "baseline_rows": 400,
    "val_rows": 60,
    "test_rows": 60,
    "steps": 12,
    "batch_questions": 32,
    "warmup": 4,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="every step at a tiny size, in one process")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--processes", type=int, help="that make rows; default: one fewer than there are cores")
    for field in fields(DemoConfig):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=f"default: {field.default}")
    arguments = parser.parse_args()
    given = {f.name: getattr(arguments, f.name) for f in fields(DemoConfig) if getattr(arguments, f.name) is not None}
    config = replace(DemoConfig(), **{**(SMOKE if arguments.smoke else {}), **given})
    processes = 0 if arguments.smoke and arguments.processes is None else arguments.processes
    with Workers(processes) as workers:
        make(arguments.out, config, arguments.device, workers)


def make(out: Path, config: DemoConfig, device: str | None, workers: Workers) -> dict[str, Any]:
    """All steps; returns what results.json holds."""
    started = time.monotonic()
    directory = out / "model"
    directory.mkdir(parents=True, exist_ok=True)
    texts = workers.stretches(prompt_texts, "train", config.tokenizer_rows)
    judged_by = {
        split: workers.stretches(make_rows, split, getattr(config, f"{split}_rows")) for split in ("val", "test")
    }
    write_demo_tokenizer(directory, itertools.chain.from_iterable(texts))
    encode = functools.partial(make_samples, tokenizer=directory)
    held_out = workers.stretches(encode, "val", min(config.val_rows, MOST_JUDGED))
    samples = workers.stretches(functools.partial(encode, dropped_words=config.dropped_words), "train")
    for split, parts in judged_by.items():
        write_rows(out / f"{split}.jsonl", itertools.chain.from_iterable(parts))

    import torch  # while the first rows are encoded

    from scripts.demo import making

    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return making.make(out, config, found, making.Prepared(started, samples, held_out), workers)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
