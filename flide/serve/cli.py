"""``flide serve``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
from dataclasses import replace
from typing import Any

from flide.console import (
    add_base_option,
    add_checkpoint_options,
    add_escape_option,
    add_import_option,
    add_temperature_options,
    given_temperatures,
    tell,
)
from flide.errors import FlideError

NEEDED = ("starlette", "uvicorn", "httptools", "zstandard", "orjson", "prometheus_client")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP",
        description="Serves System One at /v1/systemone. The port opens when the model is ready.",
    )
    add_import_option(parser)
    parser.add_argument("--model", help="model directory or Hub id (default: the model in the package)")
    add_base_option(parser)
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
        ("max-bodies-bytes", "of all bodies that one process reads at the same time"),
        ("max-questions", "of one request"),
        ("max-prompt-tokens", "of a question with its state"),
        ("max-request-tokens", "of a state with all its questions (default: what there is memory for)"),
        ("max-round-tokens", "that requests may share in one round: more for long requests, less for short waits"),
        ("max-requests-per-key", "that may wait or run"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=float if name == "request-timeout" else int, help=text)
    text = (
        "processes that read requests and write answers for the one that has the model (default: 0, it does so itself)"
    )
    parser.add_argument("--frontends", metavar="N", type=int, default=0, help=text)
    add_checkpoint_options(parser)
    text = "let requests of different keys resume from each other's states, which their times and x_flide then tell"
    parser.add_argument("--share-checkpoints", action="store_true", help=text)
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="text", choices=["text", "json"])
    add_escape_option(parser)
    add_temperature_options(parser)
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise FlideError(f"serving needs {', '.join(missing)}: pip install 'flide-torch[serve]'")
    from flide.runtime.blas import compute_without_workspaces
    from flide.runtime.config import EngineConfig
    from flide.serve.app import DecisionServer
    from flide.serve.config import ServeConfig
    from flide.serve.frontends import Frontends
    from flide.serve.keys import KeyRing
    from flide.serve.run import BACKLOG, Logs, bound, ending, keep_from_collector, raise_file_limit, run_uvicorn

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
        "max_bodies_bytes": arguments.max_bodies_bytes,
        "max_questions": arguments.max_questions,
        "max_per_key": arguments.max_requests_per_key,
    }
    config = ServeConfig(
        host=arguments.host,
        port=arguments.port,
        keys=keys,
        insecure=arguments.insecure,
        root_path=arguments.root_path,
        share_checkpoints=arguments.share_checkpoints,
        **{name: value for name, value in given.items() if value is not None},
    )
    logs = Logs(arguments.log_level, arguments.log_format)
    logs.set_up()
    raise_file_limit()
    compute_without_workspaces()
    temperatures = given_temperatures(arguments)
    engine_config = EngineConfig(
        device=arguments.device,
        dtype=arguments.dtype,
        model_name=arguments.served_model_name,
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_request_tokens=arguments.max_request_tokens,
        max_round_tokens=arguments.max_round_tokens,
        temperatures=temperatures or None,
        escape_control_tokens=arguments.escape_control_tokens,
        checkpoint_gb=arguments.checkpoint_gb,
        checkpoint_host_gb=arguments.checkpoint_host_gb,
    )
    if arguments.base is not None and arguments.model is None:
        raise FlideError("--base belongs to a --model that builds upon it")
    if arguments.frontends:
        frontends = Frontends(arguments.frontends, imports=arguments.imports)
        try:
            with _ready(arguments, engine_config, frontends=arguments.frontends) as engine:
                config = replace(config, names=(engine.model_name, *arguments.alias))
                keep_from_collector()
                code = frontends.serve(engine, config, logs, listening=_tell_address)
                with ending():
                    engine.close()
                return code
        finally:
            frontends.end()
    with _ready(arguments, engine_config) as engine:
        server = DecisionServer(engine, replace(config, names=(engine.model_name, *arguments.alias)))
        keep_from_collector()
        with bound(config) as listening:
            listening.listen(BACKLOG)
            _tell_address(listening)
            run_uvicorn(server.app(), config, logs, listening)
        with ending():
            engine.close()
    return 0


def _ready(arguments: argparse.Namespace, config: Any, *, frontends: int = 1) -> Any:
    """An engine that has answered once."""
    import torch

    from flide.runtime.engine import Engine
    from flide.serve.run import SWITCH_SECONDS

    if config.resolve_device().type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 2) - frontends))  # cores for sockets and bodies
    sys.setswitchinterval(SWITCH_SECONDS)
    tell("making the model ready")
    if arguments.model is None:
        engine = Engine.default(config)
    else:
        engine = Engine.from_pretrained(arguments.model, config, base=arguments.base)
    engine.decide([WARM_UP])
    return engine


def _tell_address(listening: socket.socket) -> None:
    address = listening.getsockname()
    tell(f"listening on http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}")


WARM_UP = {
    "model": "jev-latest",
    "state": "ready?",
    "questions": {
        "noul": {"type": "noul", "instructions": "Is it?"},
        "choice": {"type": "choice", "criteria": {"yes": None, "no": None}},
        "score": {"type": "score", "criteria": ["no", "yes"]},
    },
}
