"""The error of a codebook on Gaussian numbers, by its formula."""

import math

import torch

from haarkv.codebooks.lloyd_max import Codebook


def gaussian_distortion(codebook: Codebook, sigma: float) -> float:
    """Mean squared error of quantizing N(0, sigma) with this codebook, as a fraction of sigma**2, in float64."""
    c = codebook.centroids.double() / sigma
    inner = codebook.boundaries.double() / sigma
    infinity = c.new_full((1,), math.inf)
    low, high = torch.cat([-infinity, inner]), torch.cat([inner, infinity])
    pdf_low, pdf_high = (torch.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in (low, high))
    mass = (torch.erf(high / math.sqrt(2)) - torch.erf(low / math.sqrt(2))) / 2
    first = pdf_low - pdf_high
    finite_low, finite_high = (torch.where(e.isinf(), torch.zeros_like(e), e) for e in (low, high))
    second = mass + finite_low * pdf_low - finite_high * pdf_high
    return float((second - 2 * c * first + c * c * mass).sum())
