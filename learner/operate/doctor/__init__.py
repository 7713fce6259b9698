"""Checks of a set-up, each with what to do about it."""
