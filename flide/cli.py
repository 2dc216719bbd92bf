"""The command line: ``flide decide`` and ``flide info``. Exit codes: 0 fine, 1 failed, 2 bad input, 130 interrupted."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from flide.errors import RequestError
from flide.version import __version__

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
JSONL_SUFFIXES = {".jsonl", ".ndjson"}
LINES_AT_ONCE = 64


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.ERROR, stream=sys.stderr)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head`); Python must not complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (ValueError, OSError) as error:
        print(f"flide: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except RuntimeError as error:  # out of memory, logits that are not finite
        print(f"flide: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flide", description="Typed questions about a state, answered exactly.")
    parser.add_argument("--version", action="version", version=f"flide {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    decide = commands.add_parser("decide", help="answer a System One body, or one per line of a JSONL file")
    decide.add_argument("file", metavar="FILE", help="JSON or JSONL file; - reads standard input")
    decide.add_argument("--model", help="model directory or Hub id (default: the tiny model in the package)")
    decide.add_argument("--device", default="auto", help="auto, cpu or cuda[:N] (default: auto)")
    decide.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    decide.add_argument("--jsonl", action="store_true", help="one body per line, whatever the file is called")
    decide.add_argument("--pretty", action="store_true", help="indent the answers")
    decide.set_defaults(run=_decide)

    info = commands.add_parser("info", help="family, sizes, labels and memory of a model")
    info.add_argument("model", metavar="MODEL", help="model directory or Hub id")
    info.add_argument("--json", action="store_true", help="as one JSON object")
    info.set_defaults(run=_info)
    return parser


def _decide(arguments: argparse.Namespace) -> int:
    from flide.runtime.wire import parse_body, parse_json

    data = sys.stdin.buffer.read() if arguments.file == "-" else Path(arguments.file).read_bytes()
    if arguments.jsonl or Path(arguments.file).suffix in JSONL_SUFFIXES or _is_jsonl(data):
        return _decide_lines(arguments, data.split(b"\n"))
    request = parse_body(parse_json(data))
    with _engine(arguments) as engine:
        (decision,) = engine.decide([request])
    _write(decision.to_dict(), pretty=arguments.pretty)
    return 0


def _decide_lines(arguments: argparse.Namespace, lines: list[bytes]) -> int:
    from tqdm import tqdm

    from flide.runtime.wire import parse_json

    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    all_good = True
    with (
        _engine(arguments) as engine,
        tqdm(total=len(numbered), unit="request", disable=not sys.stderr.isatty(), file=sys.stderr) as progress,
    ):
        for start in range(0, len(numbered), LINES_AT_ONCE):
            outcomes: list[Any] = []
            bodies = []
            for number, line in numbered[start : start + LINES_AT_ONCE]:
                try:
                    bodies.append(parse_json(line))
                    outcomes.append((number, None))
                except RequestError as error:
                    outcomes.append((number, error))
            results = iter(engine.decide(bodies, return_exceptions=True))
            for number, refused in outcomes:
                result = refused if refused is not None else next(results)
                if isinstance(result, Exception):
                    all_good = False
                    _write({"error": _describe(result), "line": number}, pretty=arguments.pretty)
                else:
                    _write(result.to_dict(), pretty=arguments.pretty)
                progress.update()
    return 0 if all_good else BAD_INPUT


def _is_jsonl(data: bytes) -> bool:
    """Whether text that is not one JSON value has a line that is an object of its own."""
    from flide.runtime.wire import parse_json

    def parses(text: bytes) -> Any:
        try:
            return parse_json(text)
        except RequestError:
            return None

    lines = [line for line in data.split(b"\n") if line.strip()]
    if len(lines) < 2 or parses(data) is not None:
        return False
    return any(line.lstrip().startswith(b"{") and isinstance(parses(line), dict) for line in lines)


def _engine(arguments: argparse.Namespace) -> Any:
    from flide.runtime.config import EngineConfig
    from flide.runtime.engine import EMBEDDED_MODEL, Engine

    config = EngineConfig(device=arguments.device, dtype=arguments.dtype)
    if arguments.model is not None:
        return Engine.from_pretrained(arguments.model, config)
    print(f"flide: {EMBEDDED_MODEL} is a random model: its answers mean nothing; see --model", file=sys.stderr)
    return Engine.default(config)


def _info(arguments: argparse.Namespace) -> int:
    from flide.models.summary import summarize

    summary = summarize(arguments.model)
    if arguments.json:
        _write(summary, pretty=False)
        return 0
    width = max(map(len, summary))
    for name, value in summary.items():
        print(f"{name.replace('_', ' '):<{width}}  {value}")
    return 0


def _write(value: Any, *, pretty: bool) -> None:
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not is_utf8, indent=2 if pretty else None), flush=True)


def _describe(error: Exception) -> Any:
    return error.errors if isinstance(error, RequestError) else str(error)
