"""What several tests share: oracles, small models, and stand-ins for hardware."""
