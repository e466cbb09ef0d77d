"""The Transformer by the operations of PyTorch, whose gradients it derives itself."""

import math

import torch
from torch.nn import functional

from support.reference import PADDING, ReferenceTransformer, sinusoids


class TorchTransformer(ReferenceTransformer):
    """Both stacks for parameters that are tensors, and masks that are arrays."""

    def drop(self, x, site):
        return x * torch.as_tensor(self.dropout.get(site, 1.0))

    def embed(self, ids, side):
        table = self.parameters["embedding.table"]
        length, width = ids.shape[1], table.shape[1]
        positions = self.parameters.get("embedding.positions")
        if positions is None:
            positions = torch.as_tensor(sinusoids(length, width))
        embedded = functional.embedding(torch.as_tensor(ids), table)
        embedded = embedded * math.sqrt(width) + positions[:length]
        return self.drop(embedded, f"{side}.embedding")

    def product(self, x, matrix):
        return x @ matrix

    def vector(self, name):
        return self.parameters[name]

    def attention(self, name, queries, memory, mask):
        def project(x, matrix):
            heads = (self.config.num_heads, -1)
            return (
                self.linear(x, f"{name}.{matrix}").unflatten(-1, heads).transpose(1, 2)
            )

        q, k = project(queries, "query"), project(memory, "key")
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        hidden = torch.as_tensor(mask) == 0
        weights = functional.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        heads = self.drop(weights, f"{name}.weights") @ project(memory, "value")
        return self.linear(heads.transpose(1, 2).flatten(2), f"{name}.output")

    def feed_forward(self, name, x):
        hidden = self.linear(x, f"{name}.weight_1", f"{name}.bias_1")
        self.kink = min(self.kink, float(hidden.detach().abs().min()))
        hidden = self.drop(functional.relu(hidden), f"{name}.relu")
        return self.linear(hidden, f"{name}.weight_2", f"{name}.bias_2")

    def add_and_norm(self, name, x, output):
        gain, bias = (self.vector(f"{name}_norm.{part}") for part in ("gain", "bias"))
        total = x + self.drop(output, name)
        self.flat += float(total.detach().var(dim=-1, correction=0).min()) < 1e-5
        return functional.layer_norm(total, gain.shape, gain, bias, eps=1e-6)

    def loss(self, source, target, label_smoothing):
        logits = self.logits(source, target[:, :-1])
        return functional.cross_entropy(
            logits.flatten(0, 1),
            torch.as_tensor(target[:, 1:]).flatten(),
            ignore_index=PADDING,
            label_smoothing=label_smoothing,
            reduction="sum",
        )


def by_torch(case, parameters, masks):
    """Return whether the model is smooth here, logits, loss and gradients."""
    tensors = {
        name: torch.tensor(values, requires_grad=True)
        for name, values in parameters.items()
    }
    reference = TorchTransformer(case.config, tensors, masks)
    source, target = case.batch.source, case.batch.target
    logits = reference.logits(source, target[:, :-1]).detach().numpy()
    loss = reference.loss(source, target, case.smoothing)
    loss.backward()
    gradients = {name: tensor.grad.numpy() for name, tensor in tensors.items()}
    return reference.is_smooth(), logits, loss.item(), gradients
