"""`tq serve` before vLLM is called."""

import pytest

from haarkv.serving import serve as serving
from tq.cli import main


def test_a_model_in_the_home_folder_reaches_vllm_by_its_path(monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(serving, "find_spec", lambda _: object())

    def stop(args):
        raise InterruptedError(args[0])

    monkeypatch.setattr(serving, "_parsed", stop)
    with pytest.raises(InterruptedError, match=f"^{tmp_path / 'model'}$"):
        serving.serve("~/model", "tq4", [])


@pytest.mark.parametrize("model", ["~/absent", "~no_such_user/model"])
def test_a_folder_that_no_home_has_is_refused_as_it_was_written(monkeypatch, tmp_path, capsys, model):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(serving, "find_spec", lambda _: object())
    assert main(["serve", model]) == 2
    assert f"no such model: {model};" in capsys.readouterr().err
