"""What a device can do alone, and how honestly that is measured: folds, intervals, baselines on raw inputs."""
