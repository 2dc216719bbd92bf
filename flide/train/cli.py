"""``flide train``, ``merge`` and ``convert``. Imported for its options alone; the rest comes when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flide.console import BAD_INPUT, INTERRUPTED, add_base_option, add_import_option, print_line, tell, write_json
from flide.errors import FlideError

# Option -> type. Defaults are TrainConfig's, so that a resumed run can tell what was asked for.
_OPTIONS: dict[str, tuple[Any, str]] = {
    "lora_rank": (int, "rank of the adapters; 0 trains the head alone (default: 8)"),
    "lora_alpha": (float, "scale of the adapters times their rank (default: twice the rank)"),
    "epochs": (int, "passes over the rows (default: 1)"),
    "lr": (float, "highest learning rate of the adapters (default: 1e-4)"),
    "head_lr": (float, "highest learning rate of the head (default: 2e-4)"),
    "warmup": (float, "share of the steps in which the rates rise (default: 0.03)"),
    "batch_tokens": (int, "tokens of one step, at most (default: 8192)"),
    "seed": (int, "of the adapters' first values and the order of the rows (default: 0)"),
    "save_every": (int, "steps from one checkpoint to the next (default: 200)"),
    "dtype": (str, "of the base: auto, float32 or bfloat16 (default: auto)"),
}


def add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line's subparsers."""
    parser = commands.add_parser(
        "train",
        help="fine-tune LoRA adapters and a decision head on labelled rows",
        description="Trains on a JSONL file of System One bodies with 'targets' (see eval), hard or soft. The "
        "questions of a row share their state in one pass. If any line is bad, all bad lines are listed and nothing "
        "is written. Ctrl-C stops after the step that is being done; --resume goes on, bit for bit. Needs accelerate, "
        "which flide-torch[train] brings.",
    )
    add_import_option(parser)
    parser.add_argument("--model", metavar="DIR", required=True, help="model directory or Hub id to start from")
    parser.add_argument("--data", metavar="FILE", required=True, help="JSONL file of labelled rows")
    parser.add_argument("--out", metavar="DIR", required=True, help="directory for the fine-tuned model")
    parser.add_argument("--val", metavar="FILE", help="labelled rows to evaluate on after every epoch")
    parser.add_argument(
        "--head", help="option (the letters), scalar or open-jev (per candidate) or linear (default: option)"
    )
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="N" if kind is int else "X", type=kind, help=text)
    parser.add_argument("--lora-targets", metavar="NAMES", help="layers with adapters: q_proj,v_proj (default: all)")
    parser.add_argument("--device", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.set_defaults(run=_train)


def add_merge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line's subparsers."""
    parser = commands.add_parser(
        "merge",
        help="fold a fine-tuned model's adapters into a plain checkpoint",
        description="Writes a checkpoint in transformers' format that needs neither base nor adapter, with the head, "
        "the tokenizer and the temperatures beside it.",
    )
    add_import_option(parser)
    parser.add_argument("--model", metavar="DIR", required=True, help="fine-tuned model directory or Hub id")
    add_base_option(parser)
    parser.add_argument("--out", metavar="DIR", required=True, help="directory for the checkpoint")
    parser.add_argument("--dtype", default="auto", help="auto (the base's), float32, bfloat16 or float16")
    parser.set_defaults(run=_merge)


def add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line's subparsers."""
    parser = commands.add_parser(
        "convert",
        help="make a plain checkpoint of a model that others packaged",
        description="Writes a checkpoint in transformers' format that serves directly: base and adapter as one, with "
        "the head, the tokenizer and the temperature beside it. 'open-jev' reads an Open-Jev package, and what "
        "vllm-jev exported of one.",
    )
    add_import_option(parser)
    parser.add_argument("format", choices=["open-jev"], metavar="FORMAT", help="open-jev")
    parser.add_argument("model", metavar="PACKAGE", help="directory or Hub id")
    parser.add_argument("out", metavar="OUT", help="directory for the checkpoint")
    add_base_option(parser)
    parser.add_argument("--dtype", default="auto", help="auto (the base's), float32, bfloat16 or float16")
    parser.set_defaults(run=_convert)


def _train(arguments: argparse.Namespace) -> int:
    from flide.train.config import TrainConfig
    from flide.train.run import BadRows, check_accelerate, train
    from flide.train.state import TrainingState

    check_accelerate()
    given = {name: getattr(arguments, name) for name in ("head", "device", *_OPTIONS)}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.lora_targets is not None:
        given["lora_targets"] = tuple(name.strip() for name in arguments.lora_targets.split(",") if name.strip())
    # What is not said when a run is resumed stays as it was.
    before = TrainingState.load(Path(arguments.out)).config if arguments.resume else {}
    config = TrainConfig.from_dict({**before, **given})
    try:
        result = train(
            arguments.model, arguments.data, arguments.out, config, val=arguments.val, resume=arguments.resume
        )
    except BadRows as error:
        for name, problem in error.errors:
            tell(f"{name}: {problem}")
        tell(f"{len(error.errors)} bad row{'' if len(error.errors) == 1 else 's'}: nothing was written")
        return BAD_INPUT
    except KeyboardInterrupt:
        if (Path(arguments.out) / "training_state.pt").is_file():
            tell("stopped; the same command with --resume goes on")
        return INTERRUPTED
    except OSError as error:  # of what it writes: the input was read before
        raise RuntimeError(f"cannot write to {arguments.out!r}: {error.strerror or error}") from error
    summary = {"directory": str(result.directory), "steps": result.steps, "validation": result.validation}
    write_json(summary)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from flide.models.directory import ModelDirectory

    # Not of the command's business: what Flide itself trained.
    if ModelDirectory.open(arguments.model, base=arguments.base).package is None:
        raise FlideError(f"{arguments.model} is no Open-Jev package (package/checkpoint/model.json)")
    return _merge(arguments)


def _merge(arguments: argparse.Namespace) -> int:
    from flide.runtime.config import EngineConfig
    from flide.train.merged import merge

    dtype = EngineConfig(dtype=arguments.dtype).resolve_dtype()
    try:
        merged = merge(arguments.model, arguments.out, base=arguments.base, dtype=dtype)
    except OSError as error:
        raise RuntimeError(f"cannot write to {arguments.out!r}: {error.strerror or error}") from error
    print_line(str(merged))
    return 0
