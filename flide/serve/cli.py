"""``flide serve``."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from typing import Any

from flide.console import add_temperature_options, given_temperatures, tell
from flide.errors import FlideError

BACKLOG = 2048  # connections that wait to be accepted
SWITCH_SECONDS = 5e-4  # a thread may keep the interpreter while another one, the engine's above all, waits for it
NEEDED = ("starlette", "uvicorn", "zstandard", "prometheus_client")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP",
        description="Serves System One at /v1/systemone. The port opens when the model is ready.",
    )
    parser.add_argument("--model", help="model directory or Hub id (default: the model in the package)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda[:N] (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--root-path", default="", help="prefix under which a proxy shows the server")
    parser.add_argument("--api-key", help="the key that requests have to bring")
    parser.add_argument("--api-key-file", metavar="FILE", help="lines of name:key")
    parser.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    parser.add_argument("--served-model-name", metavar="NAME", help="name in answers (default: the model's)")
    parser.add_argument("--alias", metavar="NAME", action="append", default=[], help="another name; may be repeated")
    for name, text in (
        ("max-queue", "requests that may wait"),
        ("max-queue-ms", "milliseconds a request may wait"),
        ("request-timeout", "seconds from a request's body to its answer"),
        ("max-body-bytes", "of a body, packed and unpacked"),
        ("max-questions", "of one request"),
        ("max-prompt-tokens", "of a question with its state"),
        ("max-request-tokens", "of a state with all its questions (default: what there is memory for)"),
        ("max-requests-per-key", "that may wait or run"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=float if name == "request-timeout" else int, help=text)
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="text", choices=["text", "json"])
    add_temperature_options(parser)
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise FlideError(f"serving needs {', '.join(missing)}: pip install 'flide-torch[serve]'")
    import torch
    import uvicorn

    from flide.runtime.config import EngineConfig
    from flide.runtime.engine import Engine
    from flide.serve.app import DecisionServer
    from flide.serve.config import ServeConfig
    from flide.serve.keys import KeyRing

    if arguments.api_key is not None and arguments.api_key_file is not None:
        raise FlideError("give --api-key or --api-key-file, not both")
    keys = None
    if arguments.api_key is not None:
        keys = KeyRing({"default": arguments.api_key})
    elif arguments.api_key_file is not None:
        keys = KeyRing.from_file(arguments.api_key_file)
    given = {
        "max_waiting": arguments.max_queue,
        "max_wait": None if arguments.max_queue_ms is None else arguments.max_queue_ms / 1e3,
        "request_timeout": arguments.request_timeout,
        "max_body_bytes": arguments.max_body_bytes,
        "max_questions": arguments.max_questions,
        "max_per_key": arguments.max_requests_per_key,
    }
    config = ServeConfig(
        host=arguments.host,
        port=arguments.port,
        keys=keys,
        insecure=arguments.insecure,
        root_path=arguments.root_path,
        **{name: value for name, value in given.items() if value is not None},
    )
    _set_up_logs(arguments.log_level.upper(), arguments.log_format)
    temperatures = given_temperatures(arguments)
    engine_config = EngineConfig(
        device=arguments.device,
        dtype=arguments.dtype,
        model_name=arguments.served_model_name,
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_request_tokens=arguments.max_request_tokens,
        temperatures=temperatures or None,
    )
    if engine_config.resolve_device().type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))  # one core is for sockets and bodies
    sys.setswitchinterval(SWITCH_SECONDS)
    tell("making the model ready")
    engine = (
        Engine.default(engine_config)
        if arguments.model is None
        else Engine.from_pretrained(arguments.model, engine_config)
    )
    with engine:
        engine.decide([WARM_UP])
        names = (engine.model_name, *arguments.alias)
        server = DecisionServer(engine, replace(config, names=names))
        # What is here now stays. Collecting it again and again would halt everything for half a second each time.
        gc.collect()
        gc.freeze()
        with _listening(config.host, config.port) as listening:
            address = listening.getsockname()
            tell(f"listening on http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}")
            settings = uvicorn.Config(
                server.app(),
                root_path=config.root_path,
                log_config=None,
                log_level=arguments.log_level,
                access_log=False,
                proxy_headers=False,  # nothing asks for the client's address
                server_header=False,
                timeout_graceful_shutdown=int(config.request_timeout) + 1,
            )
            # uvicorn raises the signal that ended it once more, when all is answered.
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            uvicorn.Server(settings).run(sockets=[listening])
    return 0


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise FlideError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname.lower(), "logger": record.name}
        return json.dumps({**line, "message": record.getMessage()}, ensure_ascii=False)


def _set_up_logs(level: str, format: str) -> None:
    for handler in logging.getLogger().handlers:
        handler.setLevel(level)
        if format == "json":
            handler.setFormatter(_JsonLines())
    logging.getLogger().setLevel(level)


WARM_UP = {
    "model": "jev-latest",
    "state": "ready?",
    "questions": {
        "noul": {"type": "noul", "instructions": "Is it?"},
        "choice": {"type": "choice", "criteria": {"yes": None, "no": None}},
        "score": {"type": "score", "criteria": ["no", "yes"]},
    },
}
