"""Compiles ahead as on a GPU, without one, and prints what was asked of the compiler, and launched, then and later.

A process of its own: where Triton has been imported to interpret, it does not compile.
"""

import json
import sys
import threading

import torch
from cuda_launches import TAIL, TQ4, Nothing, learned_spec, record_launches, shaped_model
from small_models import small_config, small_model

from haarkv.executors.cuda import CudaExecutor
from haarkv.models.base import new_cache

ORDERS = {"tq4": TQ4, "tail": TAIL, "learned": learned_spec("k=lr3,v=tq4", 64, 2, tail=32, sink=4), "short": TQ4}
LATER = 400, 33, 11, 2, 1
"""New tokens of what comes later: other lengths than those that are compiled for."""


def main(kv: str) -> None:
    launches, threads = [], set()

    class CountingKernel(Nothing):
        def run(self, *_: object) -> None:
            launches.append(1)

    def kernel(_asked: object) -> Nothing:
        threads.add(threading.get_ident())
        return CountingKernel()

    model = small_model(small_config(num_layers=2, head_dim=64, max_position_embeddings=60), dtype=torch.bfloat16)
    model = model if kv == "short" else shaped_model(64, torch.bfloat16, 2)
    longest = model.config.max_position_embeddings
    plan = ORDERS[kv].plan(2)
    with record_launches(90, kernel) as compilations:
        executor = CudaExecutor(model, interpreted=True)
        executor.simulated = False
        messages = []
        executor.compile_ahead(plan, messages.append)
        before = {
            "asked": len(compilations),
            "launched": len(launches),
            "said": messages,
            "here": threading.get_ident() in threads,
        }
        cache, paging = new_cache(model.config, plan, sequences=1, tokens=min(600, longest), device=executor.device)
        for new in LATER:
            sequence, new = paging.add(), min(new, cache.most_new_tokens or new, longest)
            with torch.inference_mode():
                hidden = executor.forward(torch.zeros(new, dtype=torch.int64), paging.batch([sequence], [new]), cache)
                executor._model.head(hidden, executor._table)
            paging.free(sequence)
        print(json.dumps({**before, "later": len(compilations) - before["asked"], "launches": len(launches)}))


if __name__ == "__main__":
    main(sys.argv[1])
