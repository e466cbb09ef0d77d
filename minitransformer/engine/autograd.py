"""Reverse-mode automatic differentiation: the tape, and no calculus.

A primitive is a function on plain arrays that returns its result and its
vector-Jacobian product. Calling it on tensors records a node; `Tensor.backward` walks
the nodes from the result to the leaves. What an operation computes is in `ops.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from minitransformer.engine.backend import Array, array_module, fused_kernel

Vjp: TypeAlias = Callable[[Array], tuple[Array | None, ...]]

PRIMITIVES: dict[str, Callable[..., tuple[Array, Vjp]]] = {}

_recording: ContextVar[bool] = ContextVar("recording", default=True)

# Wraps the body of each primitive that is called, by name; see `observed`.
Observer: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
_observer: Observer | None = None


@contextmanager
def no_grad() -> Iterator[None]:
    """Record nothing inside the block, in this thread."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Run `observer(name, body)` for every primitive's body, in all threads."""
    global _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = None


class Node:
    """One recorded operation: where its inputs came from and how to go back.

    It holds no result, so an activation lives only as long as a vjp captures it.
    """

    __slots__ = ("__weakref__", "parents", "vjp")

    def __init__(self, parents: tuple[Node | Tensor | None, ...], vjp: Vjp) -> None:
        self.parents = parents
        self.vjp = vjp


class Tensor:
    """An array, and the node that made it if its gradient may be asked for.

    A leaf with `requires_grad` adds incoming gradients into `grad` (None until then, or
    an array of the caller's).
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
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"Tensor({self.data!r}{grad})"

    def backward(
        self,
        gradient: Array | float | None = None,
        when_complete: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Add the derivative of this tensor to the `grad` of every leaf it came from.

        `gradient` is the derivative of the final result with respect to this tensor:
        an array of its shape, or a number where this tensor is a scalar (default 1).
        Each node is released once passed, so a graph can be walked once.
        `when_complete` is called with each leaf as soon as nothing more is added to it.

        Raises: ValueError if the gradient is missing or of another shape, or if
        nothing was recorded.
        """
        xp = array_module(self.data)
        if gradient is None and self.data.size != 1:
            raise ValueError(f"expected a gradient of shape {self.shape}, got none")
        seed = xp.asarray(1.0 if gradient is None else gradient, dtype=self.data.dtype)
        if seed.shape != self.shape:
            raise ValueError(
                f"expected a gradient of shape {self.shape}, got {seed.shape}"
            )
        origin = _origin(self)
        if origin is None:
            raise ValueError("expected a recorded tensor, got one without a gradient")
        _backpropagate(origin, seed, when_complete)


def _origin(value: Any) -> Node | Tensor | None:
    """Return where a gradient for `value` goes: its node, itself as a leaf, or None."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return None
    return value.node or value


def _backpropagate(
    origin: Node | Tensor,
    seed: Array,
    when_complete: Callable[[Tensor], None] | None,
) -> None:
    if isinstance(origin, Tensor):
        _add_to_leaf(origin, seed, fresh=False)
        return
    order, uses = _topological_order(origin)
    gradients: dict[int, Array] = {id(origin): seed}
    owned: set[int] = set()  # gradients that nothing else holds: added to in place
    while order:
        current = order.pop()
        gradient = gradients.pop(id(current))
        parents, vjp = current.parents, current.vjp
        current.parents, current.vjp = (), _released
        shares = vjp(gradient)
        for parent, share in zip(parents, shares, strict=False):
            if parent is None:
                continue
            key = id(parent)
            if isinstance(parent, Tensor):
                if share is not None:
                    _add_to_leaf(parent, share, _is_fresh(share, gradient, shares))
                uses[key] -= 1
                if when_complete is not None and not uses[key]:
                    when_complete(parent)
            elif share is None:
                continue
            elif key not in gradients:
                gradients[key] = share
                if _is_fresh(share, gradient, shares):
                    owned.add(key)
            else:
                gradients[key] = _sum(gradients[key], share, key in owned)
                owned.add(key)
        del vjp, parents, shares


def _add_to_leaf(leaf: Tensor, share: Array, fresh: bool) -> None:
    if leaf.grad is not None:
        _sum(leaf.grad, share, in_place=True)
    else:
        leaf.grad = share if fresh else share.copy()


def _sum(total: Array, share: Array, in_place: bool) -> Array:
    add = fused_kernel("accumulate", (total, share), _accumulate)
    return add(total, share, in_place)


def _accumulate(total: Array, share: Array, in_place: bool) -> Array:
    """Return total + share, written into `total` if `in_place`."""
    if in_place:
        total += share
        return total
    return total + share


def _is_fresh(share: Array, gradient: Array, shares: tuple[Array | None, ...]) -> bool:
    """Whether no other gradient lies in the same memory as `share`, one of `shares`."""
    others = [other for other in shares if other is not None and other is not share]
    alone = len(others) == sum(other is not None for other in shares) - 1
    shared = array_module(share).may_share_memory
    return alone and not any(shared(share, other) for other in (gradient, *others))


def _topological_order(origin: Node) -> tuple[list[Node], dict[int, int]]:
    """List the nodes below `origin`, inputs before results, without recursion.

    With it comes how often each leaf, by its id, is an input of one of them.
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

    `function(*arrays, **options)` returns `(out, vjp)`. `vjp(g)` returns one gradient,
    or None, for each array parameter, omitted ones too: a new array, `g`, or a view of
    `g`, but never an array that something else keeps. Neither function may change its
    inputs or `g`. Arrays for which a fused kernel of the same name is registered are
    passed to that kernel instead (`backend.fused_kernel`).
    """
    name = function.__name__
    PRIMITIVES[name] = function

    @functools.wraps(function)
    def operation(*inputs: Any, **options: Any) -> Tensor:
        arrays = tuple(x.data if isinstance(x, Tensor) else x for x in inputs)
        body = fused_kernel(name, arrays, function)
        if _observer is not None:
            body = _observer(name, body)
        out, vjp = body(*arrays, **options)
        if not _recording.get():
            return Tensor(out)
        parents = tuple(_origin(x) for x in inputs)
        if all(parent is None for parent in parents):
            return Tensor(out)
        return Tensor(out, node=Node(parents, vjp))

    return operation
