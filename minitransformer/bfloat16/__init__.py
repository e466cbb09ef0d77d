"""Products in bfloat16 on processors: the operations, and the library for them."""
