"""The model of section 3: its layers, both stacks, the loss."""
