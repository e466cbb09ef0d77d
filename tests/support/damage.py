"""Checkpoints changed behind the back of the package that wrote them."""

from safetensors import safe_open
from safetensors.numpy import load_file, save_file


def rewrite_checkpoint(path, change_tensors=None, **metadata):
    """Save the file again with some tensors or metadata changed.

    Changed metadata has no checksum, as in old files; `checksum` may be given.
    """
    with safe_open(path, framework="np") as file:
        old = file.metadata()
    tensors = load_file(path)
    for name, change in (change_tensors or {}).items():
        tensors[name] = change(tensors[name])
    if metadata:
        del old["checksum"]
    save_file(tensors, path, {**old, **metadata})
