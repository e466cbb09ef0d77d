"""Gradients as arrays."""


def as_array(gradient):
    """Return a gradient as an array, also where it is a function that adds it."""
    return gradient(None) if callable(gradient) else gradient
