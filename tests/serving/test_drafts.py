"""Drafts that bring attention layers of their own, whose pages lie beside the model's: the text is the model's."""

from __future__ import annotations

import json

import pytest
from vllm_drafts import eagle3
from vllm_judge import Judge, prompts
from vllm_server import serving

NEW_TOKENS = 48
ASKED = prompts(5, (7, 40, 130, 200, 300))


@pytest.mark.vllm_server
def test_drafts_of_an_eagle_head_change_no_token(tmp_path, judge: Judge, record_property):
    drafts = {"method": "eagle3", "model": str(eagle3(tmp_path / "eagle3")), "num_speculative_tokens": 2}
    with serving(tmp_path / "log", "--speculative-config", json.dumps(drafts)) as server:
        verdict = judge.judge(ASKED, server.complete(ASKED, NEW_TOKENS))
        record_property("eagle3", str(verdict))
        assert verdict.passes, verdict
        assert server.metrics()["vllm:spec_decode_num_draft_tokens_total"] > NEW_TOKENS
