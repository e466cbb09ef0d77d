"""The whole model against PyTorch's, with the same weights."""

import math

import numpy as np
import pytest

from minitransformer.model.layers import sinusoids
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer, training_loss
from minitransformer.settings.config import PAD_ID, ModelConfig

torch = pytest.importorskip("torch")

CONFIG = ModelConfig(
    vocab_size=30,
    encoder_layers=2,
    decoder_layers=2,
    d_model=16,
    d_ff=24,
    num_heads=4,
    dropout=0.0,
)


def tensor(array):
    return torch.tensor(array, dtype=torch.float64)


def copy_attention(ours, theirs):
    theirs.in_proj_weight.data = torch.cat(
        [tensor(p.data.T) for p in (ours.query, ours.key, ours.value)]
    )
    theirs.out_proj.weight.data = tensor(ours.output.data.T)
    theirs.in_proj_bias.data.zero_()
    theirs.out_proj.bias.data.zero_()


def copy_layer(ours, theirs):
    copy_attention(ours.self_attention, theirs.self_attn)
    norms = [ours.self_attention_norm, ours.feed_forward_norm]
    if hasattr(ours, "cross_attention"):
        copy_attention(ours.cross_attention, theirs.multihead_attn)
        norms.insert(1, ours.cross_attention_norm)
    for i, norm in enumerate(norms, start=1):
        getattr(theirs, f"norm{i}").weight.data = tensor(norm.gain.data)
        getattr(theirs, f"norm{i}").bias.data = tensor(norm.bias.data)
    ff = ours.feed_forward
    theirs.linear1.weight.data = tensor(ff.weight_1.data.T)
    theirs.linear1.bias.data = tensor(ff.bias_1.data)
    theirs.linear2.weight.data = tensor(ff.weight_2.data.T)
    theirs.linear2.bias.data = tensor(ff.bias_2.data)


def attention_gradients(theirs):
    q, k, v = theirs.in_proj_weight.grad.chunk(3)
    output = theirs.out_proj.weight.grad
    return {"query": q.T, "key": k.T, "value": v.T, "output": output.T}


def layer_gradients(ours, theirs):
    """PyTorch's gradients under our names."""
    found = {
        f"self_attention.{k}": g
        for k, g in attention_gradients(theirs.self_attn).items()
    }
    names = ["self_attention_norm", "feed_forward_norm"]
    if hasattr(ours, "cross_attention"):
        cross = attention_gradients(theirs.multihead_attn)
        found |= {f"cross_attention.{k}": g for k, g in cross.items()}
        names.insert(1, "cross_attention_norm")
    for i, name in enumerate(names, start=1):
        found[f"{name}.gain"] = getattr(theirs, f"norm{i}").weight.grad
        found[f"{name}.bias"] = getattr(theirs, f"norm{i}").bias.grad
    found["feed_forward.weight_1"] = theirs.linear1.weight.grad.T
    found["feed_forward.bias_1"] = theirs.linear1.bias.grad
    found["feed_forward.weight_2"] = theirs.linear2.weight.grad.T
    found["feed_forward.bias_2"] = theirs.linear2.bias.grad
    return found


def test_outputs_and_every_gradient_agree():
    rng = np.random.default_rng(0)
    ours = Transformer(CONFIG, seed=3, dtype="float64")
    buffer = ParameterBuffer(ours)
    buffer.data += rng.normal(0, 0.1, buffer.data.shape)  # gains and biases too
    theirs = torch.nn.Transformer(
        16, 4, 2, 2, 24, dropout=0.0, batch_first=True, layer_norm_eps=1e-6
    ).double()
    theirs.encoder.norm = theirs.decoder.norm = None
    layers = [
        (f"{name}.{i}.", a, b)
        for name in ("encoder", "decoder")
        for i, (a, b) in enumerate(
            zip(getattr(ours, name), getattr(theirs, name).layers, strict=True)
        )
    ]
    for _, a, b in layers:
        copy_layer(a, b)
    table = tensor(ours.embedding.table.data).requires_grad_()

    source, target = rng.integers(4, 30, (3, 7)), rng.integers(4, 30, (3, 6))
    source[1, 4:], source[2, 6:], target[0, 3:] = PAD_ID, PAD_ID, PAD_ID
    loss = training_loss(ours, source, target, 0.1, None)
    loss.backward()

    def embed(ids):
        positions = tensor(sinusoids(ids.shape[1], 16))
        return table[torch.from_numpy(ids)] * math.sqrt(16) + positions

    inputs = target[:, :-1]
    padding = torch.from_numpy(source == PAD_ID)
    outputs = theirs(
        embed(source),
        embed(inputs),
        tgt_mask=torch.nn.Transformer.generate_square_subsequent_mask(
            inputs.shape[1], dtype=torch.float64
        ),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    expected = torch.nn.functional.cross_entropy(
        (outputs @ table.T).reshape(-1, 30),
        torch.from_numpy(target[:, 1:].reshape(-1)),
        ignore_index=PAD_ID,
        label_smoothing=0.1,
        reduction="sum",
    )
    expected.backward()

    used = inputs != PAD_ID
    np.testing.assert_allclose(
        ours(source, inputs).data[used], outputs.detach().numpy()[used], rtol=1e-5
    )
    np.testing.assert_allclose(loss.data, expected.item(), rtol=1e-9)
    gradients = {"embedding.table": table.grad}
    for prefix, a, b in layers:
        gradients |= {prefix + name: g for name, g in layer_gradients(a, b).items()}
    views = buffer.views(buffer.grad)
    assert views.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = np.abs(gradient.numpy()).max()
        np.testing.assert_allclose(
            views[name], gradient.numpy(), rtol=1e-5, atol=1e-9 * scale, err_msg=name
        )
