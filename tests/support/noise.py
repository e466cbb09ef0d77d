"""Dropout whose masks are known, and the places where the paper has dropout."""

import numpy as np


def dropout_sites(config, batch, source, target):
    """Each dropout in the order of Figure 1: its name, its shape and its rate.

    `source` and `target` are the padded lengths. Names are those of the reference.
    """
    heads, width, rate = config.num_heads, config.d_model, config.dropout

    def stack(side, layers, length, memories):
        yield f"{side}.embedding", (batch, length, width), rate
        for i in range(layers):
            for name, seen in memories.items():
                site, weights = f"{side}.{i}.{name}", (batch, heads, length, seen)
                yield f"{site}.weights", weights, config.attention_dropout
                yield site, (batch, length, width), rate
            site = f"{side}.{i}.feed_forward"
            yield f"{site}.relu", (batch, length, config.d_ff), config.relu_dropout
            yield site, (batch, length, width), rate

    itself = {"self_attention": source}
    both = {"self_attention": target, "cross_attention": source}
    yield from stack("encoder", config.encoder_layers, source, itself)
    yield from stack("decoder", config.decoder_layers, target, both)


class RecordedNoise:
    """A stream of dropout noise that remembers who asked, and what it answered."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)
        self.asked = []  # (shape, rate, what is kept)

    def keep_mask(self, shape, rate):
        keep = self._rng.random(shape) >= rate
        self.asked.append((shape, rate, keep))
        return keep, 1 / (1 - rate)

    def masks(self, sites):
        """Return what each site's elements were multiplied by.

        Dropout that is missing, doubled or of another shape is an error here; where it
        is displaced among sites of one shape, the reference computes something else.
        """
        sites = [site for site in sites if site[2] > 0]
        assert [(shape, rate) for shape, rate, _ in self.asked] == [
            site[1:] for site in sites
        ]
        return {
            name: keep / (1 - rate)
            for (name, _, rate), (_, _, keep) in zip(sites, self.asked, strict=True)
        }
