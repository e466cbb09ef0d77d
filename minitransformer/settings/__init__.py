"""Settings: every default and its range, flags made from them, named presets."""
