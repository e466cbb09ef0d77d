"""The scripts train.py and translate.py as modules, for the installed commands.

A wheel holds them in this folder. In a source tree they lie at its top, two up.
"""

from pathlib import Path

__path__.append(str(Path(__file__).parents[2]))
