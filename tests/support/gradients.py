"""Gradients as arrays."""


def as_array(gradient):
    """Return a gradient as an array, also where it is a function that writes it."""
    return gradient(None, False) if callable(gradient) else gradient
