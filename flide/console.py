"""What the commands share: exit codes, the options that name a model, and output for any terminal."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
QUESTION_TYPES = ("noul", "choice", "score")  # as in flide.runtime.calibration, which imports torch


class OutputError(Exception):
    """Standard output cannot be written."""


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """The option that :func:`import_modules` reads."""
    text = "import this first, by name or as a .py file: model families and heads of your own; may be repeated"
    parser.add_argument("--import", metavar="MODULE", action="append", default=[], dest="imports", help=text)


def import_modules(names: Sequence[str]) -> None:
    """Import modules by their names, or from files: ``family.py`` as ``family``.

    Raises:
        ValueError: one cannot be found, or imported; a file's name is that of another module.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name))
            elif name.startswith(".") or not name:
                raise ImportError("no name of a module")
            else:
                importlib.import_module(name)
        except (ImportError, SyntaxError, OSError) as error:
            raise ValueError(f"--import: cannot import {name!r}: {error}") from error


def _import_file(path: Path) -> None:
    taken = sys.modules.get(path.stem)
    if taken is not None:
        if getattr(taken, "__file__", None) != str(path.resolve()):
            raise ImportError(f"there is another module called {path.stem}")
        return
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`open_engine` reads, and ``--import``."""
    add_import_option(parser)
    parser.add_argument("--model", help="model directory or Hub id (default: the tiny model in the package)")
    add_base_option(parser)
    add_escape_option(parser)
    add_checkpoint_options(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda[:N] (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument(
        "--compile", action="store_true", help="compile the model first: takes up to a minute, pays off for long files"
    )


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``EngineConfig`` for checkpoints."""
    text = "GiB on the model's device for checkpoints: states that begin like earlier ones resume (default: 0, none)"
    parser.add_argument("--checkpoint-gb", metavar="N", type=float, default=0.0, help=text)
    text = "GiB of the host's memory for those that have no place there (default: 0)"
    parser.add_argument("--checkpoint-host-gb", metavar="N", type=float, default=0.0, help=text)


def add_base_option(parser: argparse.ArgumentParser) -> None:
    """The option that names a base."""
    text = "directory of the model that an adapter, a head or an Open-Jev package builds upon, in place of its name"
    parser.add_argument("--base", metavar="DIR", help=text)


def add_escape_option(parser: argparse.ArgumentParser) -> None:
    """The option that keeps users' text text."""
    text = (
        "keep users' text that looks like a control token text, also for Open-Jev, whose own format does not; "
        "other formats always do"
    )
    parser.add_argument("--escape-control-tokens", action="store_true", help=text)


def add_temperature_options(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`given_temperatures` reads."""
    text = "divide logits by T, in place of what is stored beside the model"
    parser.add_argument("--temperature", metavar="T", type=float, help=text)
    for name in QUESTION_TYPES:
        parser.add_argument(
            f"--temperature-{name}", metavar="T", type=float, help=f"of {name}s, in place of --temperature"
        )


def given_temperatures(arguments: argparse.Namespace) -> dict[str, float]:
    """Question type -> temperature, of the types that the arguments give one."""
    given = {name: getattr(arguments, f"temperature_{name}") for name in QUESTION_TYPES}
    given = {name: arguments.temperature if value is None else value for name, value in given.items()}
    return {name: value for name, value in given.items() if value is not None}


def open_engine(arguments: argparse.Namespace, temperatures: dict[str, float] | None = None) -> Any:
    """The engine that the arguments ask for.

    Args:
        arguments: of a parser with :func:`add_model_options`.
        temperatures: in place of those stored beside the model.

    Raises:
        ValueError: as ``Engine.from_pretrained``.
    """
    from flide.runtime.config import EngineConfig
    from flide.runtime.engine import EMBEDDED_MODEL, Engine

    # One answer does not wait for a compiler, and a handful of graphs is no use to it.
    graphs: Any = "auto" if arguments.compile else "off"
    config = EngineConfig(
        device=arguments.device,
        dtype=arguments.dtype,
        compile=bool(arguments.compile),
        graphs=graphs,
        temperatures=temperatures,
        escape_control_tokens=arguments.escape_control_tokens,
        checkpoint_gb=arguments.checkpoint_gb,
        checkpoint_host_gb=arguments.checkpoint_host_gb,
    )
    if arguments.model is not None:
        return Engine.from_pretrained(arguments.model, config, base=arguments.base)
    if arguments.base is not None:
        raise ValueError("--base belongs to a --model that builds upon it")
    tell(f"answering with {EMBEDDED_MODEL}, a small model for trying things out; see --model")
    return Engine.default(config)


def write_json(value: Any, *, pretty: bool = False) -> None:
    """Print a JSON value, escaped where standard output is not UTF-8."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print_line(json.dumps(value, ensure_ascii=not is_utf8, indent=2 if pretty else None))


def print_line(line: str) -> None:
    """Print a line at once, with what the encoding lacks escaped.

    Raises:
        OutputError: standard output cannot be written.
    """
    encoding = sys.stdout.encoding or "ascii"
    try:
        sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except OSError as error:
        # Python must not try again, and complain, when it flushes at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error


def tell(message: str | Exception) -> None:
    """One line on standard error, whatever the message quotes."""
    text = " ".join(str(message).split()) or type(message).__name__
    with contextlib.suppress(OSError):
        print("flide:", printable(text), file=sys.stderr)


def printable(text: str) -> str:
    """The text with a ? for every character that could move a cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)
