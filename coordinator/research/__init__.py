"""Commands for researchers: analysis of finished runs and reproduction of published tables."""
