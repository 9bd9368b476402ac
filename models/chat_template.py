"""Chat templates: programs that come with a model. They run in a process of their own, which may not run long or take much.

jinja2's sandbox keeps a template from files and from Python's internals. It does not keep it from a loop without end, from
strings of terabytes, or from nesting until the interpreter's stack is gone; what the process may take does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from haarkv.models.limited import TooMuchError, answer
from haarkv.tq_ops.errors import InputError


def render(source: str, conversations: Sequence[Sequence[Mapping[str, str]]], special: Mapping[str, str]) -> list[str]:
    """Texts of conversations, each up to where the answer begins.

    Args:
        source: of the template.
        conversations: messages, each with `role` and `content`.
        special: further names that the template sees, such as `eos_token`.
    Raises:
        InputError: the template cannot be read, refuses a conversation, or does not end; in one line.
    """
    try:
        said = answer({"source": source, "conversations": conversations, "special": special})
    except TooMuchError as error:
        raise _refused(str(error)) from None
    if "error" in said:
        raise _refused(said["error"])
    return [str(text) for text in said["texts"]]


def _refused(reason: str) -> InputError:
    return InputError(f"the chat template cannot be used: {reason}; --no-chat goes without it")
