"""No silent collapse: planted faults are balanced away, or told of by layer, or refused; without them nothing is said."""

from dataclasses import replace

import outliers
import pytest
import torch
from planted import dead_head, run, save_tiny, text, tiny, tiny_qwen2, token_ids

from haarkv.engine import collapse
from haarkv.engine.loading import load
from haarkv.models.balance import balance
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.probe import logit_errors, stored_error, weighted_error

PROMPT = "\n".join(text()[:2000].splitlines()[:12])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("planted")
    models = {
        "even": tiny(),
        "outliers": outliers.outlier_channels(tiny(), 30),
        "far_outliers": outliers.outlier_channels(tiny(), 100),
        "biases": outliers.key_biases(tiny_qwen2(), 800, (1, 4)),
        "huge_biases": outliers.key_biases(tiny_qwen2(), 3000, (1, 4)),
        "dead_head": dead_head(tiny()),
    }
    return {name: save_tiny(model, root / name) for name, model in models.items()}


def session(folder, said, **options):
    return load(folder, executor="reference", on_warning=said.append, **options)


def generated(session, said):
    return session.generate(PROMPT, max_new_tokens=8, chat=False, on_warning=said.append).completions[0].token_ids


def kl(model, of, kv):
    """Mean KL of what two models predict after each of some tokens, the first from an exact cache."""
    a, b = (run(m, token_ids(256), kv=name).log_softmax(-1) for m, name in ((model, "fp32"), (of, kv)))
    return float((a.exp() * (a - b)).sum(-1).mean())


class TestSession:
    def test_of_an_even_model_nothing_is_said_and_nothing_changes(self, folders):
        said = []
        one = session("tiny", said)
        ids = generated(one, said)
        assert said == []
        assert one.uneven == ()
        assert generated(session("tiny", said, balance=False), said) == ids
        assert one.guard._probed.keys() == {(layer, side) for layer in range(6) for side in "KV"}
        assert generated(session(folders["dead_head"], said), said)
        assert said == []

    @pytest.mark.parametrize("name", ["outliers", "far_outliers"])
    def test_outliers_are_balanced_and_said_in_one_line(self, folders, name):
        said, unplanted = [], []
        ids = generated(session(folders[name], said), said)
        assert len(said) == 1
        assert "balanced K of layers 0 to 5" in said[0]
        assert "V of layers 0 to 5" in said[0]
        assert "--balance off" in said[0]
        assert ids == generated(session("tiny", unplanted), unplanted)

    def test_without_balance_outliers_are_warned_of(self, folders):
        said = []
        generated(session(folders["outliers"], said, balance=False), said)
        assert any("logits are off" in line for line in said)
        assert all("leave balance on" in line and "\n" not in line for line in said)
        layers = {int(n) for line in said for n in line.split("K of layer")[1].split(" suffers")[0] if n.isdigit()}
        assert layers >= {0, 1, 2, 5}

    def test_without_balance_far_outliers_are_refused_by_their_weights(self, folders):
        with pytest.raises(InputError, match=r"K of layers 0 to 5 suffers in tq4.*V of layers.*--allow-collapse"):
            session(folders["far_outliers"], [], balance=False)
        said = []
        assert generated(session(folders["far_outliers"], said, balance=False, allow_collapse=True), said)
        assert any("suffers" in line for line in said)

    def test_biases_of_some_layers_are_named(self, folders):
        said = []
        generated(session(folders["biases"], said), said)
        assert "balanced K of layers 1 and 4" in said[0]
        assert any("K of layer" in line and "--kv-skip-layers" in line for line in said[1:])
        with pytest.raises(InputError, match="garbage: K of layers 1 and 4 suffers"):
            session(folders["biases"], [], balance=False)

    def test_what_only_the_first_tokens_show_is_refused_before_any_text(self, folders, monkeypatch):
        monkeypatch.setattr(collapse, "expected_losses", lambda *_: [])
        said, tokens = [], []
        one = session(folders["huge_biases"], said)
        with pytest.raises(InputError, match=r"K of layers 1 and 4 suffers in tq4.*--kv-skip-layers 1,4"):
            one.generate(PROMPT, max_new_tokens=4, chat=False, on_token=lambda *given: tokens.append(given))
        assert tokens == []

    def test_the_advice_helps(self, folders):
        said = []
        generated(session(folders["huge_biases"], said, kv=KVSpec("tq4", skip_layers=(1, 4))), said)
        assert said == []

    def test_a_short_prompt_is_no_proof(self, folders):
        said = []
        one = session(folders["biases"], said, balance=False, allow_collapse=True)
        before = len(said)
        one.generate("def", max_new_tokens=2, chat=False, on_warning=said.append)
        assert one.guard._probed == {}
        assert len(said) == before

    def test_python_warns_unless_told_whom_to_tell(self, folders):
        with pytest.warns(UserWarning, match="balanced K of layers 0 to 5"):
            load(folders["outliers"], executor="reference")

    def test_every_executor_runs_a_balanced_model(self, folders):
        said = []
        reference_ids = generated(session(folders["outliers"], said), said)
        ids = load(folders["outliers"], executor="cpu", on_warning=said.append).generate(PROMPT, max_new_tokens=8, chat=False)
        assert ids.completions[0].token_ids == reference_ids


class TestLoss:
    def test_balance_keeps_the_divergence_of_the_unplanted_model(self):
        base = kl(tiny(), tiny(), "tq4")
        uneven = outliers.outlier_channels(tiny(), 50)
        assert kl(tiny(), uneven, "tq4") > 10 * base
        assert kl(tiny(), balance(uneven).model, "tq4") < 1.5 * base

    def test_of_biases_too(self):
        uneven = outliers.key_biases(tiny_qwen2(), 400, (1, 4))
        assert kl(uneven, balance(uneven).model, "tq4") < kl(uneven, uneven, "tq4") / 4

    def test_expected_is_near_what_the_first_tokens_show(self):
        model, plan = outliers.outlier_channels(tiny(), 100), KVSpec("tq4").plan(6)
        moments = balance(model, lambda *_: False).moments
        expected = {
            (loss.layer, loss.side): loss.amount
            for loss in collapse.expected_losses(plan, moments, model.config.attentions[0].scale)
        }
        guard = collapse.Guard(plan, moments, model.config.attentions[0].scale, allow=True)
        run(model, token_ids(128), guard.table(reference), "tq4")
        assert expected.keys() == guard._probed.keys()
        for key, loss in guard._probed.items():
            assert 0.5 < expected[key] / loss.amount < 2.0, key

    def test_a_logit_is_off_by_what_the_error_of_its_key_says(self):
        generator = torch.Generator().manual_seed(0)
        k, q = torch.randn(2, 8, 32, generator=generator), torch.randn(5, 6, 32, generator=generator)
        error = torch.randn(2, 8, 32, generator=generator)
        found = logit_errors(error, q, 0.25)
        for head in range(2):
            rows = []
            for token in range(5):
                for query in range(3):
                    exact, stored = ((x[head] @ q[token, 3 * head + query]) * 0.25 for x in (k, k + error))
                    rows.append((stored - exact) - (stored - exact).mean())
            assert torch.allclose(found[head], torch.stack(rows).square().mean(0).sqrt(), atol=1e-5)

    def test_channels_count_by_their_use(self):
        x, error = torch.ones(1, 4, 2), torch.tensor([[[3.0, 0.1]] * 4])
        assert weighted_error(error, x, torch.tensor([[0.0, 1.0]])) == pytest.approx(0.1)
        assert weighted_error(error, x, torch.tensor([[1.0, 0.0]])) == pytest.approx(3.0)
        assert weighted_error(error, torch.zeros_like(x), torch.ones(1, 2)) == 0

    def test_groups_are_stored_whole(self):
        x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(1))
        assert stored_error(formats.get("kivi2"), 0, x).shape == (2, 32, 64)
        assert stored_error(formats.get("kivi2"), 0, x[:, :31]) is None

    def test_sinks_are_told_from_the_rest(self):
        generator = torch.Generator().manual_seed(2)
        k, q = torch.randn(2, 64, 128, generator=generator), torch.randn(64, 4, 128, generator=generator)
        k[:, 0] *= 100
        found = collapse.key_loss(formats.get("tq4"), 0, k, q, 128**-0.5)
        assert found.suffers
        assert found.of_sinks
        assert "--kv-sink 4" in collapse.describe([found])
        assert not collapse.key_loss(formats.get("tq4"), 0, k, q, 128**-0.5, sink=4).suffers
        assert not replace(found, amount=0.1).suffers


@pytest.mark.parametrize("collapsed", [1, 2])
def test_text_collapses_where_a_quarter_of_the_layers_does(collapsed):
    """As Qwen2.5-Coder-0.5B shows, a few layers that lose their keys' biases are no garbage."""
    guard, said = collapse.Guard(KVSpec("tq4").plan(8), {}, 0.1), []
    losses = [collapse.Loss(layer, "K", "tq4", collapse.LOGITS, 8.3) for layer in range(collapsed)]
    if collapsed == 1:
        guard._judge(losses, said.append)
        assert said == [f"K of layer 0 suffers in tq4: logits are off by 8.3 nats; {said[0].split('; ')[1]}"]
        return
    with pytest.raises(InputError, match="text would be garbage: K of layers 0 and 1 suffers"):
        guard._judge(losses, said.append)
