"""Whole models that are drawn, against plain NumPy, PyTorch and rounded products."""

from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minitransformer.backends import devices
from minitransformer.backends.onednn import bfloat16, int8
from minitransformer.engine import ops
from minitransformer.engine.autograd import no_grad
from minitransformer.engine.backend import register_backend, to_host
from minitransformer.model.transformer import training_loss
from support.noise import RecordedNoise, dropout_sites
from support.properties import within
from support.reference import ReferenceTransformer, derivative
from support.strategies import Case, cases


def directions(parameters, seed):
    """Return for each parameter moves of all of them, of which move i is its own."""
    rng = np.random.default_rng(seed)
    moves = {n: np.zeros((len(parameters), *p.shape)) for n, p in parameters.items()}
    for i, move in enumerate(moves.values()):
        move[i] = rng.standard_normal(move[i].shape)
    return moves


def along(gradients, moves):
    """Return the derivative along each move."""
    return sum(
        (gradients[name] * move).reshape(len(move), -1).sum(axis=1)
        for name, move in moves.items()
    )


def by_numpy(case, parameters, masks, moves):
    """Return whether the model is smooth here, logits, loss and slopes."""
    sides = case.batch.source, case.batch.target

    def loss(parameters):
        moved = ReferenceTransformer(case.config, parameters, masks)
        return moved.loss(*sides, case.smoothing)

    reference = ReferenceTransformer(case.config, parameters, masks)
    logits = reference.logits(sides[0], sides[1][:, :-1])
    slopes = derivative(loss, parameters, moves)
    return reference.is_smooth(), logits, loss(parameters), slopes


@pytest.fixture(scope="module", params=["numpy", "torch"])
def oracle(request):
    if request.param == "numpy":
        return by_numpy
    pytest.importorskip("torch").set_num_threads(1)
    from support import torch_reference

    def by_torch(case, parameters, masks, moves):
        *found, gradients = torch_reference.by_torch(case, parameters, masks)
        return *found, along(gradients, moves)

    return by_torch


@pytest.mark.properties(share=15)
@given(case=cases(dropout=True, max_pairs=5, most=12), rows=st.integers(1, 9))
def test_logits_loss_and_gradient_are_those_of_the_reference(oracle, case, rows):
    """However many rows of logits are computed at a time."""
    (model, buffer), batch = case.buffered(), case.batch
    source, target = batch.source, batch.target
    noise = RecordedNoise(case.seed)
    logits = model.logits(model(source, target[:, :-1], noise)).data
    sites = dropout_sites(case.config, *source.shape, target.shape[1] - 1)
    parameters = buffer.views(buffer.data)
    rng = np.random.default_rng(case.seed)
    moves = {n: rng.standard_normal((3, *p.shape)) for n, p in parameters.items()}
    smooth, *expected = oracle(case, parameters, noise.masks(sites), moves)
    assume(smooth)

    noise = RecordedNoise(case.seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "LOGITS_PER_CHUNK", 1)
        patch.setattr(ops, "MIN_ROWS_PER_CHUNK", rows)
        loss = training_loss(model, source, target, case.smoothing, noise)
        loss.backward()
    slopes = along(buffer.views(buffer.grad), moves)
    size = abs(expected[0]).max() + 1
    within(abs(logits - expected[0]).max(), 1e-9 * size)
    within(abs(loss.data - expected[1]), 1e-9 * size * target.size)
    # Steep softmaxes one after another amplify rounding.
    within(abs(slopes - expected[2]).max(), 1e-6 * (abs(expected[2]).max() + 1))


def test_the_reference_differentiates_as_finite_differences_do():
    rng, step = np.random.default_rng(0), 1e-6
    case = Case(settings={"vocab_size": 11}, pairs=(([4, 5], [6, 7, 8]), ([9], [])))
    start = case.model().named_parameters()
    parameters = {name: p.data for name, p in start}
    direction = {n: rng.standard_normal(p.shape) for n, p in parameters.items()}

    def loss(parameters):
        reference = ReferenceTransformer(case.config, parameters)
        return reference.loss(case.batch.source, case.batch.target, 0.1)

    up, down = (
        loss({n: p + side * direction[n] for n, p in parameters.items()})
        for side in (step, -step)
    )
    slope = derivative(loss, parameters, direction)
    assert slope == pytest.approx((up - down) / (2 * step), rel=1e-6)


# Number formats


def cast(x, dtype):
    """Round to a type, and leave an infinitesimal part as it is."""
    return x.real.astype(dtype).astype(float) + (x - x.real)


def to_bfloat16(x, axis):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")
    return cast(cast(x, np.float32), ml_dtypes.bfloat16)


def to_integers(x, axis):
    """Multiples of a 127th of the largest magnitude of a row or column."""
    step = np.maximum(abs(x.real).max(axis=axis, keepdims=True), 1e-30) / 127
    return np.rint(x.real / step) * step + (x - x.real)


# How a processor rounds the factors of a product in each format. The error of logits
# may be a share of what that changes; the error of a gradient may also be a share of
# the gradient, as rounding may change the sign of a ReLU's input.
ROUNDED = {
    "fp32": (lambda x, axis: cast(x, np.float32), 2, 1e-4),
    "bf16": (to_bfloat16, 0.5, 0.05),
    "int8": (to_integers, 0.9, None),
}

# A GPU also rounds what it stores, gradients, too: the largest relative errors of a
# factor of a product and of a stored number, and the share of a gradient as above. The
# reference multiplies such numbers by random ones near 1 (Monte Carlo arithmetic), in a
# few samples; an error may be MULTIPLE times what that changes. Functions of a GPU such
# as exp miss the last bits of float32.
GPU_ROUNDED = {
    "fp32": (2**-22, 2**-22, 1e-4),
    "tf32": (2**-11, 2**-22, 0.01),
    "bf16": (2**-8, 2**-8, 0.02),
    "fp16": (2**-11, 2**-11, 0.02),
}
SAMPLES, MULTIPLE = 4, 3


def pytest_generate_tests(metafunc):
    if "machine" in metafunc.fixturenames:
        options = metafunc.config.option
        formats = list(ROUNDED if options.device == "cpu" else GPU_ROUNDED)
        formats = [options.precision] if options.precision else formats
        metafunc.parametrize("machine", formats, indirect=True, scope="module")


@pytest.fixture(scope="module")
def machine(request):
    """An open device, whose kernels multiply the smallest matrices, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bfloat16, "MIN_SIZE", 1)
        patch.setattr(int8, "MIN_PRODUCTS", 0)
        try:
            yield devices.open_device(request.config.option.device, request.param)
        except RuntimeError as error:
            pytest.skip(str(error))
        finally:
            register_backend(np.ndarray, None)


LARGE = st.integers(16, 40)


def rms(x):
    return np.sqrt((x**2).mean())


def by_rounding(precision, reference, function, of_gradient):
    """Return what a processor should find, and the error that it may have."""
    rounding, multiple, gradient_share = ROUNDED[precision]
    share = gradient_share if of_gradient else 3e-5

    def rounded(x, matrix):
        return rounding(x, -1), rounding(matrix, -2)

    near = function(partial(reference, rounded=rounded))
    far = function(reference)
    return near, multiple * rms(near - far) + share * (rms(far) + 1e-3)


def by_noise(precision, reference, function, of_gradient):
    """Return what a GPU should find, and the error that it may have."""
    of_factor, of_stored, gradient_share = GPU_ROUNDED[precision]
    rng = np.random.default_rng(0)

    def noisy(x, error=of_stored):
        """Move x; to move its derivative has the effect of rounding its gradient."""
        return x * (1 + error * rng.uniform(-1, 1, x.shape))

    def rounded(x, matrix):
        return noisy(x, of_factor), noisy(matrix, of_factor)

    exact = function(reference)
    moved = partial(reference, rounded=rounded, stored=noisy)
    change = rms(np.array([function(moved) - exact for _ in range(SAMPLES)]))
    share = gradient_share if of_gradient else 0
    return exact, MULTIPLE * change + share * (rms(exact) + 1e-3)


@pytest.mark.properties(share=5)
@given(cases(5, least=3, scales=(1.0, 0.3), least_width=3, vocab_size=LARGE))
def test_a_format_is_as_near_as_its_rounding_of_products(machine, case):
    config, (model, buffer) = case.config, case.buffered("float32")
    exact = {name: x.astype(float) for name, x in buffer.views(buffer.data).items()}
    buffer.move_to(machine.xp, machine.low_precision)
    buffer.data_changed()
    batch = case.batch
    source, target = map(machine.xp.asarray, (batch.source, batch.target))
    oracle = by_rounding if machine.name == "cpu" else by_noise

    def check(found, function, of_gradient=False):
        """Compare with a function of a reference that is made of parameters."""
        reference = partial(ReferenceTransformer, config)
        expected, bound = oracle(machine.precision, reference, function, of_gradient)
        within(rms(found - expected), bound)

    with no_grad():
        logits = to_host(model.logits(model(source, target[:, :-1])).data)
    ids = batch.source, batch.target[:, :-1]
    check(logits, lambda reference: reference(exact).logits(*ids))

    if machine.precision == "int8":
        return  # which is for translating alone
    loss = training_loss(model, source, target, case.smoothing, None)
    loss.backward()
    moves = directions(exact, case.seed)
    slopes = along(buffer.views(to_host(buffer.grad).astype(float)), moves)
    sides = batch.source, batch.target, case.smoothing

    def expected_slopes(reference):
        return derivative(lambda p: reference(p).loss(*sides), exact, moves)

    check(slopes, expected_slopes, of_gradient=True)
