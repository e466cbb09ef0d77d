"""Settings of everything, as frozen dataclasses, and named sets of them."""

VERSION = "0.1.0"
