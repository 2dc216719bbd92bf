"""The command line: ``flide decide``, ``eval``, ``calibrate``, ``train``, ``merge``, ``convert`` and ``info``.

Exit codes: 0 fine, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import codecs
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from flide.console import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    OutputError,
    add_base_option,
    add_import_option,
    add_model_options,
    add_temperature_options,
    given_temperatures,
    import_modules,
    open_engine,
    print_line,
    tell,
    write_json,
)
from flide.errors import RequestError
from flide.version import __version__

JSONL_SUFFIXES = {".jsonl", ".ndjson"}
LINES_AT_ONCE = 64


def run() -> NoReturn:
    """:func:`main` as a process. Ctrl-C ends it when the round that runs is done, a second one at once."""
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            os._exit(INTERRUPTED)
        interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    code = main()
    if interrupted:
        os._exit(code)  # an interpreter that ends around a thread inside torch would abort
    sys.exit(code)


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code.
    """
    if sys.stderr is None:  # closed: print() would take standard output in its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    arguments = _parser().parse_args(argv)
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.ERROR, stream=sys.stderr)
    try:
        if sys.stdout is None:
            raise OutputError("standard output is closed")
        import_modules(arguments.imports)
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutputError as error:
        if not isinstance(error.__cause__, BrokenPipeError):  # the reader left (`| head`)
            tell(error)
        return FAILED
    except (ValueError, OSError) as error:
        tell(error)
        return BAD_INPUT
    except (RuntimeError, MemoryError) as error:
        tell(error)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    from flide.evaluation.cli import add_calibrate, add_eval
    from flide.serve.cli import add_parser as add_serve
    from flide.train.cli import add_convert, add_merge, add_train

    parser = argparse.ArgumentParser(prog="flide", description="Typed questions about a state, answered exactly.")
    parser.add_argument("--version", action="version", version=f"flide {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    decide = commands.add_parser("decide", help="answer a System One body, or one per line of a JSONL file")
    decide.add_argument("file", metavar="FILE", help="JSON or JSONL file; - reads standard input")
    add_model_options(decide)
    add_temperature_options(decide)
    decide.add_argument("--jsonl", action="store_true", help="one body per line, whatever the file is called")
    decide.add_argument("--pretty", action="store_true", help="indent the answers")
    decide.set_defaults(run=_decide)

    add_eval(commands)
    add_calibrate(commands)
    add_train(commands)
    add_merge(commands)
    add_convert(commands)
    add_serve(commands)

    info = commands.add_parser("info", help="family, sizes, labels and memory of a model")
    add_import_option(info)
    info.add_argument("model", metavar="MODEL", help="model directory or Hub id")
    add_base_option(info)
    info.add_argument("--json", action="store_true", help="as one JSON object")
    info.set_defaults(run=_info)
    return parser


def _decide(arguments: argparse.Namespace) -> int:
    from flide.runtime.wire import parse_body

    data = _read(arguments.file)
    if arguments.jsonl or Path(arguments.file).suffix.lower() in JSONL_SUFFIXES or _is_jsonl(data):
        return _decide_lines(arguments, data.split(b"\n"))
    request = parse_body(_parse_file(data))
    with open_engine(arguments, given_temperatures(arguments)) as engine:
        (result,) = engine.decide([request], return_exceptions=True)
    if isinstance(result, Exception):
        raise RequestError(result.errors) if isinstance(result, RequestError) else result  # there is only one request
    write_json(result.to_dict(), pretty=arguments.pretty)
    return 0


def _decide_lines(arguments: argparse.Namespace, lines: list[bytes]) -> int:
    from tqdm import tqdm

    from flide.runtime.strict_json import parse_json

    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    codes = {0}
    # Where the answers are shown they are the progress.
    silent = not sys.stderr.isatty() or sys.stdout.isatty()
    with (
        open_engine(arguments, given_temperatures(arguments)) as engine,
        tqdm(total=len(numbered), unit="request", disable=silent, file=sys.stderr) as progress,
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
                    codes.add(BAD_INPUT if isinstance(result, RequestError) else FAILED)
                    write_json({"error": _describe(result), "line": number}, pretty=arguments.pretty)
                else:
                    write_json(result.to_dict(), pretty=arguments.pretty)
                progress.update()
    return FAILED if FAILED in codes else max(codes)


def _read(name: str) -> bytes:
    """The bytes of a file or of standard input, without a byte order mark."""
    if name == "-" and sys.stdin is None:
        raise ValueError("standard input is closed")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {name!r}: {error.strerror or error}") from error
    return data.removeprefix(codecs.BOM_UTF8)


def _parse_file(data: bytes) -> Any:
    """One JSON value; places in the text are told as an editor shows them."""
    from flide.runtime.strict_json import parse_json

    try:
        return parse_json(data)
    except RequestError as error:
        (entry,) = error.errors
        if entry["loc"] == ["body"]:
            raise
        before = data.decode(errors="replace")[: entry["loc"][1]]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    raise ValueError(f"line {line}, column {column}: {entry['msg']}")


def _is_jsonl(data: bytes) -> bool:
    """Whether text that is not one JSON value looks like one object per line, some of which may be bad."""
    from flide.runtime.strict_json import parse_json

    lines = [line.strip() for line in data.split(b"\n") if line.strip()]
    objects = sum(line.startswith(b"{") and line.endswith(b"}") for line in lines)
    if len(lines) < 2 or 2 * objects < len(lines):
        return False
    try:
        parse_json(data)
    except RequestError:
        return True
    return False


def _info(arguments: argparse.Namespace) -> int:
    from flide.models.summary import summarize

    summary = summarize(arguments.model, base=arguments.base)
    if arguments.json:
        write_json(summary, pretty=False)
        return 0
    width = max(map(len, summary))
    for name, value in summary.items():
        print_line(f"{name.replace('_', ' '):<{width}}  {value}")
    return 0


def _describe(error: Exception) -> Any:
    return error.errors if isinstance(error, RequestError) else str(error) or type(error).__name__
