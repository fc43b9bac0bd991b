"""Torch pieces that methods are composed of: named parts, loops, losses and augmentations.

Here lives what several methods share. What belongs to one method alone is in that method's file, and nothing here knows
a method, a message or a run.

Read in this order: `parts` (models of named parts, and which tensors travel), `optimizers` (PyTorch's, without its
compiler), `loops` (seeded training and evaluation), `losses`, `augment`, `finetune` (personal copies of a model),
`feature_cache` (features of a frozen encoder), `networks` (small networks of single methods), `weights` (where training
starts from), `peft` (which part of an encoder learns and travels), `precision` and `ranges`.
"""
