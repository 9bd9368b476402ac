"""Small GGUF files, as llama.cpp's converter writes them: of a checkpoint that transformers wrote, or of a vocabulary alone.

Names come from gguf's map, as in the loader and llama.cpp's converter; orders of rows are written apart from the loader.
"""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import torch
from checkpoints import byte_tokenizer
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
}
NEXTN = {
    "fc": ("eh_proj", 0),
    "pre_fc_norm_embedding": ("enorm", 1),
    "pre_fc_norm_hidden": ("hnorm", 1),
    "norm": ("shared_head_norm", 1),
}
"""What llama.cpp's converter calls the tensors around the layer that predicts several tokens, and what it adds to each."""
SHAPE = {
    "vocab_size": 300, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "head_dim": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16}
"""Of small checkpoints that are written as files."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def convert(folder: Path, path: Path, kind: str = "F32", extra=None, vocabulary=None, leave_out=(), each=0) -> Path:
    """Write a checkpoint folder as a GGUF file.

    Args:
        kind: gguf's type of the matrices; norms and biases are F32.
        extra: further entries by key, written as they are.
        vocabulary: entries of the tokenizer, from `byte_vocabulary` or `pieces`; none unless given.
        leave_out: keys that are not written.
        each: tensors of each part, if there are to be several.
    Returns:
        the file, or the first part.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=each)
    words = pad_vocabulary(vocabulary or {}, config["vocab_size"])
    for key, value in (model_entries(config, writer.arch) | words | (extra or {})).items():
        if key not in leave_out:
            add(writer, key, value)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, tensor in file_tensors(config, load_file(folder / "model.safetensors"), architecture):
        tensor_kind = quantization if tensor.ndim > 1 and "conv1d" not in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor.float().numpy(), tensor_kind), raw_dtype=tensor_kind)
    close(writer)
    return sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0] if each else path


def close(writer) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)


def pad_vocabulary(vocabulary, count):
    """A vocabulary of as many tokens as the embedding has rows, as the converter fills it up."""
    key = "tokenizer.ggml.{}".format
    more = count - len(vocabulary.get(key("tokens"), [0] * count))
    fill = {"tokens": [f"[PAD{number}]" for number in range(more)], "token_type": [UNUSED] * more, "scores": [-1e4] * more}
    return vocabulary | {key(name): vocabulary[key(name)] + with_ for name, with_ in fill.items() if key(name) in vocabulary}


def model_entries(config, arch):
    rope = config.get("rope_parameters") or config
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    entries = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"]),
        "rope.dimension_count": head_dim,
    }
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        entries |= {
            "expert_count": experts,
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if config["model_type"].startswith("qwen3_5"):
        entries |= delta_entries(config, rope, head_dim)
    if config["model_type"] == "gemma3_text":
        entries["attention.sliding_window"] = config["sliding_window"]
    if rope.get("rope_type") in ("linear", "yarn"):
        entries |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        entries["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if "beta_fast" in rope:
            entries["rope.scaling.yarn_beta_fast"] = float(rope["beta_fast"])
    return {f"{arch}.{key}": value for key, value in entries.items()}


def add(writer, key, value):
    whole = isinstance(value, int) and not isinstance(value, bool)
    writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if whole else gguf.GGUFValueType.get_type(value))


def file_tensors(config, tensors, architecture):
    """(name, tensor) in gguf's order of rows, experts of a layer together."""
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(architecture, layers + (config.get("mtp_num_hidden_layers") or 0))
    experts = {}
    for name, tensor in tensors.items():
        if name.startswith("mtp."):
            name = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
            if name.startswith("mtp."):
                # The map of names has none of these for this architecture yet.
                part, plus = NEXTN[name.removeprefix("mtp.").removesuffix(".weight")]
                yield f"blk.{layers}.nextn.{part}.weight", tensor.float() + plus
                continue
        if architecture in (gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE):
            name, tensor = as_delta(config, name, tensor)
        if name.endswith(".experts.gate_up_proj"):
            before = name.removesuffix("gate_up_proj")
            for part, one in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                yield names.get_name(f"{before}{part}.weight", try_suffixes=(".weight",)), one.contiguous()
            continue
        if name.endswith(".experts.down_proj"):
            yield names.get_name(f"{name}.weight", try_suffixes=(".weight",)), tensor
            continue
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, rest = after.split(".", 1)
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor
            continue
        if architecture == gguf.MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
            tensor = permute_heads(tensor, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if architecture == gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
            tensor = tensor.float() + 1
        yield names.get_name(name, try_suffixes=(".weight", ".bias")), tensor
    for name, expert_tensors in experts.items():
        together = torch.stack([expert_tensors[index] for index in range(len(expert_tensors))])
        yield names.get_name(name, try_suffixes=(".weight",)), together
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", torch.tensor(llama3_factors(config, rope))


def delta_entries(config, rope, head_dim):
    entries = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": 4,
        "rope.dimension_count": int(head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [3, 3, 2, 0],
    }
    if more := config.get("mtp_num_hidden_layers"):
        entries |= {"block_count": config["num_hidden_layers"] + more, "nextn_predict_layers": more}
    if "num_experts" in config:
        entries["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return entries


def as_delta(config, name, tensor):
    """llama.cpp's own changes: norms with 1 added, decays as they multiply, heads of V tiled over those of K."""
    heads, shared = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    dim = config["linear_value_head_dim"]

    def tile_heads(x, width):
        return x.reshape(heads, shared, width, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

    if name.endswith("norm.weight") and "linear_attn" not in name:
        return name, tensor.float() + 1
    keys = 2 * heads * config["linear_key_head_dim"]
    match name.rpartition("linear_attn.")[2] if "linear_attn" in name else "":
        case "A_log":
            tensor = tile_heads(-torch.exp(tensor.float()), 1)
        case "dt_bias":
            name, tensor = name.replace("dt_bias", "dt_proj.bias"), tile_heads(tensor, 1)
        case "in_proj_a.weight" | "in_proj_b.weight":
            tensor = tile_heads(tensor, 1)
        case "in_proj_z.weight":
            tensor = tile_heads(tensor, dim)
        case "in_proj_qkv.weight":
            tensor = torch.cat([tensor[:keys], tile_heads(tensor[keys:], dim)])
        case "conv1d.weight":
            tensor = tensor.squeeze(1)
            tensor = torch.cat([tensor[:keys], tile_heads(tensor[keys:], dim)])
        case "out_proj.weight":
            tensor = tile_heads(tensor.T, dim).T.contiguous()
    return name, tensor.squeeze(0) if name.endswith("shared_expert_gate.weight") else tensor


def permute_heads(weights, heads):
    """llama.cpp's converter, word for word but for torch."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def llama3_factors(config, rope):
    """As llama.cpp's converter computes them."""
    dim = config["head_dim"]
    original, low, high = (rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    factors = []
    for freq in 1.0 / (rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)):
        wavelen = 2 * np.pi / freq
        if wavelen < original / high:
            factors.append(1.0)
        elif wavelen > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelen - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / rope["factor"] + smooth)))
    return factors


def byte_vocabulary(pre="gpt-2", merges=("a b", "ab c", "Ġ a", "Ġa b", "1 2", "12 3"), special=("<|end|>",), **entries):
    """A byte-level BPE: 256 bytes, what the merges make, special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges), *special]
    kinds = [NORMAL] * (len(tokens) - len(special)) + [CONTROL] * len(special)
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": list(merges)}
    fields["eos_token_id"] = len(tokens) - len(special)
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | entries).items()}


def plain_bytes(**entries):
    """The vocabulary of `checkpoints.byte_tokenizer`, one of its bytes given up for the one merge that a file must have."""
    tokens = [token for token, _ in sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])]
    tokens[1] = "ab"
    kinds = [NORMAL] * len(tokens)
    return byte_vocabulary(merges=["a b"], tokens=tokens, token_type=kinds, eos_token_id=len(tokens) - 1) | entries


def pieces(words=("▁", "a", "b", "c", "bc", "ab", "ca", "▁a", "bca"), user_tokens=("\n\n", "  "), **entries):
    """A SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, words from the best score down, the user's own tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *user_tokens]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), *[USER_DEFINED] * len(user_tokens)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [-1000.0] * len(user_tokens)
    fields = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores}
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | entries).items()}


def header(*entries: bytes, tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    """The beginning of a file, byte by byte, for what no writer writes."""
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, len(entries) if count is None else count) + b"".join(entries)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()
