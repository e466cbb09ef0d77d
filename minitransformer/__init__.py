"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minitransformer.api import Translator, load, translate
    from minitransformer.config import DecodingConfig, ModelConfig, TrainingConfig
    from minitransformer.tokenizer import Tokenizer
    from minitransformer.transformer import Transformer

__version__ = "0.1.0"

# Public name: the module that it comes from, imported when it is first asked for.
_HOMES = {
    "DecodingConfig": "config",
    "ModelConfig": "config",
    "Tokenizer": "tokenizer",
    "TrainingConfig": "config",
    "Transformer": "transformer",
    "Translator": "api",
    "load": "api",
    "translate": "api",
}

__all__ = [
    "DecodingConfig",
    "ModelConfig",
    "Tokenizer",
    "TrainingConfig",
    "Transformer",
    "Translator",
    "load",
    "translate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
