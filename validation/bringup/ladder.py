"""The ladder itself: which rungs there are for a request, in order. Torch is imported when the lowest has passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from haarkv.validation.bringup.climb import Rung
from haarkv.validation.bringup.environment import environment, versions
from haarkv.validation.bringup.result import Found

if TYPE_CHECKING:
    from haarkv.validation.bringup.workbench import Workbench

_OPS = ("tq_ops",)
_MODEL = ("codebooks", "tq_ops", "models", "executors", "engine", "validation")


def ladder(
    bench: Callable[[], Workbench], executor: str, device: str | None, latency: Callable[[Workbench], Found]
) -> Iterator[Rung]:
    """Every rung, made when those beneath it have passed.

    Args:
        bench: makes the workbench of the request.
        executor, device: of the request.
        latency: the highest rung; measuring is another room's.
    Raises:
        InputError: whatever `bench` raises.
    """

    def load() -> object:
        return import_module("torch")

    yield Rung("environment", lambda: environment(executor, device, load), versions(executor), always=True)
    from haarkv.validation.bringup import kernels, layers, text

    made = bench()
    below = made.below_a_model(*_OPS)
    yield Rung("add", lambda: kernels.smallest_kernel(made), below)
    yield Rung("store", lambda: kernels.store(made), {**below, "formats": made.described})
    whole = made.of_the_model(*_MODEL, prompts=made.prompts_digest)
    yield Rung("layer", lambda: layers.one_layer(made), whole)
    yield Rung("head", lambda: layers.head(made), whole)
    yield Rung("teacher-forced", lambda: layers.teacher_forced(made), whole)
    yield Rung("free-running", lambda: layers.free_running(made), whole)
    yield Rung("text", lambda: text.greedy_text(made), {**whole, "new tokens": str(made.new_tokens)})
    timed = made.of_the_model(*_MODEL, "benchmarks", contexts=", ".join(map(str, made.contexts)))
    yield Rung("latency", lambda: latency(made), timed)
