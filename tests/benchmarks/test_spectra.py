"""The figure of a calibration's spectra, and the gain that it promises, against drawn vectors."""

from dataclasses import replace

import pytest
import torch
from bases import calibration

from haarkv.benchmarks import spectra
from haarkv.codebooks import haar_rotation
from haarkv.codebooks.learned import Basis, learn
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, calibration_of, dumps
from haarkv.tq_ops.kv.plan import ModelShape


def test_a_rotation_promises_nothing_over_itself():
    rotation = haar_rotation(0, 128).float().unsqueeze(0)
    basis = Basis(torch.zeros(1, 128), rotation, rotation.mT.contiguous(), torch.ones(1, 128))
    assert spectra.flatness_db(basis).item() == pytest.approx(0.0, abs=1e-6)
    assert spectra.promised_db(basis).item() == pytest.approx(0.0, abs=0.02)


def test_the_promise_is_near_what_gaussian_vectors_lose():
    """x has uneven channels, and errors cost unevenly in other ones."""
    generator = torch.Generator().manual_seed(0)
    mixed = [torch.randn(128, 128, generator=generator, dtype=torch.float64) for _ in range(2)]
    metric, spread = (m @ torch.diag(torch.logspace(0, -4, 128).double()) @ m.T for m in mixed)
    basis = learn(metric.unsqueeze(0), spread.unsqueeze(0), torch.zeros(1, 128), 0.0)
    x = torch.randn(4000, 128, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(spread).T
    x = x.float().unsqueeze(0)

    def cost(kv_format):
        error = (kv_format.dequantize(kv_format.quantize(x, 0), 0) - x).double()[0]
        return float(((error @ metric) * error).sum())

    # The promise is of one size; three sizes gain more.
    three = Calibration((basis,), (basis,), "drawn").format("k", 128)
    learned = three.altered(lambda of: replace(of, gains=(1.0,)))
    gain = 10 * torch.tensor(cost(formats.get("tq4")) / cost(learned)).log10()
    assert float(gain) > 3
    assert cost(three) < 0.8 * cost(learned)
    assert spectra.promised_db(basis).item() == pytest.approx(float(gain), abs=2)


def test_the_figure_is_the_same_each_time(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    made_up = calibration(2, 2, 32)
    file = CalibrationFile(calibration_of(made_up.k, made_up.v), ModelShape.uniform(2, 2, 32, 64, 257), "f")
    (tmp_path / "it.safetensors").write_bytes(dumps(file))
    drawn = []
    for _ in range(2):
        spectra.main([str(tmp_path / "it.safetensors"), str(tmp_path / "it.svg")])
        drawn.append((tmp_path / "it.svg").read_text(encoding="utf-8"))
    assert drawn[0] == drawn[1]
    assert "<svg" in drawn[0]
    assert capsys.readouterr().out.count("AM/GM") == 8
