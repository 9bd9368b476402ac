"""What a folder says twice, or says nothing by: each is named or told in one line."""

import pytest
import torch
from checkpoints import EMBEDDING, write_checkpoint

import tq
from haarkv.models import catalog
from haarkv.tq_ops.errors import InputError

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_a_head_of_another_shape_is_not_dropped(tmp_path):
    def with_head(tensors):
        tensors["lm_head.weight"] = torch.zeros(tensors[EMBEDDING].shape[0] - 1, tensors[EMBEDDING].shape[1])

    folder = write_checkpoint(tmp_path / "m", config={"tie_word_embeddings": True}, mutate=with_head)
    with pytest.warns(UserWarning, match="another head"), pytest.raises(InputError, match=r"lm_head\.weight"):
        tq.load(folder, kv="tq4")


def test_an_empty_template_file_hides_none(tmp_path):
    folder = write_checkpoint(
        tmp_path / "m", tokenizer_config={"chat_template": TEMPLATE}, files={"chat_template.jinja": "\n"}
    )
    session = tq.load(folder, kv="tq4")
    assert bytes(session.encode(["a"])[0]).decode() == "[user]a"
    with pytest.raises(InputError, match="drop --parse-special"):
        session.encode(["a"], chat=False, parse_special=True)


def test_a_reference_to_a_snapshot_that_is_absent_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--a--b"
    (folder / "snapshots" / "old").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("new")
    with pytest.warns(UserWarning, match="no snapshot 'new', which refs/main names; the newest is taken, old"):
        assert catalog._downloaded("a/b") == folder / "snapshots" / "old"
