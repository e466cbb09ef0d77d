"""Products in bfloat16 and int8 on processors: the operations, and their library."""
