"""The pure stages of a sample, from text to packs. They import no torch and use no network."""
