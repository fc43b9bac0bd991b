"""Runs and their rounds: selection, dispatch, aggregation, metrics, release of the encoder."""
