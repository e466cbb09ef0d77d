"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017)."""

from typing import TYPE_CHECKING, Any

from minitransformer.settings import VERSION

if TYPE_CHECKING:
    from minitransformer.api import load, translate
    from minitransformer.model.transformer import Transformer
    from minitransformer.settings.config import ModelConfig, TrainingConfig
    from minitransformer.settings.decoding_config import (
        DecodingConfig,
        TranslationConfig,
    )
    from minitransformer.text.tokenizer import Tokenizer
    from minitransformer.translation.translator import Translator

__version__ = VERSION

# Public name: the module that it comes from, imported when it is first asked for.
_HOMES = {
    "DecodingConfig": "settings.decoding_config",
    "ModelConfig": "settings.config",
    "Tokenizer": "text.tokenizer",
    "TrainingConfig": "settings.config",
    "Transformer": "model.transformer",
    "TranslationConfig": "settings.decoding_config",
    "Translator": "translation.translator",
    "load": "api",
    "translate": "api",
}

__all__ = [
    "DecodingConfig",
    "ModelConfig",
    "Tokenizer",
    "TrainingConfig",
    "Transformer",
    "TranslationConfig",
    "Translator",
    "load",
    "translate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
