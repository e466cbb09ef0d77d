"""The engine: arrays, automatic differentiation, operations with their gradients."""
