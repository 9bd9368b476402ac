"""The names of ways to interpolate, which are looked up as modules are imported."""

from enum import Enum

InterpolationMode = Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")
