"""Continue a prompt with graphs that `tq export` wrote: python run_onnx.py FOLDER PROMPT [TOKENS]. Needs nothing of haarkv."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

folder, prompt, wanted = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 32
config = json.loads((folder / "export.json").read_text())["config"]
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
options = ort.SessionOptions()
options.add_free_dimension_override_by_name("batch", 1)  # with known sizes a session opens several times faster
prefill, decode = (ort.InferenceSession(folder / f"{phase}.onnx", options) for phase in ("prefill", "decode"))
ids = tokenizer.encode(prompt).ids

# One sequence in one block that is as long as its context: the contiguous special case of a paged cache.
shape = (1, config["num_kv_heads"], len(ids) + wanted, config["head_dim"] // 2)
cache = {
    value.name: np.zeros(shape if value.name.endswith("codes") else shape[:3], "u1" if value.name.endswith("codes") else "f2")
    for value in decode.get_inputs() if value.name.startswith("layers.")
}  # fmt: skip
table, stored, text, names = np.zeros((1, 1), np.int32), 0, [], [value.name for value in decode.get_outputs()]
feed = {"input_ids": np.array([ids]), "last_rows": np.array([len(ids) - 1], np.int32)}
session = prefill
while True:
    feed |= {"past_lens": np.array([stored], np.int32), "block_table": table, **cache}
    made = dict(zip(names, session.run(names, feed), strict=True))
    new = feed["input_ids"].shape[1]
    for name, field in cache.items():
        prefix, kind = name.rsplit(".", 1)
        field[0, :, stored : stored + new] = made[f"{prefix}.new_{kind}"][0].swapaxes(0, 1)
    stored += new
    text.append(int(made["logits"][0].argmax()))
    if len(text) == wanted or text[-1] in config["eos_token_ids"]:
        break
    session, feed = decode, {"input_ids": np.array([text[-1:]])}
print(json.dumps({"token_ids": text, "text": tokenizer.decode(text)}))
