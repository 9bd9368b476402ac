"""Model, executors and plans of a bring-up, opened when a rung first needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from haarkv.engine.plans import plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model, read_config
from haarkv.models.text import load_tokenizer
from haarkv.models.weights import fingerprint
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.layers.self_test import first_layers

Tell = Callable[[str], None]

_TEXT = "def read(path, mode='r'):\n    with open(path, mode) as file:\n        return file.read()\n\n\n"
# Beyond a block and a tile of prefill, so that a card meets both.
_PROMPT_REPEATS = 8
_CONTEXTS, _SIMULATED_CONTEXTS = (512, 4096), (40,)
_NEW_TOKENS, _SIMULATED_NEW_TOKENS = 32, 3
_STEPS, _SIMULATED_STEPS = 4, 1
_REPEATS = 100
# Room for the calls of a measurement behind the longest context.
_ROOM = 32


@dataclass(frozen=True)
class Request:
    """What to bring up; what is left out has defaults, few and short in a simulator.

    Attributes:
        executor, device: as in `executors.catalog.create`; the executor's first device unless given.
        caches: by name; `tq4` unless given.
        new_tokens, contexts: of greedy text and of latency.
    """

    executor: str
    device: str | None = None
    model: str = "tiny"
    layers: int | None = None
    caches: Mapping[str, KVSpec] = field(default_factory=lambda: {KVSpec().kv: KVSpec()})
    prompts: tuple[str, ...] = ()
    new_tokens: int | None = None
    contexts: tuple[int, ...] = ()


class Workbench:
    """Model, executors and plans of a request; InputError if they do not exist or do not fit together."""

    def __init__(self, request: Request, tell: Tell) -> None:
        self.request, self.tell = request, tell
        if request.executor == ReferenceExecutor.name:
            raise InputError("the reference compared with itself proves nothing; name another --executor")
        self.device = request.device or catalog.info(request.executor).devices[0]
        self.config = read_config(request.model, request.layers)
        for plan in self.plans.values():
            catalog.check(request.executor, self.config, plan, self.device)
        if request.contexts and max(request.contexts) > self.longest:
            longest_context = max(request.contexts)
            raise InputError(
                f"{request.model} has room for {self.longest} tokens and the calls that are timed, not {longest_context}"
            )
        if not all(request.prompts):
            raise InputError("a prompt is empty; give it some text, or leave --prompt out")
        self._executors: dict[int, Executor] = {}
        for spec in request.caches.values():
            if spec.weights:
                spec.require_weights(fingerprint(self.model.weights.named_tensors()))

    # -- What is run ---------------------------------------------------------------------------------------------------------
    @property
    def simulated(self) -> bool:
        """Times mean nothing then."""
        return self.device == catalog.SIMULATOR

    @cached_property
    def plans(self) -> dict[str, KVPlan]:
        """By format name, in the order in which they run."""
        return {name: plan_for(spec, self.config) for name, spec in self.request.caches.items()}

    @property
    def prompts(self) -> tuple[str, ...]:
        return self.request.prompts or (_TEXT * (1 if self.simulated else _PROMPT_REPEATS),)

    @property
    def steps(self) -> int:
        """Decode steps of a validation."""
        return _SIMULATED_STEPS if self.simulated else _STEPS

    @property
    def repeats(self) -> int:
        """Further runs of the first layer, whose bits must be equal; none in a simulator."""
        return _REPEATS if catalog.info(self.request.executor).has_simulator and not self.simulated else 0

    @property
    def new_tokens(self) -> int:
        return self.request.new_tokens or (_SIMULATED_NEW_TOKENS if self.simulated else _NEW_TOKENS)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens in the cache of each measurement, as far as the model has room."""
        requested_contexts = self.request.contexts or (_SIMULATED_CONTEXTS if self.simulated else _CONTEXTS)
        return tuple(sorted({min(context, self.longest) for context in requested_contexts}))

    @property
    def longest(self) -> int:
        """Tokens behind which there is room for the calls of a measurement."""
        return self.config.max_position_embeddings - _ROOM

    # -- What runs it --------------------------------------------------------------------------------------------------------
    @cached_property
    def model(self) -> DecoderModel:
        """On the host, in a dtype that executor and reference both take."""
        self.tell(f"loading {self.request.model}")
        return load_model(self.request.model, catalog.info(self.request.executor).dtype, self.request.layers)

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
            self.tell(f"opening {self.request.executor}")
            name, on_program = self.request.executor, lambda program: self.tell(f"compiling {program}")
            first_plan = next(iter(self.plans_of(model).values()))
            self._executors[depth] = catalog.create(name, model, first_plan, self.device, on_program)
        return self._executors[depth]

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def token_ids(self) -> list[list[int]]:
        tokenizer = load_tokenizer(self.request.model, self.config)
        return [tokenizer.encode(prompt) for prompt in self.prompts]
