"""The PyTorch sides of the benchmarks do the work that this engine does."""

import numpy as np
import pytest

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer, training_loss
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.batches import Batch
from minitransformer.training.optimizer import Adam
from minitransformer.translation.batch_translation import translate_ids
from support.models import tiny_config

torch = pytest.importorskip("torch")

CONFIG = tiny_config(
    (2, 2), vocab_size=40, d_model=16, d_ff=24, num_heads=4, dropout=0.0
)


def random_batch(rng):
    source, target = rng.integers(4, 40, (3, 7)), rng.integers(4, 40, (3, 6))
    target[:, 0] = BOS_ID
    source[1, 4:], target[0, 3:] = PAD_ID, PAD_ID
    return Batch(source, target)


def test_the_loss_and_every_gradient_of_pytorch_are_those_of_this_engine(benchmark):
    """In float64, with gains and biases that are random, too."""
    rng, plain = np.random.default_rng(0), torch.get_default_dtype()
    ours, batch = Transformer(CONFIG, seed=3, dtype="float64"), random_batch(rng)
    buffer = ParameterBuffer(ours)
    buffer.data += rng.normal(0, 0.1, buffer.data.shape)
    loss = training_loss(ours, batch.source, batch.target, 0.1, None)
    loss.backward()
    torch.set_default_dtype(torch.float64)
    try:
        sides = benchmark("torch_training")
        theirs = sides.TorchTraining(ours)
        found = theirs(*sides.tensors(batch)) * batch.target_tokens
        found.backward()
    finally:
        torch.set_default_dtype(plain)
    np.testing.assert_allclose(found.item(), loss.data, rtol=1e-9)
    for parameter in theirs.parameters():  # so that they are paired as these are
        if parameter.requires_grad:
            parameter.data = parameter.grad
    buffer.data[...] = buffer.grad
    pairs = list(theirs.pairs(ours))
    assert sum(gradient.size for gradient, _ in pairs) == buffer.data.size
    for gradient, expected in pairs:
        scale = abs(gradient).max()
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-9 * scale)


@pytest.mark.slow
def test_three_updates_of_pytorch_are_those_of_this_engine(benchmark):
    rng, rate = np.random.default_rng(0), 0.01
    ours = Transformer(CONFIG, seed=1)
    updates = benchmark("torch_training").TorchUpdates(ours, 1, "pytorch")
    buffer = ParameterBuffer(ours)
    adam = Adam(buffer.data, 0.9, 0.98, 1e-9)
    for _ in range(3):
        batch = random_batch(rng)
        buffer.grad.fill(0)
        loss = training_loss(ours, batch.source, batch.target, 0.1, None)
        loss.backward(1 / batch.target_tokens)
        adam.update(buffer.grad, rate)
        got = updates.update(batch, rate) * batch.target_tokens
        assert got == pytest.approx(float(loss.data), rel=1e-4)
    copy = Transformer(CONFIG, seed=2)
    updates.model.copy_to(copy)
    learned = ParameterBuffer(copy).data
    first = ParameterBuffer(Transformer(CONFIG, seed=1)).data
    assert np.abs(learned - buffer.data).max() < 1e-3 * np.abs(learned - first).max()


@pytest.mark.parametrize("drop_finished", [False, True])
def test_beam_search_in_pytorch_finds_the_same(benchmark, drop_finished):
    model = Transformer(CONFIG, seed=3)
    decoder = benchmark("torch_decoder").TorchDecoder(model, drop_finished)
    sources = [[5, 6, 7, 8], [9, 10, 11, 12]]
    limits = [len(source) + 51 for source in sources]
    ids = torch.tensor([[*source, EOS_ID] for source in sources])
    with torch.no_grad():
        found = decoder.search(ids, limits, 4, 0.6)
    expected = translate_ids(model, sources, DecodingConfig(beam=4), 1, None)
    assert found == [list(hypotheses[0].tokens) for hypotheses in expected]
