"""Model, executors and plans of a bring-up, opened when a rung first needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from haarkv.engine.plans import plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model, read_config
from haarkv.models.text import Tokenizer, load_tokenizer
from haarkv.models.weights import fingerprint
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.layers.self_test import first_layers

_TEXT = "def read(path, mode='r'):\n    with open(path, mode) as file:\n        return file.read()\n\n\n"
_REPEATS = 100
# Room for the calls of a measurement behind the longest context.
_ROOM = 32


class Workbench:
    """Model, executors and plans of a bring-up; InputError if they do not exist or do not fit together.

    What is left out has defaults, few and short in a simulator.

    Args:
        tell: shows what is being done.
        executor, device: as in `executors.catalog.create`; the executor's first device unless given.
        caches: by name, in the order in which they run; `tq4` unless given.
        new_tokens, contexts: of greedy text and of latency.
    Attributes:
        steps: decode steps of a validation.
        longest: tokens behind which there is room for the calls of a measurement.
        contexts: tokens in the cache of each measurement, as far as the model has room.
    """

    def __init__(
        self, tell: Callable[[str], None], executor: str, device: str | None = None, *, model: str = "tiny",
        layers: int | None = None, caches: Mapping[str, KVSpec] | None = None, prompts: Sequence[str] = (),
        new_tokens: int | None = None, contexts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.tell, self.name, self._executor, self._depth = tell, model, executor, layers
        self.device = device or catalog.info(executor).devices[0]
        self.config = read_config(model, layers)
        caches = caches or {KVSpec().kv: KVSpec()}
        self.plans = {name: plan_for(spec, self.config) for name, spec in caches.items()}
        for plan in self.plans.values():
            catalog.check(executor, self.config, plan, self.device)
        self.longest = self.config.max_position_embeddings - _ROOM
        if contexts and max(contexts) > self.longest:
            raise InputError(f"{model} has room for {self.longest} tokens and the calls that are timed, not {max(contexts)}")
        if not all(prompts):
            raise InputError("a prompt is empty; give it some text, or leave --prompt out")
        # The prompt of a card reaches beyond a block and a tile of prefill, so that it meets both.
        self.steps, repetitions, default_tokens, default_contexts = (
            (1, 1, 3, [40]) if self.device == catalog.SIMULATOR else (4, 8, 32, [512, 4096])
        )
        self.prompts = prompts or (_TEXT * repetitions,)
        self.new_tokens = new_tokens or default_tokens
        self.contexts = sorted({min(context, self.longest) for context in contexts or default_contexts})
        self._executors: dict[int, Executor] = {}
        for spec in caches.values():
            if spec.weights:
                spec.require_weights(fingerprint(self.model.weights.named_tensors()))

    @property
    def repeats(self) -> int:
        """Further runs of the first layer, whose bits must be equal; none in a simulator."""
        return _REPEATS if catalog.info(self._executor).has_simulator and self.device != catalog.SIMULATOR else 0

    @cached_property
    def model(self) -> DecoderModel:
        """On the host, in a dtype that executor and reference both take."""
        self.tell(f"loading {self.name}")
        return load_model(self.name, catalog.info(self._executor).dtype, self._depth)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.name, self.config)

    @cached_property
    def first_layer(self) -> DecoderModel:
        return first_layers(self.model, 1)

    def plans_of(self, model: DecoderModel) -> dict[str, KVPlan]:
        """`plans` of the whole model's layers, or of its first layer alone."""
        depth = model.config.num_layers
        return {name: replace(plan, layers=plan.layers[:depth]) for name, plan in self.plans.items()}

    def executor(self, model: DecoderModel) -> Executor:
        """The executor on trial for the whole model or its first layer; one serves every plan."""
        depth = model.config.num_layers
        if depth not in self._executors:
            self.tell(f"opening {self._executor}")
            first_plan = next(iter(self.plans_of(model).values()))
            self._executors[depth] = catalog.create(
                self._executor, model, first_plan, self.device, lambda program: self.tell(f"compiling {program}")
            )
        return self._executors[depth]
