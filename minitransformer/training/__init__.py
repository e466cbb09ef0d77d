"""Training (section 5): gradients in parallel, Adam, ranks, evaluation, costs."""
