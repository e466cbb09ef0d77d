"""Parameters: drawing them, naming them, and holding them all in flat buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module, parameters_changed


class Module:
    """A part of the model, with parameters: tensors that require a gradient.

    It finds them in its attributes, and in modules and lists of modules there.
    """

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (dotted name, parameter) in order of construction, tied ones once."""
        seen: set[int] = set()
        for name, parameter in self._walk(""):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def _walk(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.requires_grad:
                yield prefix + name, value
            elif isinstance(value, Module):
                yield from value._walk(f"{prefix}{name}.")
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    yield from item._walk(f"{prefix}{name}.{i}.")


class Initializer:
    """Makes parameters of one dtype; without a seed, zeros instead of random ones."""

    def __init__(self, seed: int | None, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self._rng = None if seed is None else np.random.default_rng(seed)

    def constant(self, value: float, *shape: int) -> Tensor:
        values = np.zeros(shape, self.dtype)
        if value:
            values.fill(value)
        return Tensor(values, requires_grad=True)

    def normal(self, deviation: float, *shape: int) -> Tensor:
        """Draw from N(0, deviation^2)."""
        if self._rng is None:
            return self.constant(0, *shape)
        return self._parameter(self._rng.normal(0, deviation, shape))

    def glorot_uniform(self, *shape: int, fan_out: int | None = None) -> Tensor:
        """Draw a matrix from U(-a, a), a = sqrt(6 / (fan_in + fan_out))."""
        if self._rng is None:
            return self.constant(0, *shape)
        bound = math.sqrt(6 / (shape[0] + (fan_out or shape[1])))
        return self._parameter(self._rng.uniform(-bound, bound, shape))

    def _parameter(self, values: np.ndarray) -> Tensor:
        return Tensor(values.astype(self.dtype), requires_grad=True)


class ParameterBuffer:
    """All parameters of a module in one flat array, and their gradients in another.

    The parameters become views into `data` and `grad`, so that the optimizer, the
    gradient norm and an all-reduce each work on one vector. With mixed precision on a
    GPU, layers read their matrices from `low_precision`, a 16-bit copy of `data`.

    Shapes: data, grad, low_precision [P]
    """

    def __init__(self, module: Module) -> None:
        self.parameters = dict(module.named_parameters())
        arrays = [p.data for p in self.parameters.values()]
        xp = array_module(arrays[0])
        self.data = xp.concatenate([array.reshape(-1) for array in arrays])
        self.move_to(xp)

    def move_to(
        self, xp: ModuleType, low_precision: np.dtype[Any] | None = None
    ) -> None:
        """Move the parameters to arrays of library `xp`, with gradients of zero.

        If a 16-bit type `low_precision` is given, layers read their matrices in it.
        Vectors are small and stay as exact as `data`.
        """
        self.data = xp.asarray(self.data)
        self.grad = xp.zeros(self.data.shape, self.data.dtype)
        self.low_precision: Array = None
        if low_precision is not None:
            self.low_precision = self.data.astype(low_precision)
        self._view_vectors()

    def move_into(self, data: Array, grad: Array) -> None:
        """Move the parameters into `data`, and collect gradients in `grad` from now on.

        Shapes: data, grad [P]
        """
        data[...] = self.data
        self.data, self.grad = data, grad
        self._view_vectors()
        self.data_changed()

    def _view_vectors(self) -> None:
        """Make the parameters views into the vectors."""
        views = self.views(self.data)
        if self.low_precision is not None:
            copies = self.views(self.low_precision)
            views.update({name: c for name, c in copies.items() if c.ndim == 2})
        gradients = self.views(self.grad)
        for name, parameter in self.parameters.items():
            parameter.data, parameter.grad = views[name], gradients[name]

    def collect_gradients(self, vector: Array) -> None:
        """Have `backward` add gradients to `vector`, laid out like `grad`, set to 0."""
        vector.fill(0)
        self.grad = vector
        for name, gradient in self.views(vector).items():
            self.parameters[name].grad = gradient

    def data_changed(self) -> None:
        """Renew the 16-bit copy, and what was prepared for products with `data`."""
        parameters_changed(self.data)
        if self.low_precision is not None:
            self.low_precision[...] = self.data

    def first_nonfinite_gradient(self) -> str | None:
        """Return the name of the first parameter with a NaN or infinite gradient."""
        isfinite = array_module(self.grad).isfinite
        for name, gradient in self.views(self.grad).items():
            if not isfinite(gradient).all():
                return name
        return None

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the parts of a vector laid out like `data`, by parameter name."""
        views = {}
        start = 0
        for name, parameter in self.parameters.items():
            end = start + parameter.data.size
            views[name] = flat[start:end].reshape(parameter.data.shape)
            start = end
        return views
