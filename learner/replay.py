"""A step of channel B, built again from its logged answers."""
