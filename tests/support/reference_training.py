"""Training in plain NumPy (sections 5.3 and 6.1), with no code of the package.

Parameters are dictionaries of arrays, as in `reference.py`. The gradient is taken by
one number after the other, which needs no formula.
"""

import math

import numpy as np

from support.reference import derivative


def gradient(loss, parameters):
    """The derivative of `loss(parameters)` by each number of each array."""
    found = {}
    for name, array in parameters.items():
        each = np.eye(array.size).reshape(array.size, *array.shape)
        slopes = derivative(loss, parameters, {name: each})  # [array.size]
        found[name] = slopes.reshape(array.shape)
    return found


def replay(
    parameters, loss, validation_loss, *, d_model, warmup, steps, average,
    learning_rate=None, beta1=0.9, beta2=0.98, epsilon=1e-9, clip_norm=math.inf,
    validate_every=1, patience=math.inf, average_by="validation",
):  # fmt: skip
    """Train: one record for each update, and the mean of the last parameters.

    `loss(parameters, step)` is the mean over the target tokens of an update. As many
    parameters are averaged as give the lowest validation loss, at most `average`, or
    more if that costs less than 0.001; the mean is None if an update had a lower one,
    and by more than that. By "number", `average` are averaged.
    """
    names, records, measured = list(parameters), [], {}
    m, v = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for t in range(1, steps + 1):
        rate = d_model**-0.5 * min(t**-0.5, t * warmup**-1.5)  # equation 3
        if learning_rate is not None:  # that at the peak, where t = warmup
            rate *= learning_rate / (d_model * warmup) ** -0.5
        g = gradient(lambda moved, t=t: loss(moved, t), parameters)
        norm = math.sqrt(sum((g[name] ** 2).sum() for name in names))
        new = {}
        for name in names:  # Adam (Kingma and Ba, 2015, algorithm 1)
            clipped = g[name] * min(1, clip_norm / norm)
            m[name] = beta1 * m[name] + (1 - beta1) * clipped
            v[name] = beta2 * v[name] + (1 - beta2) * clipped**2
            m_hat, v_hat = m[name] / (1 - beta1**t), v[name] / (1 - beta2**t)
            new[name] = parameters[name] - rate * m_hat / (np.sqrt(v_hat) + epsilon)
        record = {"loss": loss(parameters, t), "gradient_norm": norm}
        parameters = new
        records.append({**record, "learning_rate": rate, "parameters": parameters})
        if t % validate_every == 0 or t == steps:
            measured[t] = records[-1]["validation_loss"] = validation_loss(parameters)
            best = min(measured, key=measured.get)
            if len([step for step in measured if step > best]) >= patience:
                break

    def mean(n):
        last = [record["parameters"] for record in records[-n:]]
        return {name: sum(p[name] for p in last) / n for name in names}

    if average_by == "number":
        return records, mean(average)
    counts = range(1, min(average, len(records)) + 1)
    losses = {n: validation_loss(mean(n)) for n in counts}
    lowest = min(*losses.values(), *measured.values())
    equal = [n for n in counts if n > 1 and losses[n] < lowest + 0.001]
    if equal:
        return records, mean(equal[-1])
    return records, mean(1) if losses[1] < min(measured.values()) else None
