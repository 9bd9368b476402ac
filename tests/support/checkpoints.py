"""Small checkpoints on disk in Hugging Face format, written without transformers, whole or damaged.

The tokenizer has one token a byte, its id the byte's value, and `<|endoftext|>` as id 256: every character outside ASCII is
split over several tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

Tensors = dict[str, Tensor]
END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 256

# hidden_size is not heads * head_dim, so that the two cannot be mistaken for one another.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "vocab_size": 257,
    "max_position_embeddings": 1024, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "eos_token_id": END_OF_TEXT_ID,
}  # fmt: skip

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def layer_tensor(layer: int, name: str) -> str:
    """Hugging Face's name of a layer's tensor: layer_tensor(1, "mlp.down_proj")."""
    return f"model.layers.{layer}.{name}.weight"


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a `config.json`, written down apart from the loader's own list."""
    hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        layer_shapes = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,), "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp),
        }  # fmt: skip
        shapes |= {layer_tensor(layer, name): shape for name, shape in layer_shapes.items()}
    shapes[FINAL_NORM] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes[HEAD] = (config["vocab_size"], hidden)
    return shapes


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Weights whose logits are of size 1 and depend on the whole context, fp32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
        return torch.randn(shape, generator=generator) * shape[1] ** -0.5

    return {name: draw(shape) for name, shape in tensor_shapes(config).items()}


def byte_tokenizer() -> Tokenizer:
    """One token a byte, id = the byte's value, and END_OF_TEXT."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    # Byte-level BPE writes a byte as a printable character; those that are none come after 255, in order.
    others = {byte: 256 + rank for rank, byte in enumerate(b for b in range(256) if b not in printable)}
    tokenizer = Tokenizer(BPE(vocab={chr(others.get(byte, byte)): byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    return tokenizer


def byte_pieces() -> Tokenizer:
    """As `byte_tokenizer`, of a SentencePiece vocabulary: a byte that is a letter is spelled as one, the others `<0x80>`."""
    spellings = {byte: chr(byte) if chr(byte).isalnum() and byte < 128 else f"<0x{byte:02X}>" for byte in range(256)}
    vocab = {token: byte for byte, token in spellings.items()} | {END_OF_TEXT: END_OF_TEXT_ID}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def saying(text: str | bytes, *, endless: bool = False) -> Callable[[Tensors], None]:
    """A `mutate` after which the model continues the text's first byte with the rest, and then ends or repeats itself.

    Attention and MLP are switched off, and the head maps each byte's embedding to the byte that follows.
    """
    tokens = list(text.encode() if isinstance(text, str) else text)
    assert len(set(tokens)) == len(tokens), "a byte that comes twice has no one successor"
    follows = dict(zip(tokens, [*tokens[1:], tokens[0] if endless else END_OF_TEXT_ID], strict=True))

    def mutate(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", HEAD)):
                tensor.zero_()
        tensors[FINAL_NORM].fill_(1.0)
        for token, successor in follows.items():
            tensors[HEAD][successor] = tensors[EMBEDDING][token]

    return mutate


def poison(name: str, index: int | tuple[int, ...] = 0, value: float = float("nan")) -> Callable[[Tensors], None]:
    """A `mutate` that puts one bad value into a tensor."""

    def mutate(tensors: Tensors) -> None:
        tensors[name][index] = value

    return mutate


def in_turn(*mutations: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    """Several `mutate`s as one."""

    def mutate(tensors: Tensors) -> None:
        for mutation in mutations:
            mutation(tensors)

    return mutate


def write_checkpoint(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    shards: int = 1,
    mutate: Callable[[Tensors], None] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    generation: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    files: dict[str, str | bytes] | None = None,
) -> Path:
    """Write a checkpoint folder.

    Args:
        config: entries that differ from CONFIG.
        shards: files that the weights are spread over, with an index if there are several.
        mutate: changes the tensors before they are stored as `dtype`.
        generation, tokenizer_config: contents of those files, left out unless given.
        files: further files by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = CONFIG | (config or {})
    tensors = random_tensors(settings)
    if mutate:
        mutate(tensors)
    write_weights(folder, {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, shards)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    contents = {"config.json": settings, "generation_config.json": generation, "tokenizer_config.json": tokenizer_config}
    for name, content in contents.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    for name, data in (files or {}).items():
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def write_weights(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """Store tensors as `model.safetensors`, or spread over shards with their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {name: shard_name(i * shards // len(tensors), shards) for i, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        shard = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def shard_name(number: int, shards: int) -> str:
    """File name of a shard, counted from 0."""
    return f"model-{number + 1:05}-of-{shards:05}.safetensors"


def cut_off(file: Path, keep: float = 0.9) -> None:
    """Truncate a file to a share of its bytes."""
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
