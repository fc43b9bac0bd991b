"""Torch pieces that client halves are composed of: named parts, loops, losses, augmentations."""
