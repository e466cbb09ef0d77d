"""Checkpoints changed behind the back of the package that wrote them."""

import json
from zlib import crc32

from safetensors import safe_open
from safetensors.numpy import load_file, save_file


def rewrite_checkpoint(path, change_tensors=None, **metadata):
    """Save the file again with some tensors or metadata changed.

    Changed metadata has the checksum of itself, unless `checksum` is given.
    """
    with safe_open(path, framework="np") as file:
        old = file.metadata()
    tensors = load_file(path)
    for name, change in (change_tensors or {}).items():
        tensors[name] = change(tensors[name])
    del old["checksum"]
    changed = {**old, **metadata}
    checksum = crc32(json.dumps(changed, sort_keys=True).encode())
    save_file(tensors, path, {"checksum": str(checksum), **changed})
