"""A model as a GGUF file, which llama.cpp reads: the one that it comes from, or one with the same weights, bit for bit.

What is written holds no tokenizer: its vocabulary is a number of tokens without words, and its user feeds ids.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.catalog import find_model
from haarkv.models.config import ModelConfig, unknown_layer
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.weight import dense

_ARCHITECTURES = {"qwen3": "QWEN3"}
"""Families whose layer is one of llama.cpp's with the same order of RoPE's coordinates, by gguf's own name."""
_MARGIN = 2**26  # bytes that stay free beside the file


def source_file(name: str) -> Path | None:
    """The GGUF file that a model is read from; None if it is read from something else."""
    path = find_model(name)
    return path if path is not None and path.is_file() else None


def unlike_plain(config: ModelConfig) -> str | None:
    """Why a model is none of equal plain layers with RoPE as it was trained, which peers are built of; None if it is one."""
    if any(mixer.rope.scaling for mixer in config.attentions):
        return "its RoPE is scaled"
    return unknown_layer(config, knows=("head_norms",)) or ("its layers differ" if len(set(config.layers)) > 1 else None)


def unsupported_reason(config: ModelConfig) -> str | None:
    """Why no file is written of a model; None if one is."""
    if config.model_type not in _ARCHITECTURES:
        return f"a GGUF is written of {', '.join(_ARCHITECTURES)} models, and this is a {config.model_type}"
    other = unlike_plain(config)
    return f"a GGUF is written of models with plain layers: {other}" if other else None


def write(path: Path, model: DecoderModel) -> None:
    """Write a model; matrices in its dtype (BF16 or FP32), norms in FP32. A tied head is left out, as llama.cpp has it.

    Without gguf, for a model that has no such file, or with too little room, it is refused.
    """
    if not find_spec("gguf"):
        raise InputError("writing a GGUF needs the package gguf: pip install -r lab/requirements.txt")
    if reason := unsupported_reason(model.config):
        raise InputError(reason)
    required_bytes, free = model.weights.nbytes + _MARGIN, shutil.disk_usage(path.parent).free
    if required_bytes > free:
        raise InputError(
            f"a GGUF of {required_bytes / 2**30:.1f} GiB does not fit into {path.parent}, which has {free / 2**30:.1f}"
        )
    import gguf

    architecture = gguf.MODEL_ARCH[_ARCHITECTURES[model.config.model_type]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        _describe(writer, model)
        names = gguf.get_tensor_name_map(architecture, model.config.num_layers)
        for name, tensor in model.weights.named_tensors():
            its_name = names.get_name(name, try_suffixes=(".weight",))
            assert its_name is not None, f"gguf has no name for {name}"
            writer.add_tensor(its_name, *_tensor_arguments(dense(tensor)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        writer.close()


def _describe(writer: Any, model: DecoderModel) -> None:
    import gguf

    config, shape = model.config, model.config.attentions[0].heads
    whole = {torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16, torch.float32: gguf.LlamaFileType.ALL_F32}
    writer.add_file_type(whole[model.dtype])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.common.mlp.width)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(config.final_norm.eps)
    writer.add_rope_freq_base(config.common.attention.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _tensor_arguments(tensor: Tensor) -> tuple[Any, None, Any]:
    """Numbers, no shape of their own, and gguf's type, as `add_tensor` takes them."""
    import gguf

    if tensor.ndim == 1 or tensor.dtype == torch.float32:
        return tensor.float().contiguous().numpy(), None, gguf.GGMLQuantizationType.F32
    # numpy has no BF16; gguf takes the bytes of its rows.
    return tensor.contiguous().view(torch.uint8).numpy(), None, gguf.GGMLQuantizationType.BF16
