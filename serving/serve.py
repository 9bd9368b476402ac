"""vLLM's own OpenAI-compatible server with a packed KV cache: what `tq serve` runs."""

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
from haarkv.tq_ops.kv.layer import page_bytes
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

VLLMS_OWN = "bf16"
"""The `--kv` that leaves the cache to vLLM."""


def cache_options(
    kv: str | None = None, calibration: str | None = None, plan: str | None = None, *, skip_layers: Sequence[int] = (),
    tail: int | None = None, sink: int = 0, balance: bool = True, allow_collapse: bool = False, per_layer: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """How the server keeps K and V, as vLLM hands it to all its processes, which may run in another folder.

    Args:
        kv: as `tq generate` takes it; None for `keys.KV`, unless a plan says it.
        calibration, plan: files.
        skip_layers: left in BF16.
        tail, sink: newest and first tokens of a sequence that are read in BF16; None for no tail.
        balance: scale uneven channels.
        allow_collapse: only warn where text would be garbage.
        per_layer: whether `/metrics` tells of each layer.
    """
    files = {keys.CALIBRATION: calibration, keys.PLAN: plan}
    options: dict[str, Any] = {
        keys.FORMAT: None if kv == keys.KV else kv,
        **{key: file and str(Path(file).expanduser().absolute()) for key, file in files.items()},
        keys.SKIP_LAYERS: list(skip_layers) or None, keys.TAIL: tail, keys.SINK: sink or None,
        keys.BALANCE: None if balance else False, keys.ALLOW_COLLAPSE: allow_collapse or None,
        keys.PER_LAYER: per_layer or None,
    }  # fmt: skip
    return {key: value for key, value in options.items() if value is not None}


def is_vllms_own(options: Mapping[str, Any]) -> bool:
    """Whether such options leave the cache to vLLM."""
    return options.get(keys.FORMAT) == VLLMS_OWN and keys.PLAN not in options


_LOCALHOST = "127.0.0.1"
_LOOPBACK = (_LOCALHOST, "localhost", "::1")


def require_vllm() -> None:
    """Refuse where there is nothing to serve with, and warn of a vLLM that the plug-in is not written for: to be asked before
    anything else is looked at.
    """
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
    """What decides which functions vLLM has: 0.32 of 0.32.1+cpu."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def serve(
    model: str, cache: Mapping[str, Any], flags: Sequence[str], *, say: Callable[[str], object] = lambda _: None
) -> None:
    """Serve until stopped; returns when the server was told to end. It listens on this machine alone unless told otherwise.

    Args:
        model: a Hugging Face folder, or the name of a model that vLLM can load.
        cache: of `cache_options`.
        flags: any of `vllm serve`'s.
        say: called with a sentence on the cache and one on who can reach the server, before it starts.
    Raises:
        InputError: vLLM is not installed, does not take the flags, or cannot serve this model so; nothing was started.
    """
    require_vllm()
    model = _as_vllm_takes_it(model)
    ours = _server_flags(cache, flags)
    if not is_vllms_own(cache):
        kv_choice.spec_from(cache)
    namespace, config = _parse_flags([model, *ours, *_worker(cache)])
    # Imported late: what vLLM logs, and how it starts processes, follows from the flags.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    if not is_vllms_own(cache):
        # The engine would find it too, in a process of its own, and vLLM then prints where it was.
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


def _as_vllm_takes_it(model: str) -> str:
    """A model's name, or its folder, which must be there: vLLM would take `~` for the name of a folder."""
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
    """vLLM's flags with ours in front; those that are for `tq serve` to set are refused."""
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
    """vLLM's flag for the worker that knows other formats' pages; on a CPU the plug-in's platform chooses it."""
    if is_vllms_own(cache) or not {keys.FORMAT, keys.CALIBRATION, keys.PLAN, keys.SKIP_LAYERS} & cache.keys():
        return []
    from vllm.platforms import current_platform

    return [] if current_platform.device_type == "cpu" else ["--worker-cls", keys.GPU_WORKER]


def _stored_as(config: Any) -> str:
    """How K and V are kept by an engine of this configuration."""
    model, plan = config.model_config, kv_choice.kv_plan(config)
    if sliding := kv_choice.sliding_layers(model):
        ours = f"K and V are kept in {plan.describe()}"
        return f"{ours}; those of layers {', '.join(map(str, sliding))}, which attend to a window, by vLLM itself"
    if states := kv_choice.state_layers(model):
        shapes = kv_choice.shape_signature(config).layers
        nbytes, bf16 = plan.bytes_per_token(shapes), KVSpec(VLLMS_OWN).plan(len(plan.layers)).bytes_per_token(shapes)
        ours = f"K and V of {len(plan.layers) - len(states)} layers are kept in {plan.describe()}: {nbytes:,.0f} bytes a token"
        return f"{ours}, {bf16 / nbytes:.2f} times less than BF16; the states of the other {len(states)} by vLLM itself"
    shape = KVShape(model.get_total_num_kv_heads(), model.get_head_size())
    nbytes, bf16 = plan.bytes_per_token(shape), KVSpec(VLLMS_OWN).plan(len(plan.layers)).bytes_per_token(shape)
    each = f"K and V are kept in {plan.describe()}: {nbytes:,.0f} bytes a token"
    if not plan.has_windows:
        return f"{each}, {bf16 / nbytes:.2f} times less than BF16"
    return (
        f"{each} and {kept_bytes(plan, shape, config.cache_config.block_size) / 2**20:,.1f} MiB a sequence for those in BF16"
    )


def kept_bytes(plan: KVPlan, shape: KVShape, block_size: int) -> int:
    """Bytes of vLLM's blocks that a sequence's tokens in BF16 take while it decodes, in all layers; at most."""
    packed = sum(page_bytes(pair, shape.num_kv_heads, shape.head_dim, block_size) for pair in plan.layers)
    exact_layers = sum(any(map(plan.has_window, pair)) for pair in plan.layers)
    exact = exact_layers * page_bytes(kv_choice.exact_pair(), shape.num_kv_heads, shape.head_dim, 1)
    size = kv_choice.tail_tokens(packed, exact, block_size)
    # So many tokens, wherever among blocks they begin.
    blocks = (max(plan.recent or 0, 2) - 2) // size + 2 + -(-plan.sink // size)
    return blocks * max(packed, size * exact)


def _reached_by(namespace: Namespace) -> str:
    """Who can reach a server of these flags."""
    if namespace.uds:
        return f"the server listens at the socket {namespace.uds}"
    if namespace.host in _LOOPBACK:
        return (
            f"the server listens on {namespace.host}, this machine alone; --host 0.0.0.0 --api-key KEY opens it to a network"
        )
    keyless = "" if namespace.api_key else "; whoever reaches it can use it: --api-key KEY asks for a key"
    return f"the server listens on {namespace.host}{keyless}"


def _parse_flags(args: Sequence[str]) -> tuple[Namespace, Any]:
    """The flags as vLLM reads them, and its configuration, or in one line why it cannot serve so. Nothing is started."""
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
    """The sentence that matters: a validation error brings a list, each with what it was about."""
    reasons: Any = getattr(error, "errors", None)
    details = reasons() if callable(reasons) else None
    message = str(details[0].get("msg", error)).removeprefix("Value error, ") if details else str(error)
    if "failed to be inspected" in message and find_spec("torchvision") is None:
        return (
            "vLLM imports torchvision for this model, even to serve text; install it from where torch came from, as a build "
            "for CPUs if torch is one"
        )
    return message
