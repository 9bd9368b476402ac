"""Writing ONNX graphs by hand: nodes with names, and scopes that become functions.

A scope is a Python function that takes a `Graph` and names of inputs, adds nodes, and returns the names of its outputs.
`Graph.call` writes it once as an ONNX function and calls it: the node `qk` is in the function that the node `attention`
calls, in the function that `layers.7` calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

FUNCTION_DOMAIN = "haarkv"
CONTRIB_DOMAIN = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""

Scope = Callable[..., Sequence[str]]
"""scope(graph, *inputs) -> outputs, all names of values."""


@dataclass(frozen=True)
class TensorType:
    """Element type, as ONNX counts them, and sizes or their names."""

    dtype: int
    shape: tuple[int | str, ...]

    @property
    def sizes(self) -> list[int]:
        return [int(size) for size in self.shape]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * helper.tensor_dtype_to_np_dtype(self.dtype).itemsize

    def info(self, name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, self.dtype, self.shape)


@dataclass(frozen=True)
class StoredWeights:
    """Name of a file of weights, and the byte offset of each."""

    file: str
    offsets: Mapping[str, int]


@dataclass
class Graph:
    """A graph under construction.

    Attributes:
        opset: version of the standard operators.
        weights: tensors outside the graph, in the order of their first use.
    """

    opset: int
    weights: dict[str, TensorType] = field(default_factory=dict)
    _nodes: list[onnx.NodeProto] = field(default_factory=list)
    _constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    _bodies: dict[str, onnx.FunctionProto] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _inside_function: bool = False

    # -- What scopes are written with ----------------------------------------------------------------------------------
    def node(self, name: str, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output, of the node's name."""
        return self.nodes(name, op, inputs, 1, **attributes)[0]

    def nodes(self, name: str, op: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs, `name.0` and so on."""
        results = _outputs(self._claim(name), outputs)
        self._nodes.append(helper.make_node(op, inputs, results, name=name, **attributes))
        return results

    def constant(self, name: str, value: np.ndarray) -> str:
        """A small constant, one for each name."""
        path = f"constants/{name}"
        tensor = numpy_helper.from_array(value, path)
        if self._inside_function and path not in self._constants:
            self._nodes.append(helper.make_node("Constant", [], [path], name=path, value=tensor))
        if self._constants.setdefault(path, tensor) != tensor:
            raise ValueError(f"two constants are called {name}")
        return path

    def weight(self, name: str, kind: TensorType) -> str:
        """A tensor outside the graph."""
        if self.weights.setdefault(name, kind) != kind:
            raise ValueError(f"two weights are called {name}")
        return name

    def reduce(self, name: str, op: str, x: str) -> str:
        """Reduce the last axis to one element; the axis is an attribute of older operators, an input of newer ones."""
        if self.opset >= (13 if op == "ReduceSum" else 18):
            return self.node(name, op, x, self.integers([-1]), keepdims=1)
        return self.node(name, op, x, axes=[-1], keepdims=1)

    def scalar(self, value: float, dtype: type[np.generic] = np.float32) -> str:
        return self.constant(f"{np.dtype(dtype).name}_{value:g}", np.array(value, dtype))

    def integers(self, values: Sequence[int]) -> str:
        return self.constant(f"int64s_{'_'.join(map(str, values))}", np.array(values, np.int64))

    def reshape(self, name: str, x: str, shape: Sequence[int]) -> str:
        """Reshape; 0 keeps a size, one -1 takes what is left."""
        return self.node(name, "Reshape", x, self.integers(shape))

    def call(self, name: str, function: str, scope: Scope, **inputs: str) -> list[str]:
        """Call a scope, by a node of that name; all calls of a `function` must mean the same nodes."""
        body = self._bodies.get(function) or self._write(function, scope, list(inputs))
        if list(body.input) != list(inputs):
            raise ValueError(f"{function} takes {list(body.input)}, not {list(inputs)}")
        results = _outputs(self._claim(name), len(body.output))
        self._nodes.append(helper.make_node(function, list(inputs.values()), results, name=name, domain=FUNCTION_DOMAIN))
        return results

    # -- The end of it -------------------------------------------------------------------------------------------------
    def model(
        self,
        name: str,
        inputs: dict[str, TensorType],
        outputs: dict[str, TensorType],
        external: StoredWeights | None,
    ) -> onnx.ModelProto:
        """The model, without the values of its weights: those not in `external` are inputs, after all others."""
        lie = external.offsets if external else {}
        all_inputs = inputs | {weight: kind for weight, kind in self.weights.items() if weight not in lie}
        outside = [_outside(weight, self.weights[weight], external) for weight in self.weights if external and weight in lie]
        graph = helper.make_graph(
            self._nodes, name, [kind.info(value) for value, kind in all_inputs.items()],
            [kind.info(value) for value, kind in outputs.items()], initializer=[*self._constants.values(), *outside],
        )  # fmt: skip
        imports = self._imports([*self._nodes, *(node for function in self._bodies.values() for node in function.node)])
        return helper.make_model(
            graph, opset_imports=imports, functions=list(self._bodies.values()), producer_name="haarkv",
            ir_version=max(_OLDEST_IR_WITH_FUNCTIONS, helper.find_min_ir_version_for(imports, ignore_unknown=True)),
        )  # fmt: skip

    # -- Inside --------------------------------------------------------------------------------------------------------
    def _imports(self, nodes: Iterable[onnx.NodeProto]) -> list[onnx.OperatorSetIdProto]:
        others = [FUNCTION_DOMAIN]
        others += [CONTRIB_DOMAIN] * any(node.domain == CONTRIB_DOMAIN for node in nodes)
        return [helper.make_opsetid("", self.opset), *(helper.make_opsetid(domain, 1) for domain in others)]

    def _claim(self, name: str) -> str:
        if name in self._names:
            raise ValueError(f"two values are called {name}")
        self._names.add(name)
        return name

    def _write(self, function: str, scope: Scope, parameters: list[str]) -> onnx.FunctionProto:
        nodes: list[onnx.NodeProto] = []
        inner = Graph(self.opset, self.weights, nodes, {}, self._bodies, set(parameters), True)
        results = scope(inner, **{parameter: parameter for parameter in parameters})
        body = helper.make_function(FUNCTION_DOMAIN, function, parameters, list(results), nodes, self._imports(nodes))
        self._bodies[function] = body
        return body


_OLDEST_IR_WITH_FUNCTIONS = 8


def _outputs(path: str, count: int) -> list[str]:
    return [path] if count == 1 else [f"{path}.{index}" for index in range(count)]


def _outside(name: str, kind: TensorType, external: StoredWeights) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=kind.dtype, dims=kind.sizes, data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", external.file), ("offset", external.offsets[name]), ("length", kind.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
