"""What survives a restart: journal, checkpoints, blobs, run folders."""
