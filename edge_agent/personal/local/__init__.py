"""What a device can do alone, and how honestly that is measured: folds, intervals, baselines on raw inputs.

Here lives the yardstick that a federation has to beat. Nothing here knows an encoder or a bundle, because what these
models learn from is raw inputs.

Read in this order: `features` (hand-made features of raw inputs), `graph` (the same as operators of a file), `models`
(the best small model on them), `validation` (folds, intervals and comparisons), `details` (what lies behind one
accuracy).
"""
