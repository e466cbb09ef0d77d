"""Reverse-mode automatic differentiation: recording operations and walking back.

A primitive is a function on plain arrays that returns its result and its
vector-Jacobian product (vjp), which maps the gradient of the result to the gradients of
the inputs. Calling a primitive on tensors records a node; `Tensor.backward` walks the
nodes from the result to the leaves. The operations themselves are in `ops.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from minitransformer.engine.backend import Array, array_module, fused_kernel


@runtime_checkable
class LazyGradient(Protocol):
    """A gradient that is not an array yet: what follows may be part of computing it."""

    def dense(self) -> Array:
        """Return it as an array."""
        ...


class RowGradient(NamedTuple):
    """The gradient of a matrix [height, D] of which few rows were used, each once.

    It is zero in all others. Shapes: ids [U], rows [U, D]
    """

    ids: Array
    rows: Array
    height: int

    def dense(self) -> Array:
        matrix = array_module(self.rows).zeros(
            (self.height, *self.rows.shape[1:]), self.rows.dtype
        )
        matrix[self.ids] = self.rows
        return matrix


Gradient: TypeAlias = Array | LazyGradient
Vjp: TypeAlias = Callable[[Array], tuple[Gradient | None, ...]]


PRIMITIVES: dict[str, Callable[..., tuple[Array, Vjp]]] = {}

_recording: ContextVar[bool] = ContextVar("recording", default=True)
is_recording = _recording.get  # whether this thread records operations

# Takes the name and the body of a primitive and returns the body to run instead.
Wrapper: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
_wrapper: ContextVar[Wrapper | None] = ContextVar("wrapper", default=None)
wrapper_in_use = _wrapper.get


@contextmanager
def no_grad() -> Iterator[None]:
    """Record no operations of this thread inside the block."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


@contextmanager
def wrap_primitives(wrapper: Wrapper) -> Iterator[None]:
    """Run `wrapper(name, body)` in place of each primitive's body, in this thread."""
    token = _wrapper.set(wrapper)
    try:
        yield
    finally:
        _wrapper.reset(token)


class Node:
    """One recorded operation: its vjp, and where the gradients of its inputs go.

    A node does not hold its result, so an activation lives only while a vjp needs it.
    `grad` is the gradient of the result as far as `backward` has summed it.
    """

    __slots__ = ("__weakref__", "grad", "parents", "vjp")

    def __init__(self, parents: tuple[Node | Tensor | None, ...], vjp: Vjp) -> None:
        self.parents = parents
        self.vjp = vjp
        self.grad: Gradient | None = None

    def add_gradient(self, term: Gradient) -> None:
        """Add a term to `grad`: never in place, since others may use its memory."""
        if self.grad is None:
            self.grad = term
            return
        total = dense(self.grad)
        add = fused_kernel("add_arrays", (total,), None)
        self.grad = add(total, term) if add else total + dense(term)


class Tensor:
    """An array, and the node of the operation that computed it, if one was recorded.

    A tensor without a node is a leaf. If it requires a gradient, `backward` adds the
    gradient to `grad`, which is None at first unless the caller provides an array.
    """

    __slots__ = ("__weakref__", "data", "grad", "node", "requires_grad")

    def __init__(
        self, data: Array, requires_grad: bool = False, node: Node | None = None
    ) -> None:
        self.data = data
        self.grad: Array | None = None
        self.node = node
        self.requires_grad = requires_grad or node is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def __repr__(self) -> str:
        return f"Tensor({self.data!r}, requires_grad={self.requires_grad})"

    def add_gradient(self, term: Gradient) -> None:
        """Add a term to the gradient of this leaf, whose memory nothing shares."""
        if self.grad is None:
            self.grad = array_module(self.data).zeros_like(self.data)
        if isinstance(term, RowGradient):
            self.grad[term.ids] += term.rows
        else:
            self.grad += dense(term)

    def backward(
        self,
        gradient: Array | float | None = None,
        when_complete: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Add the gradients that flow from this tensor to the `grad` of its leaves.

        `gradient` is the derivative of the final result with respect to this tensor:
        an array of its shape, or a number where this tensor is a scalar (default 1).
        Each node is released as soon as its vjp has run, so a graph is walked once.
        `when_complete` is called with each leaf as soon as its gradient is complete.

        Raises: ValueError if the gradient is missing or of another shape, or if no
        operation was recorded; RuntimeError if the graph has been walked before.
        """
        if self.node is None:
            raise ValueError("expected the result of a recorded operation, got a leaf")
        xp = array_module(self.data)
        if gradient is None and self.shape:
            raise ValueError(f"expected a gradient of shape {self.shape}, got none")
        seed = xp.asarray(1.0 if gradient is None else gradient, dtype=self.data.dtype)
        if seed.shape != self.shape:
            raise ValueError(
                f"expected a gradient of shape {self.shape}, got {seed.shape}"
            )
        order, uses = _topological_order(self.node)
        self.node.grad = seed
        # Walk from the result to the leaves: when a node's turn comes, everything that
        # used its result has added to its gradient.
        while order:
            for leaf in _pass_on(order.pop()):
                uses[id(leaf)] -= 1
                if when_complete is not None and not uses[id(leaf)]:
                    when_complete(leaf)


def dense(gradient: Gradient | None) -> Array:
    """Return a gradient as an array."""
    return gradient.dense() if isinstance(gradient, LazyGradient) else gradient


def _origin(value: Any) -> Node | Tensor | None:
    """Return where a gradient for `value` goes: its node, itself as a leaf, or None."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return None
    return value.node or value


def _pass_on(node: Node) -> list[Tensor]:
    """Run a node's vjp, add the gradients to those of its inputs, and release it.

    Returns: the inputs that are leaves
    """
    # Take the node apart first, which frees its arrays as soon as the vjp is done.
    gradient, parents, vjp = node.grad, node.parents, node.vjp
    node.grad, node.parents, node.vjp = None, (), _released
    terms = (None,) * len(parents) if gradient is None else vjp(dense(gradient))
    for parent, term in zip(parents, terms, strict=False):  # some may be omitted
        if parent is not None and term is not None:
            parent.add_gradient(term)
    return [parent for parent in parents if isinstance(parent, Tensor)]


def _topological_order(origin: Node) -> tuple[list[Node], dict[int, int]]:
    """Return the nodes that `origin` depends on, inputs first, and the uses of leaves.

    The uses count, by the id of a leaf, how often it is the input of a node. The stack
    replaces recursion, whose depth Python limits.
    """
    order: list[Node] = []
    uses: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(origin, False)]
    while stack:
        current, inputs_done = stack.pop()
        if inputs_done:
            order.append(current)
        elif id(current) not in seen:
            seen.add(id(current))
            # Come back to this node after all nodes that it depends on.
            stack.append((current, True))
            for parent in current.parents:
                if isinstance(parent, Node):
                    stack.append((parent, False))
                elif parent is not None:
                    uses[id(parent)] = uses.get(id(parent), 0) + 1
    return order, uses


def _released(gradient: Array) -> tuple[Array | None, ...]:
    raise RuntimeError("this graph was released by an earlier backward")


def primitive(function: Callable[..., tuple[Array, Vjp]]) -> Callable[..., Tensor]:
    """Make a differentiable operation of a function on arrays.

    `function(*arrays, **options)` returns `(out, vjp)`. `vjp(g)` returns a gradient or
    None for each array parameter, omitted ones included. A gradient may share memory
    with `g` or with another gradient. `function` and `vjp` change neither the inputs
    nor `g`, and `backward` calls each vjp once. A fused kernel of the same name
    replaces the function for the arrays that it takes (`backend.fused_kernel`).
    """
    name = function.__name__
    PRIMITIVES[name] = function

    @functools.wraps(function)
    def operation(*inputs: Any, **options: Any) -> Tensor:
        # Compute on plain arrays, by a fused kernel if the device has one.
        arrays = tuple([x.data if type(x) is Tensor else x for x in inputs])
        body = fused_kernel(name, arrays, function)
        if wrapper := _wrapper.get():
            body = wrapper(name, body)
        out, vjp = body(*arrays, **options)
        # Record a node only if a gradient can flow through it.
        if _recording.get():
            parents = tuple(_origin(x) for x in inputs)
            if any(parent is not None for parent in parents):
                return Tensor(out, node=Node(parents, vjp))
        return Tensor(out)

    return operation
