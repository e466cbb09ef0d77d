"""Gradients as arrays."""

from minitransformer.engine.autograd import RowGradient


def as_array(gradient):
    """Return a gradient as an array, also where it is that of a few rows."""
    return gradient.dense() if isinstance(gradient, RowGradient) else gradient
