"""No silent collapse: planted faults are balanced away, or told of by layer, or refused; without them nothing is said."""

from dataclasses import replace

import pytest
import torch
from planted import dead_head, key_biases, outlier_channels, run, save_tiny, text, tiny, token_ids

from haarkv.engine import collapse
from haarkv.engine.loading import load
from haarkv.models.balance import balance
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.probe import logit_errors, stored_error

PROMPT = "\n".join(text()[:2000].splitlines()[:12])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("planted")
    models = {
        "even": tiny(),
        "outliers": outlier_channels(30),
        "far_outliers": outlier_channels(100),
        "biases": key_biases(800, (1, 4)),
        "huge_biases": key_biases(3000, (1, 4)),
        "dead_head": dead_head(tiny()),
    }
    return {name: save_tiny(model, root / name) for name, model in models.items()}


def session(folder, warnings, executor="reference", **options):
    return load(folder, executor=executor, on_warning=warnings.append, **options)


def generate_ids(session, warnings):
    return session.generate(PROMPT, max_new_tokens=8, chat=False, on_warning=warnings.append).completions[0].token_ids


class TestSession:
    def test_of_an_even_model_nothing_is_said_and_nothing_changes(self, folders):
        warnings = []
        one = session("tiny", warnings)
        ids = generate_ids(one, warnings)
        assert warnings == []
        assert generate_ids(session("tiny", warnings, balance=False), warnings) == ids
        assert one.guard._layer_losses.keys() == {(layer, side) for layer in range(6) for side in "KV"}
        assert generate_ids(session(folders["dead_head"], warnings), warnings)
        assert warnings == []

    @pytest.mark.parametrize(("name", "executor"), [("outliers", "cpu"), ("far_outliers", "reference")])
    def test_outliers_are_balanced_and_nothing_is_said(self, folders, name, executor):
        warnings, plain_warnings = [], []
        ids = generate_ids(session(folders[name], warnings, executor), warnings)
        assert warnings == []
        assert ids == generate_ids(session("tiny", plain_warnings), plain_warnings)

    def test_without_balance_outliers_are_warned_of(self, folders):
        warnings = []
        generate_ids(session(folders["outliers"], warnings, balance=False), warnings)
        assert any("attention scores are off" in line for line in warnings)
        assert all("leave balance on" in line and "\n" not in line for line in warnings)
        layers = {int(n) for line in warnings for n in line.split("K of layer")[1].split(" suffers")[0] if n.isdigit()}
        assert layers >= {0, 1, 2, 5}

    def test_biases_of_some_layers_are_named(self, folders):
        warnings = []
        generate_ids(session(folders["biases"], warnings), warnings)
        assert any("K of layer" in line and "--kv-skip-layers" in line for line in warnings)
        with pytest.raises(InputError, match="garbage: K of layers 1 and 4 suffers"):
            session(folders["biases"], [], balance=False)

    def test_what_only_the_first_tokens_show_is_refused_before_any_text(self, folders, monkeypatch):
        monkeypatch.setattr(collapse, "expected_losses", lambda *_: [])
        warnings, tokens = [], []
        one = session(folders["huge_biases"], warnings)
        with pytest.raises(InputError, match=r"K of layers 1 and 4 suffers in tq4.*--kv-skip-layers 1,4"):
            one.generate(PROMPT, max_new_tokens=4, chat=False, on_token=lambda *given: tokens.append(given))
        assert tokens == []

    def test_the_advice_helps(self, folders):
        warnings = []
        generate_ids(session(folders["huge_biases"], warnings, kv=KVSpec("tq4", skip_layers=(1, 4))), warnings)
        assert warnings == []

    def test_a_short_prompt_is_no_proof(self, folders):
        warnings = []
        one = session(folders["biases"], warnings, balance=False, allow_collapse=True)
        before = len(warnings)
        one.generate("def", max_new_tokens=2, chat=False, on_warning=warnings.append)
        assert one.guard._layer_losses == {}
        assert len(warnings) == before


class TestLoss:
    def test_expected_is_near_what_the_first_tokens_show(self):
        model, plan = outlier_channels(100), KVSpec("tq4").plan(6)
        moments = balance(model, lambda *_: False)[1].moments
        expected = {
            (loss.layer, loss.side): loss.amount
            for loss in collapse.expected_losses(plan, moments, model.config.attentions[0].scale)
        }
        guard = collapse.Guard(plan, moments, model.config.attentions[0].scale, allow=True)
        run(model, token_ids(128), guard.table(reference), "tq4")
        assert expected.keys() == guard._layer_losses.keys()
        for key, loss in guard._layer_losses.items():
            assert 0.5 < expected[key] / loss.amount < 2.0, key

    def test_a_logit_is_off_by_what_the_error_of_its_key_says(self):
        generator = torch.Generator().manual_seed(0)
        k, q = torch.randn(2, 8, 32, generator=generator), torch.randn(5, 6, 32, generator=generator)
        error = torch.randn(2, 8, 32, generator=generator)
        errors = logit_errors(error, q, 0.25)
        for head in range(2):
            rows = []
            for token in range(5):
                for query in range(3):
                    exact, approx = ((x[head] @ q[token, 3 * head + query]) * 0.25 for x in (k, k + error))
                    rows.append((approx - exact) - (approx - exact).mean())
            assert torch.allclose(errors[head], torch.stack(rows).square().mean(0).sqrt(), atol=1e-5)

    def test_groups_are_stored_whole(self):
        x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(1))
        assert stored_error(formats.get("kivi2"), 0, x).shape == (2, 32, 64)
        assert stored_error(formats.get("kivi2"), 0, x[:, :31]) is None

    def test_sinks_are_told_from_the_rest(self):
        generator = torch.Generator().manual_seed(2)
        k, q = torch.randn(2, 64, 128, generator=generator), torch.randn(64, 4, 128, generator=generator)
        k[:, 0] *= 100
        loss = collapse.key_loss(formats.get("tq4"), 0, k, q, 128**-0.5)
        assert loss.suffers
        assert loss.in_sinks
        assert "--kv-sink 4" in collapse.describe([loss])
        assert not collapse.key_loss(formats.get("tq4"), 0, k, q, 128**-0.5, sink=4).suffers
        assert not replace(loss, amount=0.1).suffers


@pytest.mark.parametrize("count", [1, 2])
def test_text_collapses_where_a_quarter_of_the_layers_does(count):
    """As Qwen2.5-Coder-0.5B shows, a few layers that lose their keys' biases are no garbage."""
    guard, warnings = collapse.Guard(KVSpec("tq4").plan(8), {}, 0.1), []
    losses = [collapse.Loss(layer, "K", "tq4", collapse.LOGITS, 8.3) for layer in range(count)]
    if count == 1:
        guard._judge(losses, warnings.append)
        assert warnings == [f"K of layer 0 suffers in tq4: attention scores are off by 8.3; {warnings[0].split('; ')[1]}"]
        return
    with pytest.raises(InputError, match="text would be garbage: K of layers 0 and 1 suffers"):
        guard._judge(losses, warnings.append)
