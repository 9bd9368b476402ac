"""vLLM's own OpenAI-compatible server with the KV cache in `tq4`: what `tq serve` runs."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from haarkv.serving.vllm_plugin import KV, PER_LAYER
from haarkv.tq_ops.errors import InputError

KV_STORAGES = (KV, "bf16")
"""What `--kv` takes; `bf16` leaves the cache to vLLM."""


_HERE = "127.0.0.1"
_LOOPBACK = (_HERE, "localhost", "::1")


def serve(
    model: str, kv: str, flags: Sequence[str], *, per_layer: bool = False, say: Callable[[str], object] = lambda _: None
) -> None:
    """Serve until stopped; returns when the server was told to end. It listens on this machine alone unless told otherwise.

    Args:
        model: a Hugging Face folder, or the name of a model that vLLM can load.
        kv: of `KV_STORAGES`.
        flags: any of `vllm serve`'s.
        per_layer: whether `/metrics` tells of each layer, too.
        say: called with a sentence on who can reach the server, before it starts.
    Raises:
        InputError: vLLM is not installed, does not take the flags, or cannot serve this model so; nothing was started.
    """
    if find_spec("vllm") is None:
        raise InputError("vLLM is not installed; docs/serving.md says how, for a CPU and for a GPU")
    if kv not in KV_STORAGES:
        raise InputError(f"vLLM can keep K and V in {' or '.join(KV_STORAGES)}, not in {kv}")
    given = model
    if model.startswith("~"):
        # vLLM would take `~` for the name of a folder.
        model = os.path.expanduser(model)  # noqa: PTH111 - leaves the name of a home that does not exist as it is
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise InputError(f"no such model: {given}; give tiny, a folder in Hugging Face format, or a name that vLLM can load")
    parsed = _parsed([model, *_flags_of(kv, flags, per_layer)])
    # Imported late: what vLLM logs, and how it starts processes, follows from the flags.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    say(_reached_by(parsed))
    cli_env_setup()
    configure_logging_from_args(parsed)
    try:
        ServeSubcommand.cmd(parsed)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"vLLM stopped: {error}") from error


def _flags_of(kv: str, flags: Sequence[str], per_layer: bool) -> list[str]:
    """vLLM's flags with ours in front.

    Raises:
        InputError: one of them is for `tq serve` to set.
    """
    taken = [flag for flag in flags if flag.split("=")[0] in ("--attention-backend", "--additional-config")]
    if kv == KV and taken:
        raise InputError(f"{taken[0].split('=')[0]} is set by --kv {kv}; leave it out")
    ours = ["--attention-backend", "CUSTOM"] if kv == KV else []
    if kv == KV and per_layer:
        ours += ["--additional-config", json.dumps({PER_LAYER: True})]
    # vLLM's own default is every network; of two hosts the last one counts.
    return [*ours, "--host", _HERE, *flags]


def _reached_by(parsed: Namespace) -> str:
    """Who can reach a server of these flags."""
    if parsed.uds:
        return f"the server listens at the socket {parsed.uds}"
    if parsed.host in _LOOPBACK:
        return f"the server listens on {parsed.host}, this machine alone; --host 0.0.0.0 --api-key KEY opens it to a network"
    keyless = "" if parsed.api_key else "; whoever reaches it can use it: --api-key KEY asks for a key"
    return f"the server listens on {parsed.host}{keyless}"


def _parsed(args: Sequence[str]) -> Namespace:
    """The flags as vLLM reads them, once it has found that the model can be served so; nothing is started.

    Raises:
        InputError: it cannot, in one line.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise InputError(f"vLLM says: {message}")

    try:
        parsed: Namespace = make_arg_parser(Parser(prog="tq serve")).parse_args(list(args))
        parsed.model = parsed.model_tag
        validate_parsed_serve_args(parsed)
        AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    except InputError:
        raise
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        raise InputError(_first_reason(error)) from error
    return parsed


def _first_reason(error: Exception) -> str:
    """The sentence that matters: a validation error brings a list, each with what it was about."""
    reasons: Any = getattr(error, "errors", None)
    if callable(reasons) and (found := reasons()):
        return str(found[0].get("msg", error)).removeprefix("Value error, ")
    return str(error)
