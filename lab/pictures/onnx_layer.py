"""A picture of one decoder layer, drawn from the graph itself.

    python -m lab.pictures.onnx_layer | dot -Tsvg > docs/onnx_layer.svg

`dot` is graphviz's. Calls of functions are filled; attention is drawn with its own nodes inside. Constants are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from haarkv.models.families import SIZES
from haarkv.models.qwen3_14b.onnx.model import DEFAULT_OPSET, GraphSpec, build
from haarkv.models.qwen3_14b.onnx.scopes import FIELDS, Qwen3Scopes
from haarkv.tq_ops.onnx.graph import FUNCTION_DOMAIN

_EXPANDED_CALL = "Attention_tq4_tq4"
_STYLE = 'fontname="Helvetica" fontsize=11'


def layer_graph(expanded_call: str = _EXPANDED_CALL) -> str:
    """The decoder layer of Qwen3-14B in graphviz's language.

    Args:
        expanded_call: the function whose nodes are drawn inside their call.
    """
    plan = GraphSpec(range(1), embed=False, head=False, opset=DEFAULT_OPSET)
    model = build(Qwen3Scopes(SIZES["14b"]), plan)
    functions = {function.name: function for function in model.functions}
    layer = functions["DecoderLayer_tq4_tq4"]
    lines = [
        "digraph layer {", "rankdir=TB; ranksep=0.25; nodesep=0.15; bgcolor=white;",
        f'node [shape=box style="rounded,filled" fillcolor=white height=0.28 margin="0.08,0.03" {_STYLE}];',
        "edge [arrowsize=0.6 color=gray40];",
    ]  # fmt: skip
    # K and V are handed the same one.
    node_of = {name: "rotation" if name.endswith("_rotation") else name for name in layer.input}
    lines += [
        _node(name, name, "#eeeeee", "ellipse") for name in dict.fromkeys(node_of.values()) if not name.endswith("weight")
    ]
    for node in layer.node:
        if node.op_type == expanded_call:
            lines += _cluster(node, functions[expanded_call], node_of)
        else:
            fill = "#cfe2f3" if node.domain == FUNCTION_DOMAIN else "white"
            lines.append(_node(node.name, f"{node.name}\\n{node.op_type.partition('_')[0]}", fill))  # without the format
            lines += _edges(node.input, node.name, node_of)
            node_of |= dict.fromkeys(node.output, node.name)
    for output, word in zip(layer.output, ("hidden out", *(f"new_{field}" for field in FIELDS)), strict=True):
        lines += [_node(word, word, "#eeeeee", "ellipse"), *_edges([output], word, node_of)]
    return "\n".join([*lines, "}"])


def _cluster(call: onnx.NodeProto, function: onnx.FunctionProto, node_of: dict[str, str]) -> Iterator[str]:
    """A call with the nodes of its function inside."""
    yield f'subgraph "cluster {call.name}" {{ label="{call.name}" {_STYLE} style=rounded color="#6fa8dc" bgcolor="#f3f8fd";'
    inside = dict(zip(function.input, (node_of.get(name, "") for name in call.input), strict=True))
    edges: list[str] = []
    for node in function.node:
        if node.op_type == "Constant":
            continue
        name = f"{call.name}/{node.name}"
        yield _node(name, f"{node.name}\\n{node.op_type}", "white")
        edges += _edges(node.input, name, inside)
        inside |= dict.fromkeys(node.output, name)
    yield "}"
    yield from edges
    node_of |= {outer: inside[inner] for outer, inner in zip(call.output, function.output, strict=True)}


def _node(name: str, label: str, fill: str, shape: str = "box") -> str:
    return f'"{name}" [label="{label}" fillcolor="{fill}" shape={shape}];'


def _edges(inputs: Sequence[str], name: str, node_of: dict[str, str]) -> list[str]:
    sources = [node_of.get(value, "") for value in inputs]
    return [f'"{source}" -> "{name}";' for source in sources if source and not source.endswith("weight")]


if __name__ == "__main__":
    print(layer_graph())
