"""vLLM's OpenAI-compatible server with a packed KV cache: what `tq serve` runs."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from haarkv.serving import vllm_plugin as keys
from haarkv.serving.vllm_plugin import kv_choice
from haarkv.serving.vllm_plugin.install import VERSION
from haarkv.tq_ops.errors import InputError, warn
from haarkv.tq_ops.kv.plan import KVSpec

VLLMS_OWN = "bf16"
"""The `--kv` that leaves the cache to vLLM."""


def cache_options(
    kv: str | None = None, calibration: str | None = None, plan: str | None = None, *, skip_layers: Sequence[int] = (),
    tail: int | None = None, sink: int = 0, balance: bool = True, allow_collapse: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The server's cache as vLLM's `--additional-config`; files as absolute paths, for workers may run elsewhere.

    Args:
        kv: as for `tq generate`; None for `keys.KV`, unless a plan is given.
        tail, sink: newest and first tokens of a sequence in BF16.
    """
    files = {keys.CALIBRATION: calibration, keys.PLAN: plan}
    options: dict[str, Any] = {
        keys.FORMAT: None if kv == keys.KV else kv,
        **{key: file and str(Path(file).expanduser().absolute()) for key, file in files.items()},
        keys.SKIP_LAYERS: list(skip_layers) or None, keys.TAIL: tail, keys.SINK: sink or None,
        keys.BALANCE: None if balance else False, keys.ALLOW_COLLAPSE: allow_collapse or None,
    }  # fmt: skip
    return {key: value for key, value in options.items() if value is not None}


def is_vllms_own(options: Mapping[str, Any]) -> bool:
    """Whether such options leave the cache to vLLM."""
    return options.get(keys.FORMAT) == VLLMS_OWN and keys.PLAN not in options


_LOCALHOST = "127.0.0.1"
_LOOPBACK = (_LOCALHOST, "localhost", "::1")


def require_vllm() -> None:
    """Refuse without vLLM; warn of a version that the plug-in was not written for."""
    if find_spec("vllm") is None:
        raise InputError(
            "vLLM is not installed here; in an environment of its own, `python -m haarkv.serving.vllm_plugin.install` "
            "installs it for a CPU, and for a GPU vLLM's documentation says how"
        )
    # PyPI has vLLM under several names; the distribution that holds the module is asked.
    for name in sorted(set(packages_distributions().get("vllm", ()))):
        if _release(version(name)) != _release(VERSION):
            warn(
                f"{name} {version(name)} is installed, and tq serve is written for vLLM {_release(VERSION)}: with another one "
                "it may fail, or keep K and V wrongly"
            )


def _release(version: str) -> str:
    """Major and minor version, which decide vLLM's API."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def serve(
    model: str, cache: Mapping[str, Any], flags: Sequence[str], *, say: Callable[[str], object] = lambda _: None
) -> None:
    """Serve until stopped, on this machine alone unless flags say otherwise.

    Args:
        model: a Hugging Face folder, or a model name that vLLM can load.
        cache: of `cache_options`.
        flags: any of `vllm serve`'s.
        say: called with a sentence on the cache and one on who can reach the server.
    Raises:
        InputError: vLLM is missing, rejects the flags, or cannot serve this model so.
    """
    require_vllm()
    model = as_vllm_takes_it(model)
    ours = _server_flags(cache, flags)
    if not is_vllms_own(cache):
        kv_choice.spec_from(cache)
    namespace, config = _parse_flags([model, *ours, *_worker(cache)])
    # Imported late: what vLLM logs, and how it starts processes, follows from the flags.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    if not is_vllms_own(cache):
        # The engine would find it too, but in another process, and vLLM then prints a traceback.
        from haarkv.serving.vllm_plugin.limits import judge_collapse

        judge_collapse(config, "--allow-collapse")
        say(_stored_as(config))
    say(_reached_by(namespace))
    cli_env_setup()
    configure_logging_from_args(namespace)
    try:
        ServeSubcommand.cmd(namespace)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"vLLM stopped: {error}") from error


def as_vllm_takes_it(model: str) -> str:
    """A model's name, or its existing folder with `~` expanded."""
    name = os.path.expanduser(model)  # noqa: PTH111 - leaves the name of a home that does not exist as it is
    # On the Hub a model is NAME or ORG/NAME, and one of its files ORG/NAME/FILE.gguf; an address elsewhere has a scheme.
    could_be_elsewhere = name.count("/") < 2 or "://" in name or name.endswith(".gguf")
    is_path = name.startswith(("/", ".", "~")) or not could_be_elsewhere
    if not name or (is_path and not Path(name).is_dir()):
        raise InputError(
            f"no such model: {model or repr('')}; give tiny, a folder in Hugging Face format, or a name that vLLM can load"
        )
    return name


def _server_flags(cache: Mapping[str, Any], flags: Sequence[str]) -> list[str]:
    """vLLM's flags with ours in front; flags that `tq serve` sets are refused."""
    # vLLM's own default is every network; of two hosts the last one counts.
    ours = ["--host", _LOCALHOST]
    if not is_vllms_own(cache):
        if conflicts := [flag for flag in flags if flag.split("=")[0] in ("--attention-backend", "--additional-config")]:
            raise InputError(f"{conflicts[0].split('=')[0]} is set by tq serve; leave it out, or give --kv {VLLMS_OWN}")
        ours += ["--attention-backend", "CUSTOM"]
        if cache:
            ours += ["--additional-config", json.dumps(cache)]
    return [*ours, *flags]


def _worker(cache: Mapping[str, Any]) -> list[str]:
    """The flag for the worker with per-layer pages; on a CPU the platform chooses it."""
    if is_vllms_own(cache) or not {keys.FORMAT, keys.CALIBRATION, keys.PLAN, keys.SKIP_LAYERS} & cache.keys():
        return []
    from vllm.platforms import current_platform

    return [] if current_platform.device_type == "cpu" else ["--worker-cls", keys.GPU_WORKER]


def _stored_as(config: Any) -> str:
    model, plan = config.model_config, kv_choice.kv_plan(config)
    if sliding := kv_choice.sliding_layers(model):
        windows = f"those of layers {', '.join(map(str, sliding))}, which attend to a window, by vLLM itself"
        return f"K and V are kept in {plan.describe()}; {windows}"
    shapes, states = kv_choice.shape_signature(config).layers, kv_choice.state_layers(model)
    nbytes, bf16 = plan.bytes_per_token(shapes), KVSpec(VLLMS_OWN).plan(len(plan.layers)).bytes_per_token(shapes)
    layers = f" of {len(plan.layers) - len(states)} layers" if states else ""
    text = f"K and V{layers} are kept in {plan.describe()}: {nbytes:,.0f} bytes a token"
    text += ", and beside them tokens in BF16" if plan.has_windows else f", {bf16 / nbytes:.2f} times less than BF16"
    return text + (f"; the states of the other {len(states)} by vLLM itself" if states else "")


def _reached_by(namespace: Namespace) -> str:
    if namespace.uds:
        return f"the server listens at the socket {namespace.uds}"
    if namespace.host in _LOOPBACK:
        return (
            f"the server listens on {namespace.host}, this machine alone; --host 0.0.0.0 --api-key KEY opens it to a network"
        )
    keyless = "" if namespace.api_key else "; anyone who reaches it can use it: --api-key KEY asks for a key"
    return f"the server listens on {namespace.host}{keyless}"


def _parse_flags(args: Sequence[str]) -> tuple[Namespace, Any]:
    """Parsed flags and vLLM's configuration; nothing is started."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise InputError(f"vLLM says: {message}")

    try:
        namespace: Namespace = make_arg_parser(Parser(prog="tq serve")).parse_args(list(args))
        namespace.model = namespace.model_tag
        validate_parsed_serve_args(namespace)
        config = AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
    except InputError:
        raise
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        raise InputError(_first_reason(error)) from error
    return namespace, config


def _first_reason(error: Exception) -> str:
    """The first message of a validation error."""
    reasons: Any = getattr(error, "errors", None)
    details = reasons() if callable(reasons) else None
    message = str(details[0].get("msg", error)).removeprefix("Value error, ") if details else str(error)
    if "failed to be inspected" in message and find_spec("torchvision") is None:
        return (
            "vLLM imports torchvision for this model, even to serve text; install it from where torch came from, as a build "
            "for CPUs if torch is one"
        )
    return message
