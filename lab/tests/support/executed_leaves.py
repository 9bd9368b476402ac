"""What the tests of executed C++ share: what is known of every kernel function after a run, and bytes compared."""

import torch

ROWS = {}
"""Program -> rows of (scope, kind of core, file, tasks that called it, what its program's outputs were found to be): the table
that the tests end with. Kernel functions that only declare are not in it."""


def wrong_bytes(ours, theirs):
    """How many bytes of two tensors differ."""
    return int((ours.view(torch.uint8) != theirs.view(torch.uint8)).sum())


LAST_PLACES = 4
"""Units in the last place by which an FP32 norm may differ, a sum of 128 squares in another order. Measured: 3."""


BF16_AT_TIES = 8
"""So many numbers of a layer's K or V may round to the other neighbour in BF16: FP32 sums in another order. Measured: 2 of
11,008."""


def wrong_numbers(ours, theirs):
    """How many numbers of two tensors differ; of FP32, positive, by more than `LAST_PLACES`, of BF16 by more than ties."""
    if theirs.dtype == torch.bfloat16:
        off = (ours.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
        return int((off > 0).sum()) if (off > 1).any() or (off > 0).sum() > BF16_AT_TIES else 0
    if theirs.dtype == torch.float32:
        return int(((ours.view(torch.int32) - theirs.view(torch.int32)).abs() > LAST_PLACES).sum())
    return wrong_bytes(ours, theirs)


def wrong_stores(emission, arguments, goldens):
    """Argument -> wrong bytes in it, of those that the program writes."""
    outputs = emission.outputs(arguments)
    return {name: wrong_bytes(outputs[name], golden) for name, golden in goldens.items()}


def functions(emission):
    """Symbol -> the kernel functions that share it; only those that do something."""
    leaves_by_symbol = {}
    for leaf in emission.leaves:
        if not leaf.idle:
            leaves_by_symbol.setdefault(leaf.symbol, []).append(leaf)
    return leaves_by_symbol


def without(machine, leaves):
    """All arguments after a run in which some kernel functions were left out, as a bug would."""
    hashes = {leaf.hash for leaf in leaves}
    return machine.run(skip=lambda task: task.leaf in hashes)
